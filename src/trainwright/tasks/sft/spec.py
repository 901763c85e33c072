"""The specification of supervised fine-tuning for recipes and plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.fields import BelowOne, Section
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


class SftSection(Section):
    """The loss of fine-tuning."""

    loss: Literal["nll", "dft"] = Field(
        "nll",
        description="nll: the negative log-likelihood of every target. dft: the same, each weighted by the probability "
        "of its target (dynamic fine-tuning, arXiv 2508.05629).",
    )
    label_smoothing: BelowOne = Field(
        0.0,
        description="The part of a target's probability that is spread evenly over the vocabulary, in training; "
        "evaluations have the plain loss.",
    )


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    section = recipe.own(SftSection)
    if section.label_smoothing and section.loss != "nll":
        yield Contradiction(("sft.label_smoothing", "sft.loss"), f"has no effect with loss {section.loss}; remove it")


def _needs(recipe: RecipeSchema) -> Needs:
    return Needs(of_losses=recipe.own(SftSection).loss != "nll")


SPEC = TaskSpec(
    name="sft",
    summary="supervised fine-tuning on conversations or text",
    module="trainwright.tasks.sft.task",
    section=SftSection,
    section_description="Loss of fine-tuning; only with `task: sft`.",
    rows=lambda recipe, key: "examples",
    needs=_needs,
    check=_check,
    also_called=("finetune", "finetuning", "instruct", "supervised"),
)
