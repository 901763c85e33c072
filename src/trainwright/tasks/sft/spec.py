"""The specification of supervised fine-tuning for recipes and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainwright.recipe.sections.fields import Section
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


class SftSection(Section):
    """The loss of fine-tuning."""

    loss: Literal["nll", "dft"] = Field(
        "nll",
        description="nll: the negative log-likelihood of every target. dft: the same, each weighted by the probability "
        "of its target (dynamic fine-tuning, arXiv 2508.05629).",
    )


def _needs(recipe: Recipe) -> Needs:
    return Needs(of_losses=recipe.own(SftSection).loss != "nll")


SPEC = TaskSpec(
    name="sft",
    summary="supervised fine-tuning on conversations or text",
    module="trainwright.tasks.sft.task",
    section=SftSection,
    section_description="Loss of fine-tuning; only with `task: sft`.",
    rows=lambda recipe, key: "examples",
    needs=_needs,
    also_called=("finetune", "finetuning", "instruct", "supervised"),
)
