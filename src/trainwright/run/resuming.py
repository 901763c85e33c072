"""Continue a run: compare the given recipe and overrides with the run's own recipe.

What determines the losses is fixed for a run. What only distributes, measures or saves it may change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainwright.engine.checkpoints.parent import is_same
from trainwright.errors import RequestError
from trainwright.recipe.loading import LoadedRecipe, check_tree, load_recipe, load_with_origins, read_merged
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, format_key_path
from trainwright.run import run_directory
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import quote_word

# Sections and keys that may change when a run is resumed.
_FREE = (
    ("parallel",),
    ("checkpoint",),
    ("evaluate",),
    ("faults",),
    ("logging",),
    ("launch",),
    ("train", "micro_batch_size"),
    ("train", "gradient_accumulation_steps"),
    ("train", "activation_checkpointing"),
    ("train", "activation_offload"),
    ("train", "compile"),
    ("train", "deterministic"),
    ("train", "replan"),
)
_MAY_GROW = (("train", "max_steps"), ("train", "epochs"), ("train", "max_tokens"))
_DIRECTORY = ("logging", "run_directory")
_FORK = ("train", "fork")  # a recipe may name it as when the run began, or not at all
_PROCESSES = ("parallel", "num_processes")
_STRATEGY = ("parallel", "strategy")
_ACCUMULATION = ("train", "gradient_accumulation_steps")
# Keys that depend on the strategy and the number of processes.
_LAYOUT = tuple(
    ("parallel", key) for key in ("replicate_size", "reshard_after_forward", "offload_parameters", "offload_optimizer")
)
_ABSENT = object()


class ResumedRecipe(NamedTuple):
    """The recipe a run continues with, the reason for each of its values, and the keys that the user did not write."""

    recipe: RecipeSchema
    reasons: tuple[str, ...]
    chosen: tuple[str, ...]


def load_resumed_recipe(run: Path, path: Path | Tree | None, overrides: Sequence[str]) -> ResumedRecipe:
    """Return the run's own recipe, changed by ``overrides`` and the recipe at ``path``, if given.

    A value that the recipe leaves to auto keeps the run's value; an override with auto chooses it again.

    Raises:
        RequestError: a difference would make it another run; lists every such key, both values, and how to continue.
    """
    recipe_file = run / run_directory.RECIPE
    before = load_recipe(recipe_file)
    chosen_keys = run_directory.read_chosen_keys(run)
    reset = dict(_iterate_open_values(before, read_merged(path, overrides), chosen_keys))
    reset_overrides = [f"{format_key_path(key)}={json.dumps(value)}" for key, value in reset.items()]
    changed_recipe = load_with_origins(recipe_file if path is None else path, [*reset_overrides, *overrides])
    changes = [
        change
        for change in _list_changes(before, changed_recipe)
        if change.path != _FORK or not is_same(change.new, change.old)
    ]
    _refuse(run, path, [change for change in changes if not change.allowed(run)])
    tree = read_merged(recipe_file, ())
    for change in changes:
        if change.path != _DIRECTORY:
            tree.values[change.path[0]][change.path[1]] = change.new
            tree.origins[change.path] = change.origin
    for section, key in reset.keys() & set(_LAYOUT):
        del tree.values[section][key]  # a default that is written counts as asked for
    recipe = check_tree(tree, Origin(str(recipe_file))).recipe
    shown_changes = [change for change in changes if change.path != _DIRECTORY and change.path not in reset]
    lines = [line for change in shown_changes if change.new != "auto" for line in change.lines()]
    still_true = [line for line in run_directory.read_reasons(run) if _is_valid_reason(line, recipe)]
    asked_for = {format_key_path(change.path) for change in shown_changes}
    still_chosen = tuple(key for key in chosen_keys if key not in asked_for)
    return ResumedRecipe(recipe, (*still_true, *(line for line in lines if line not in still_true)), still_chosen)


class _Change(NamedTuple):
    path: KeyPath
    old: object
    new: object
    origin: Origin

    def allowed(self, run: Path) -> bool:
        if self.path == _DIRECTORY:
            return expand_user_path(str(self.new)).resolve() == run.resolve()
        if self.path in _MAY_GROW:
            numbers = isinstance(self.old, int | float) and isinstance(self.new, int | float)
            return numbers and self.new > self.old  # type: ignore[operator]
        return any(self.path[: len(free)] == free for free in _FREE)

    def differences(self, run: Path) -> Iterator[str]:
        origin = f"({self.origin})"
        if self.path == _DIRECTORY:
            yield f"{format_key_path(self.path)}: {run} in the run, now {self.new} {origin}"
        elif self.path in _MAY_GROW:
            longer = "; a run can only become longer, by the key that its recipe sets"
            yield (
                f"{format_key_path(self.path)}: {_format_value(self.old)} in the run, now {_format_value(self.new)} "
                f"{origin}{longer}"
            )
        else:
            for path, old, new in _iterate_parts(self.path, self.old, self.new):
                yield f"{format_key_path(path)}: {_format_value(old)} in the run, now {_format_value(new)} {origin}"

    def lines(self) -> Iterator[str]:
        for path, old, new in _iterate_parts(self.path, self.old, self.new):
            yield (
                f"{format_key_path(path)} {_format_value(new)}: {_format_value(old)} until the run was resumed "
                f"({self.origin})"
            )


def _list_changes(before: RecipeSchema, changed: LoadedRecipe) -> list[_Change]:
    old, new = _flatten_keys(before), _flatten_keys(changed.recipe)
    changes = []
    for path in dict.fromkeys([*new, *old]):
        was, now = old.get(path, _ABSENT), new.get(path, _ABSENT)
        origins = [origin for key, origin in changed.origins.items() if key[: len(path)] == path]
        origin = min(origins, key=lambda origin: origin.line is not None, default=None)  # an override, if there is one
        typed = origin is not None and origin.line is None
        if was != now and (now != "auto" or typed):
            changes.append(_Change(path, was, now, origin or Origin("the default")))
    return changes


def _flatten_keys(recipe: RecipeSchema) -> dict[KeyPath, object]:
    sections: dict[KeyPath, object] = {}
    for section, values in recipe.model_dump().items():
        if isinstance(values, dict):
            sections.update({(section, key): value for key, value in values.items()})
        else:
            sections[section,] = values
    return sections


def _iterate_parts(path: KeyPath, old: object, new: object) -> Iterator[tuple[KeyPath, object, object]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        yield path, old, new
        return
    for key in dict.fromkeys([*new, *old]):
        was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was != now:
            yield from _iterate_parts((*path, key), was, now)


def _iterate_open_values(before: RecipeSchema, stated: Tree, chosen: Sequence[str]) -> Iterator[tuple[KeyPath, object]]:
    """Yield the values that depended on the run's strategy and number of processes, if these change and ``stated`` does
    not set them; each with the value that leaves it open.

    Args:
        chosen: the keys whose values nobody wrote when the run began.
    """
    parallel = before.parallel
    spread = _is_requested(stated, _PROCESSES, _flatten_keys(before)[_PROCESSES])
    strategy = _is_requested(stated, _STRATEGY, parallel.strategy)
    if spread:
        # Without sharding the choice depends only on the number of processes, so it is made again for another number.
        if not look_up_strategy(parallel.strategy).shards and _look_up_value(stated, _STRATEGY) == "auto":
            yield _STRATEGY, "auto"
        if _look_up_value(stated, _ACCUMULATION) == "auto":
            yield _ACCUMULATION, "auto"
    from_or_to_one = any(_is_one_process(name) for name in (parallel.strategy, _look_up_value(stated, _STRATEGY)))
    if strategy and not spread and from_or_to_one and format_key_path(_PROCESSES) in chosen:
        yield _PROCESSES, "auto"
    if not (spread or strategy):
        return
    for key in _LAYOUT:
        if format_key_path(key) in chosen and key not in stated.origins:
            yield key, type(parallel).model_fields[key[1]].default


def _is_one_process(strategy: object) -> bool:
    return strategy in STRATEGIES.names() and look_up_strategy(str(strategy)).is_one_process


def _is_requested(stated: Tree, key: KeyPath, before: object) -> bool:
    """Return whether a value other than ``before`` is set; auto counts as set in an override, but not in a recipe."""
    origin, value = stated.origins.get(key), _look_up_value(stated, key)
    left_open = origin is None or (value == "auto" and origin.line is not None)
    return not left_open and value != before


def _look_up_value(tree: Tree, path: KeyPath) -> object:
    section = tree.values.get(path[0])
    return section.get(path[1], "auto") if isinstance(section, dict) else "auto"


def _refuse(run: Path, path: Path | Tree | None, changes: list[_Change]) -> None:
    if not changes:
        return
    resume = f"trainwright train --resume {quote_word(run)}"
    if path is None:
        first = f"--resume {quote_word(run)}: these values cannot change when a run is resumed"
        fix = "remove the override"
    else:
        first = f"{path}: differs from {run}, the run to resume"
        fix = f"restore the value, or leave out the recipe ({resume})"
    lines = "".join(f"\n  {line}" for change in changes for line in change.differences(run))
    raise RequestError(f"{first}{lines}\n{fix}, or start a new run (without --resume)")


def _is_valid_reason(reason: str, recipe: RecipeSchema) -> bool:
    """Return whether a line of the run's plan still gives the reason for a value of its recipe."""
    key, _, rest = reason.partition(" ")
    section, _, name = key.rstrip(":").partition(".")
    values = getattr(recipe, section, None)
    if not hasattr(values, name):
        return True  # of a value set over the recipe
    return (
        not key.endswith(":")
        and re.match(rf"{re.escape(_format_value(getattr(values, name)))}(?!\w)", rest) is not None
    )


def _format_value(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
