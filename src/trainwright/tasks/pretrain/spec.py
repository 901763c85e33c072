"""The specification of pretraining for recipes and plans: its section, its checks, and its needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainwright.recipe.sections.fields import Contradiction, NotNegative, RouterWeight, Section
from trainwright.recipe.task_spec import Needs, TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


class PretrainSection(Section):
    """How to divide a corpus into examples, and the z-loss."""

    windows: Literal["documents", "contiguous"] = Field(
        "documents",
        description="How documents become examples of at most data.max_length tokens. documents: each example is "
        "from one document; short examples are packed into rows of data.pack_length and do not attend to each other. "
        "contiguous: cut from all documents concatenated with end-of-text tokens, as for GPT-2; data.validation is "
        "then the end of the corpus.",
    )
    z_loss: NotNegative = Field(
        0.0,
        description="Weight of the z-loss, the squared logarithm of the softmax denominator, which keeps logits from "
        "drifting (arXiv 2204.02311, section 5). Not part of the validation loss.",
    )
    router_loss: RouterWeight = 0.0


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    """Set the pack length to the window length by default."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    length = data.get("max_length", 1024)
    if "pack_length" in data or not isinstance(length, int):
        return values
    return {**values, "data": {**data, "pack_length": length}}


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    if recipe.data.deduplicate:
        why = "documents become one stream of tokens; write them without duplicates by trainwright data prepare"
        yield Contradiction(("data.deduplicate", "task"), why)
    if recipe.data.long_documents in ("cut", "drop"):
        why = "pretraining truncates and leaves out no documents; set it to auto or split"
        yield Contradiction(("data.long_documents", "task"), why)
    if recipe.model.chat_template is not None:
        why = "pretraining texts have no turns, so a chat template has no effect; remove it"
        yield Contradiction(("model.chat_template", "task"), why)
    if recipe.evaluate.metrics:
        why = "pretraining texts contain no prompts to answer; remove it"
        yield Contradiction(("evaluate.metrics", "task"), why)


SPEC = TaskSpec(
    name="pretrain",
    summary="language modeling on a text corpus",
    module="trainwright.tasks.pretrain.task",
    section=PretrainSection,
    section_description="How to divide the corpus into examples; only with `task: pretrain`.",
    check=_check,
    fill=_fill,
    needs=lambda recipe: Needs(full=recipe.own(PretrainSection).windows == "contiguous"),
    corpus=True,
    streams=True,
    no_validation_rows="a pretraining run, whose validation loss is in its events; name other rows",
    also_called=("pt", "pretraining", "clm"),
)
