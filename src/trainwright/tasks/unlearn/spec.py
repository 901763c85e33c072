"""The specification of unlearning for recipes and plans: its rows, and its reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.recipe.task_spec import Needs, ReferenceModel, RowKind, TaskSpec
from trainwright.tasks.unlearn.checks import check
from trainwright.tasks.unlearn.section import UnlearnSection

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    data = values.get("data")
    return {**values, "data": {"train": None, **data}} if isinstance(data, dict) else values


def _rows(recipe: Recipe, key: str) -> RowKind:
    return "refused" if key == "data.forget" and recipe.own(UnlearnSection).facts.idk else "examples"


def _needs(recipe: Recipe) -> Needs:
    section = recipe.own(UnlearnSection)
    trainable = None if section.trainable is None else (section.trainable, "unlearn.trainable")
    return Needs(
        documents=1 + section.retains + section.refuses,
        last_block=section.last_block,
        trainable=trainable,
        reference=_reference(section) if section.compares else None,
    )


def _reference(section: UnlearnSection) -> ReferenceModel:
    # If it also computes logits of retain rows, it sees the whole batch; otherwise only half of the rows.
    whole = section.facts.reference == "logits" and section.retains and section.value("retain_loss") != "nll"
    return ReferenceModel(
        every_step=section.needs_reference_model,
        own_weights=section.reference not in ("start", "base"),
        last_block=section.last_block,
        share=1.0 if whole else 0.5,
    )


SPEC = TaskSpec(
    name="unlearn",
    summary="unlearning some rows while retaining the rest",
    module="trainwright.tasks.unlearn.task",
    section=UnlearnSection,
    section_description="Unlearning settings; only with `task: unlearn`.",
    check=check,
    fill=_fill,
    rows=_rows,
    needs=_needs,
    data_keys=("benchmark", "forget", "retain", "holdout", "idk"),
    keeps_best=False,  # its loss is lowest when everything is forgotten
    no_validation_rows=(
        "a run that unlearns; name rows to measure on, or --metrics of a benchmark, such as extraction_strength, which "
        "are then of what it was to forget"
    ),
)
