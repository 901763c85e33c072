"""The specification of unlearning for recipes and plans: its checks, its rows, and its reference model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainwright.recipe.registries import OBJECTIVES
from trainwright.recipe.sections.fields import Contradiction
from trainwright.recipe.task_spec import Needs, ReferenceModel, TaskSpec
from trainwright.tasks.unlearn.section import UnlearnData, UnlearnSection, select_data

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

_COMMON = ("objective", "gamma", "alpha", "retain_loss", "reference")
_OWN = tuple(key for key in UnlearnSection.model_fields if key not in _COMMON)


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Yield contradictions in the sections ``unlearn`` and ``data``."""
    section = recipe.own(UnlearnSection)
    yield from _check_rows(recipe, section)
    yield from _check_objective(section)
    yield from _check_reference(recipe, section)
    yield from _check_adapter(recipe, section)


def _check_rows(recipe: RecipeSchema, section: UnlearnSection) -> Iterator[Contradiction]:
    data = select_data(recipe)
    if data.train is not None:
        yield Contradiction(
            ("data.train", "task"), "has no effect with task unlearn, which uses data.forget and data.retain; remove it"
        )
    if data.forget is None:
        yield Contradiction(("data.forget", "task"), "no rows to forget; set it, or set data.benchmark")
    if data.retain is None and section.retains:
        yield Contradiction(
            ("data.retain", "unlearn.objective"),
            f"{section.objective} also trains on retain rows; set it, or set unlearn.alpha to 0",
        )
    if data.idk is None and section.facts.idk:
        yield Contradiction(
            ("data.idk", "unlearn.objective"),
            f"{section.objective} trains on refusals; set it to a file with one per line, such as I do not know that.",
        )
    if recipe.evaluate.metrics:
        yield Contradiction(
            ("evaluate.metrics", "task"),
            "unlearning has no validation rows to answer; remove it, and use `trainwright eval RUN --metrics`",
        )
    if isinstance(data.validation, str | dict):
        yield Contradiction(
            ("data.validation", "task"),
            "unlearning is measured on forget and retain rows; set it to a number of them, or to null",
        )


def _check_objective(section: UnlearnSection) -> Iterator[Contradiction]:
    name = section.objective
    for key in _OWN:
        if getattr(section, key) is not None and key not in section.facts.defaults:
            owners = ", ".join(name for name in OBJECTIVES.names() if key in OBJECTIVES.get(name).defaults)
            yield Contradiction(
                (f"unlearn.{key}", "unlearn.objective"),
                f"has no effect with unlearn.objective {name}, only with {owners}",
            )
    if section.facts.ascends and section.retain_limit is None:
        yield Contradiction(
            ("unlearn.retain_limit", "unlearn.objective"),
            f"{name} keeps the retain loss below a limit; set it in nats per token, slightly above the initial retain "
            "loss",
        )
    if section.retain_loss is not None and not section.retains:
        yield Contradiction(
            ("unlearn.retain_loss", "unlearn.alpha"),
            "has no effect if the weight of the retain loss is 0; set unlearn.alpha, or remove it",
        )
    if section.retain_loss == "activations" and section.facts.of != "activations":
        yield Contradiction(
            ("unlearn.retain_loss", "unlearn.objective"), f"{name} does not steer activations; set it to nll or kl"
        )
    if section.facts.subtracts and section.retains:
        yield Contradiction(
            ("unlearn.alpha", "unlearn.objective"),
            "what is learned from retain rows would also be subtracted; set it to 0",
        )


def _check_reference(recipe: RecipeSchema, section: UnlearnSection) -> Iterator[Contradiction]:
    keys = ("unlearn.reference", "unlearn.objective")
    if section.reference != "start" and not section.compares:
        yield Contradiction(keys, f"{section.objective} uses no reference model; remove it")
    elif section.reference == "base" and recipe.model.adapter.start_from is None:
        yield Contradiction(
            ("unlearn.reference", "model.adapter.start_from"),
            "without an adapter to start from, the model that training starts from is the base; leave it at start",
        )
    elif section.reference == "start" and section.needs_reference_model and recipe.model.adapter.start_from is not None:
        yield Contradiction(
            ("unlearn.reference", "model.adapter.start_from"),
            "training changes the adapter that it starts from, but the reference model is needed in every step; set "
            "it to base, or merge the adapter into its model first",
        )


def _check_adapter(recipe: RecipeSchema, section: UnlearnSection) -> Iterator[Contradiction]:
    adapter = recipe.model.adapter
    if adapter.type == "none":
        return
    if section.facts.subtracts and (
        adapter.type != "lora" or adapter.modules_to_save or adapter.start_from or adapter.decomposes
    ):
        yield Contradiction(
            ("unlearn.objective", "model.adapter"),
            "an adapter can only be subtracted if it is a new lora without modules_to_save",
        )


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    data = values.get("data")
    return {**values, "data": {"train": None, **data}} if isinstance(data, dict) else values


def _choose_row_kind(recipe: RecipeSchema, key: str) -> str:
    facts = recipe.own(UnlearnSection).facts
    if key != "data.forget":
        return "examples"
    return "alternates" if facts.alternates else "refused" if facts.idk else "examples"


def _needs(recipe: RecipeSchema) -> Needs:
    section = recipe.own(UnlearnSection)
    return Needs(
        sequences_per_example=1 + section.retains + section.refuses,
        last_block=section.last_block,
        of_losses=section.last_block is None,
        reference=_build_reference_model(section) if section.compares else None,
    )


def _build_reference_model(section: UnlearnSection) -> ReferenceModel:
    # If it also computes logits of retain rows, it sees the whole batch; otherwise only half of the rows.
    on_all_rows = section.facts.reference == "logits" and section.retains and section.value("retain_loss") != "nll"
    return ReferenceModel(
        every_step=section.needs_reference_model,
        own_weights=section.reference not in ("start", "base"),
        last_block=section.last_block,
        share=1.0 if on_all_rows else 0.5,
    )


SPEC = TaskSpec(
    name="unlearn",
    summary="unlearning some rows while retaining the rest",
    module="trainwright.tasks.unlearn.task",
    section=UnlearnSection,
    section_description="Unlearning settings; only with `task: unlearn`.",
    check=_check,
    fill=_fill,
    rows=_choose_row_kind,
    needs=_needs,
    data=UnlearnData,
    data_keys=("benchmark", "forget", "retain", "holdout", "idk"),
    keeps_best=False,  # its loss is lowest when everything is forgotten
    no_validation_rows=(
        "a run that unlearns; name rows to measure on, or --metrics of a benchmark, such as extraction_strength, which "
        "are then of what it was to forget"
    ),
)
