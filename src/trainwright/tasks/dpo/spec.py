"""The specification of preference tuning for recipes and plans: its section, its checks, its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainwright.recipe.contradiction import Contradiction
from trainwright.recipe.sections.fields import BelowHalf, Positive, Section
from trainwright.recipe.task_spec import TaskSpec

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


class DpoSection(Section):
    """The loss of preference tuning."""

    loss: Literal["dpo", "ipo", "kto"] = Field(
        "dpo",
        description="dpo: prefer the chosen answer to the rejected one (arXiv 2305.18290). ipo: with a fixed margin "
        "between means over tokens (arXiv 2310.12036). kto: each answer separately, as good or bad (arXiv "
        "2402.01306); accepts labelled rows as well as pairs.",
    )
    beta: Positive = Field(
        0.1, description="Weight of the deviation from the reference; larger values keep the model closer to it."
    )
    label_smoothing: BelowHalf = Field(
        0.0, description="dpo: probability that the answers of a pair are swapped (conservative DPO)."
    )
    desirable_weight: Positive = Field(1.0, description="kto: weight of good answers.")
    undesirable_weight: Positive = Field(1.0, description="kto: weight of bad answers.")
    reference: Literal["start", "base"] = Field(
        "start",
        description="The reference model. start: the model that training starts from. base: the model without the "
        "adapter of model.adapter.start_from.",
    )


def _check(recipe: Recipe) -> Iterator[Contradiction]:
    data, dpo = recipe.data, recipe.own(DpoSection)
    if data.long_documents == "split":
        yield Contradiction(
            ("data.long_documents", "task"), "answers to compare cannot be split; set it to auto or cut"
        )
    if data.format == "labelled" and dpo.loss != "kto":
        yield Contradiction(
            ("dpo.loss", "data.format"), f"{dpo.loss} compares two answers, but labelled rows have one; set it to kto"
        )
    if data.pack_length is not None and data.max_length <= data.pack_length < 2 * data.max_length and dpo.loss != "kto":
        yield Contradiction(
            ("data.pack_length", "data.max_length"),
            f"a pair of two answers of data.max_length {data.max_length} would not fit; raise it to "
            f"{2 * data.max_length} or lower data.max_length",
        )
    belongs = {"label_smoothing": "dpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
    for key, loss in belongs.items():
        if getattr(dpo, key) != type(dpo).model_fields[key].default and dpo.loss != loss:
            yield Contradiction((f"dpo.{key}", "dpo.loss"), f"has no effect with dpo.loss {dpo.loss}, only with {loss}")
    if dpo.reference == "base" and recipe.model.adapter.start_from is None:
        yield Contradiction(
            ("dpo.reference", "model.adapter.start_from"),
            "without an adapter to start from, the model that training starts from is the base; leave it at start",
        )


def _rows(recipe: Recipe, key: str) -> str:
    return "answers" if recipe.own(DpoSection).loss == "kto" else "pairs"


SPEC = TaskSpec(
    name="dpo",
    summary="preference tuning on compared or rated answers",
    module="trainwright.tasks.dpo.task",
    section=DpoSection,
    section_description="Preference loss; only with `task: dpo`.",
    check=_check,
    rows=_rows,
    no_validation_rows="a run on answers to compare; name rows with one answer each",
    also_called=("preference",),
)
