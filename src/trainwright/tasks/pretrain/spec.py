"""The specification of pretraining for recipes and plans: its section, its checks, and its needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.fields import NotNegative, Section
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


class PretrainSection(Section):
    """How to divide a corpus into examples, and the z-loss."""

    windows: Literal["documents", "contiguous"] = Field(
        "documents",
        description="An example is at most data.max_length tokens. documents: of one document, and shorter ones share "
        "a row of data.pack_length without seeing each other. contiguous: of all documents one after another, each "
        "followed by the end-of-text token, as GPT-2 was trained; data.validation is then the end of the corpus.",
    )
    z_loss: NotNegative = Field(
        0.0,
        description="Adds so much of the square of the logarithm of the softmax's denominator to the loss of every "
        "target, so that logits do not drift (arXiv 2204.02311, section 5). The validation loss is without it.",
    )


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    """Set the pack length to the window length by default."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    length = data.get("max_length", 1024)
    if "pack_length" in data or not isinstance(length, int):
        return values
    return {**values, "data": {**data, "pack_length": length}}


def _check(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.data.long_documents == "cut":
        why = "pretraining loses nothing of a document; set it to auto or to split"
        yield Contradiction(("data.long_documents", "task"), why)
    if recipe.model.chat_template is not None:
        why = "texts have no turns to put a template around; remove it"
        yield Contradiction(("model.chat_template", "task"), why)
    if recipe.evaluate.metrics:
        why = "texts ask nothing that could be answered; remove it"
        yield Contradiction(("evaluate.metrics", "task"), why)


def _needs(recipe: Recipe) -> Needs:
    return Needs(full=recipe.own(PretrainSection).windows == "contiguous")


SPEC = TaskSpec(
    name="pretrain",
    summary="learning a corpus of text",
    module="trainwright.tasks.pretrain.task",
    section=PretrainSection,
    section_description="How the corpus becomes examples. With task pretrain only.",
    check=_check,
    fill=_fill,
    needs=_needs,
    corpus=True,
    no_validation_rows="a pretraining, whose validation loss is in its events; name other rows",
    also_called=("pt", "pretraining", "clm"),
)
