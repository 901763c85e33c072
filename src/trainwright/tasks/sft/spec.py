"""The specification of supervised fine-tuning for recipes and plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainwright.recipe.sections.fields import (
    BelowOne,
    Contradiction,
    Count,
    NotNegative,
    Positive,
    RouterWeight,
    Section,
)
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


class SftSection(Section):
    """The loss of fine-tuning."""

    loss: Literal["nll", "dft", "eaft"] = Field(
        "nll",
        description="nll: the negative log-likelihood of every target. dft: the same, each weighted by the probability "
        "of its target (dynamic fine-tuning, arXiv 2508.05629). eaft: the same, each weighted by the entropy of the "
        "most probable tokens (entropy-adaptive fine-tuning, arXiv 2601.02151).",
    )
    eaft_power: NotNegative = Field(1.0, description="eaft: the power of the weight.")
    eaft_top: Count = Field(20, description="eaft: how many of the most probable tokens the entropy is of.")
    eaft_divisor: Positive = Field(3.0, description="eaft: what the entropy is divided by; 3.0 is about that of 20.")
    label_smoothing: BelowOne = Field(
        0.0,
        description="The part of a target's probability that is spread evenly over the vocabulary, in training; "
        "evaluations have the plain loss.",
    )
    router_loss: RouterWeight = 0.0


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    section = recipe.own(SftSection)
    if section.label_smoothing and section.loss != "nll":
        yield Contradiction(("sft.label_smoothing", "sft.loss"), f"has no effect with loss {section.loss}; remove it")
    for key in section.changed():
        if key.startswith("eaft_") and section.loss != "eaft":
            yield Contradiction((f"sft.{key}", "sft.loss"), "has an effect with loss eaft only; set it, or remove this")


SPEC = TaskSpec(
    name="sft",
    summary="supervised fine-tuning on conversations or text",
    module="trainwright.tasks.sft.task",
    section=SftSection,
    section_description="Loss of fine-tuning; only with `task: sft`.",
    rows=lambda recipe, key: "any",
    streams=True,
    needs=lambda recipe: Needs(of_losses=recipe.own(SftSection).loss != "nll"),
    check=_check,
    also_called=("finetune", "finetuning", "instruct", "supervised"),
)
