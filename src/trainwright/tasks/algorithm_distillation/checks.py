"""Contradictions in recipes for Algorithm Distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainwright.recipe.contradiction import Contradiction
from trainwright.tasks.algorithm_distillation.section import WITHOUT_TEXTS, AlgorithmDistillationSection
from trainwright.tasks.algorithm_distillation.source_section import source_contradictions

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

_SECTION = "algorithm_distillation"


def check(recipe: Recipe) -> Iterator[Contradiction]:
    """Yield contradictions between the section and the task, and within the section."""
    section = recipe.own(AlgorithmDistillationSection)
    yield from _texts(recipe)
    yield from source_contradictions(section.source, f"{_SECTION}.source")
    yield from _model(section)
    yield from _compression(section)
    yield from _tasks(section)


def _texts(recipe: Recipe) -> Iterator[Contradiction]:
    stand_ins = (recipe.model, "model"), (recipe.data, "data")
    if any(section != type(section).model_validate(WITHOUT_TEXTS[name]) for section, name in stand_ins):
        yield Contradiction(
            ("model", "data", "task"),
            f"task {_SECTION} reads no texts: remove the sections model and data; set {_SECTION}.model and "
            f"{_SECTION}.histories instead",
        )
    evaluate = recipe.evaluate
    for key, field in type(evaluate).model_fields.items():
        if key != "every" and getattr(evaluate, key) != field.get_default(call_default_factory=True):
            yield Contradiction(
                (f"evaluate.{key}", "task"),
                f"has no effect with task {_SECTION}, which has {_SECTION}.trial; remove it",
            )


def _model(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    model, key = section.model, f"{_SECTION}.model"
    if model.n_embd % model.n_head:
        yield Contradiction(
            (f"{key}.n_head", f"{key}.n_embd"), f"{model.n_head} heads cannot share a width of {model.n_embd} evenly"
        )
    elif model.positions == "rotary" and model.n_embd // model.n_head % 2:
        yield Contradiction(
            (f"{key}.positions", f"{key}.n_embd", f"{key}.n_head"),
            f"rotary positions need an even head size, not {model.n_embd // model.n_head}; change model.n_embd or "
            "model.n_head, or set it to learned",
        )


# The compression that reads each key.
_READ_BY = {"compression": "", "mark_weight": "region", "latents": "latents", "trained_regions": "latents"}


def _compression(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    for key, compression in _READ_BY.items():
        if getattr(section, key) == type(section).model_fields[key].default:
            continue
        if section.context != "compressed":
            yield Contradiction(
                (f"{_SECTION}.{key}", f"{_SECTION}.context"),
                "has no effect with a full context; set context to compressed",
            )
        elif compression not in ("", section.compression):
            yield Contradiction(
                (f"{_SECTION}.{key}", f"{_SECTION}.compression"),
                f"has no effect with compression {section.compression}, only with {compression}",
            )


def _tasks(section: AlgorithmDistillationSection) -> Iterator[Contradiction]:
    train, test = section.train_tasks, section.test_tasks
    for key, tasks in (("train_tasks", train), ("test_tasks", test)):
        if isinstance(tasks, list) and (twice := [task for task in tasks if tasks.count(task) > 1]):
            yield Contradiction((f"{_SECTION}.{key}",), f"{twice[0]} is given more than once; list each task once")
    if isinstance(train, list) and test is not None and (both := [task for task in train if task in test]):
        yield Contradiction(
            (f"{_SECTION}.test_tasks", f"{_SECTION}.train_tasks"),
            f"{len(both)} tasks are in both, such as {both[0]}: test tasks must not be trained on; remove them from "
            "one",
        )
    if section.trial.last_episodes > section.trial.episodes:
        yield Contradiction(
            (f"{_SECTION}.trial.last_episodes", f"{_SECTION}.trial.episodes"),
            f"{section.trial.last_episodes} is more than trial.episodes",
        )
