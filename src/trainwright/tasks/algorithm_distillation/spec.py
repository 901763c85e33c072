"""The specification of Algorithm Distillation for recipes and plans: its checks, rows of one length, and its own
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainwright.recipe.sections.fields import Contradiction
from trainwright.recipe.task_spec import Needs, TaskModel, TaskSpec
from trainwright.tasks.algorithm_distillation.section import (
    WITHOUT_TEXTS,
    AlgorithmDistillationSection,
    SourceAlgorithmSection,
)

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

_SECTION = "algorithm_distillation"
# Observations, actions and heads have a few dozen rows of embeddings; the exact number hardly matters.
_ROWS_OF_EMBEDDINGS = 64
_TOKENS_OF_A_STEP = {"transition": 1, "parts": 3}


def context_tokens(section: AlgorithmDistillationSection) -> int:
    """Return the tokens of a window, including all its regions, which are kept for the backward pass."""
    steps = section.context_length * _TOKENS_OF_A_STEP[section.model.layout]
    if section.context == "full":
        return steps
    if section.compression == "region":
        return 2 * (steps + 1)
    return section.trained_regions * (steps + 2 * section.latents)


def section_of(recipe: RecipeSchema) -> AlgorithmDistillationSection | None:
    """Return the task's section, or None in a recipe of another task."""
    return recipe.own(AlgorithmDistillationSection) if recipe.spec.name == SPEC.name else None


def _needs(recipe: RecipeSchema) -> Needs:
    section = recipe.own(AlgorithmDistillationSection)
    model, tokens = section.model, context_tokens(section)
    config = {
        "model_type": "gpt2",
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_positions": tokens,
        "vocab_size": _ROWS_OF_EMBEDDINGS,
        "resid_pdrop": model.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": model.dropout,
    }
    predicted = 1.0 if section.targets == "every" else 1 / tokens
    assumption = "every window is full; the model is planned as a gpt2 of its sizes"
    return Needs(own_model=TaskModel(config, tokens, predicted, assumption))


def _fill(values: dict[str, Any]) -> dict[str, Any]:
    return {**WITHOUT_TEXTS, **values}


def _inputs(recipe: RecipeSchema) -> tuple[str, str]:
    return "a fresh transformer", recipe.own(AlgorithmDistillationSection).histories


def _check(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Yield contradictions between the section and the task, and within the section."""
    section = recipe.own(AlgorithmDistillationSection)
    yield from _texts(recipe)
    yield from _source(section.source)
    yield from _model(section)
    yield from _compression(section)
    yield from _tasks(section)


def _texts(recipe: RecipeSchema) -> Iterator[Contradiction]:
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


def _source(source: SourceAlgorithmSection) -> Iterator[Contradiction]:
    key = f"{_SECTION}.source"
    for name in ("ppo", "q-learning", "ucb"):
        section = source.key_of(name)
        kind = type(getattr(source, section))
        if name != source.name and getattr(source, section) != kind():
            yield Contradiction(
                (f"{key}.{section}", f"{key}.name"),
                f"has no effect with {key}.name {source.name}; remove it, or set {key}.name to {name}",
            )
    seen = source.ppo.rollout_steps * source.streams
    if source.name == "ppo" and seen % source.ppo.batch_size:
        yield Contradiction(
            (f"{key}.ppo.batch_size", f"{key}.ppo.rollout_steps", f"{key}.streams"),
            f"{source.ppo.rollout_steps} rollout_steps x {source.streams} streams = {seen:,} steps, which is not "
            f"divisible by batch_size {source.ppo.batch_size}; change one of them",
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


SPEC = TaskSpec(
    name="algorithm_distillation",
    summary="an agent that learns in context, trained on the histories of a reinforcement-learning algorithm",
    module="trainwright.tasks.algorithm_distillation.task",
    section=AlgorithmDistillationSection,
    section_description="Histories, model and loss; only with `task: algorithm_distillation`, which has no sections "
    "model and data.",
    check=_check,
    fill=_fill,
    needs=_needs,
    inputs=_inputs,
    reads_texts=False,
    keeps_best=False,  # the loss of predicted actions does not show how well an agent learns in context
    examples=("algorithm_distillation.histories", "the file, or what windows are cut from it,"),
    length_keys="algorithm_distillation.context_length",
)
