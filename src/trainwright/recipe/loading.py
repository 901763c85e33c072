"""Load a checked Recipe from a file, the files it includes and overrides, and write it back to YAML.

A key that has another name since the last version is read by its old one for one more version, with a notice.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainwright.errors import RequestError
from trainwright.recipe.extensions import is_file, search_beside
from trainwright.recipe.files import describe_missing_file, read_text
from trainwright.recipe.observer_spec import OBSERVERS_KEY, convert_names
from trainwright.recipe.problems import (
    check_placeholders,
    explain,
    explain_contradictions,
    extract_contradictions,
    list_invalid_keys,
)
from trainwright.recipe.registries import TASKS
from trainwright.recipe.schema import RecipeSchema, build_recipe_model
from trainwright.recipe.yaml_text import KeyPath, Origin, Problem, Tree, parse_mapping, parse_value, to_yaml
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import quote_word, say

_MAX_LINES = 100  # of a message
# The largest number of includes in total, counting repeats, and their depth: nested includes multiply.
_MOST_INCLUDED, _DEEPEST_INCLUDE = 100, 20

# Sections that may be written as one word, and the key that gets the word as its value.
_IN_ONE_WORD: dict[KeyPath, str] = {("model", "adapter"): "type"}


class Override(str):
    """A ``section.key=value`` from another place than the command line, which messages then name."""

    origin: Origin

    @classmethod
    def written(cls, text: str, origin: Origin) -> Override:
        """Return an override with the place where it was written."""
        override = cls(text)
        override.origin = origin
        return override


class LoadedRecipe(NamedTuple):
    """A recipe and where each of its values was written; defaults have no origin."""

    recipe: RecipeSchema
    origins: Mapping[KeyPath, Origin]


def split_words(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Split the words of a command line into the recipe file and the overrides. Raises RequestError for two files."""
    files = [a for a in arguments if not is_override(a)]
    if len(files) > 1:
        raise RequestError(
            f"expected one recipe, not {len(files)} ({', '.join(files)}); overrides have the form section.key=value"
        )
    return Path(files[0]) if files else None, [a for a in arguments if is_override(a)]


def is_override(word: str) -> bool:
    """Return whether a word of a command line has the form ``section.key=value``, and is not a path with "=" in it."""
    key, equals, _ = word.partition("=")
    # Without "=", ~key is an override of Hydra, which is answered like one.
    return (bool(equals) or key.startswith("~")) and "/" not in key and not os.path.exists(word)


def load_recipe(path: Path | Tree, overrides: Sequence[str] = ()) -> RecipeSchema:
    """Read the recipe at ``path`` with ``overrides`` (``section.key=value``, the value in YAML) over it.

    Raises RequestError with every problem found, one line each: the file and line (or the override), the key, the
    problem and the fix.
    """
    return load_with_origins(path, overrides).recipe


def build_recipe(overrides: Sequence[str], name: str) -> RecipeSchema:
    """Return the recipe of the overrides ``section.key=value`` alone; ``name`` replaces its file in messages."""
    return check_tree(read_merged(None, overrides), Origin(name)).recipe


def load_with_origins(path: Path | Tree, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe like load_recipe, with the origin of each value."""
    return load_tree(read_merged(path, overrides))


def load_tree(tree: Tree) -> LoadedRecipe:
    """Return the recipe of a tree that was read. Raises RequestError like load_recipe."""
    if "objectives" in tree.values and "task" not in tree.values:
        raise RequestError(
            f"{tree}: is an unlearning study, not a recipe; run trainwright unlearn-study {quote_word(tree)}"
        )
    return check_tree(tree, Origin(str(tree)))


def check_tree(tree: Tree, file: Origin) -> LoadedRecipe:
    """Validate ``tree``, after reading and merging; ``file`` is the origin of values that are written nowhere in it.

    Raises RequestError like load_recipe.
    """
    for section in list(tree.values):
        if tree.values[section] is None and _is_of_another_task(section, tree.values):
            del tree.values[section]
        elif tree.values[section] is None and section != "task":
            tree.values[section] = {}  # all keys of the section are commented out
    problems = [*tree.problems, *check_placeholders(tree, file)]
    build_recipe_model()  # an error in an installed package is not the fault of the recipe
    try:
        recipe = RecipeSchema.model_validate(tree.values)
    except ValidationError as error:
        problems += explain(error, tree, file) + _list_hidden_contradictions(error, tree, file)
    if problems:
        problems.sort(key=lambda problem: (problem.origin.source, problem.origin.line or 0))
        lines = list(dict.fromkeys(map(str, problems)))
        more = [f"and {len(lines) - _MAX_LINES:,} more problems"] if len(lines) > _MAX_LINES else []
        raise RequestError("\n".join([*lines[:_MAX_LINES], *more]))
    return LoadedRecipe(recipe, tree.origins)


def dump_recipe(recipe: RecipeSchema, origins: Mapping[KeyPath, Origin] | None = None) -> str:
    """Return the recipe as YAML with every key, including defaults, so that the text alone gives the same recipe.

    With ``origins`` (of load_with_origins), comments on the keys say where their values were written.
    """
    if origins is None:
        return to_yaml(recipe.model_dump())
    return "".join(_annotate_section(key, value, origins) for key, value in recipe.model_dump().items())


def _list_hidden_contradictions(error: ValidationError, tree: Tree, file: Origin) -> list[Problem]:
    """Return contradictions that an invalid key hides: they are checked only in sections that are valid."""
    invalid = list_invalid_keys(error, tree)
    for path in invalid:
        parent = tree.values
        for part in path[:-1]:
            parent = parent[part]
        parent.pop(path[-1], None)
    try:
        RecipeSchema.model_validate(tree.values)
    except ValidationError as hidden:
        doubtful = tuple(invalid.values())
        hidden_contradictions = [
            item for item in extract_contradictions(hidden) if not any(key.startswith(doubtful) for key in item.keys)
        ]
        return explain_contradictions(hidden_contradictions, tree, file) if invalid else []
    return []


def _annotate_section(section: str, value: object, origins: Mapping[KeyPath, Origin]) -> str:
    if not isinstance(value, dict):
        return _comment_value(to_yaml({section: value}), (section,), origins)
    lines = [_comment_value(indent(to_yaml({key: item}), "  "), (section, key), origins) for key, item in value.items()]
    return f"{section}:\n" + "".join(lines)


def _comment_value(text: str, path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    first, newline, rest = text.partition("\n")
    inside = dict.fromkeys(str(origin) for key_path, origin in origins.items() if key_path[: len(path)] == path)
    comment = str(origins[path]) if path in origins else ", ".join(inside)
    return f"{first}  # {comment or 'default'}{newline}{rest}"


def read_merged(source: Path | Tree | None, overrides: Sequence[str]) -> Tree:
    """Merge a file over its includes, and ``overrides`` (``section.key=value``) over both.

    Args:
        source: the file, or a tree read before, which is not modified; None for overrides alone.

    Raises RequestError if a file cannot be read or is not YAML, or an override is malformed.
    """
    if isinstance(source, Tree):
        tree = Tree(deepcopy(source.values), dict(source.origins), list(source.problems), source.file)
    else:
        tree = Tree() if source is None else _read_file(source, (), [])
        tree.file = source
    if tree.file is not None:
        search_beside(tree.file)
    for override in overrides:
        _merge(tree, *_read_override(override))
    return tree


def merge_values(tree: Tree, values: Mapping[str, object]) -> Tree:
    """Return ``tree`` merged with ``values`` by section and key, as given as arguments of a call."""
    base, over = read_merged(tree, ()), Tree(dict(values))
    for section, keys in values.items():
        origin = Origin(f"argument {section}")
        over.origins |= {(section, key): origin for key in keys} if isinstance(keys, dict) else {(section,): origin}
    rename_keys(over)
    _merge(base, over, 2)
    return base


def _read_file(path: Path, including: tuple[Path, ...], read: list[Path]) -> Tree:
    mapping = parse_mapping(read_text(path), str(path))
    rename_keys(mapping, silently=(path.parent / "events.jsonl").is_file())
    read.append(path)
    _find_beside(mapping, path.parent)
    tree = Tree()
    for name, origin in _take_includes(mapping):
        target = Path(os.path.normpath(path.parent / expand_user_path(name)))
        chain = (*including, path)
        if any(target.resolve() == earlier.resolve() for earlier in chain):
            circle = " -> ".join(map(str, (*chain, target)))
            mapping.problems.append(Problem(origin, f"include: circular include: {circle}"))
        elif not target.is_file():
            mapping.problems.append(Problem(origin, f"include: {describe_missing_file(target)}"))
        elif len(chain) > _DEEPEST_INCLUDE or len(read) > _MOST_INCLUDED:
            raise RequestError(
                f"{origin}: include: more than {_MOST_INCLUDED} files, or nested more than {_DEEPEST_INCLUDE} deep; "
                "include fewer"
            )
        else:
            _merge(tree, _read_file(target, chain, read))
    # A section whose keys are all commented out removes nothing from the included one.
    merged_values = {**tree.values, **mapping.values}
    empty = [key for key, value in mapping.values.items() if value is None and isinstance(tree.values.get(key), dict)]
    for key in [key for key in empty if not _is_of_another_task(key, merged_values)]:
        del mapping.values[key], mapping.origins[(key,)]
    _merge(tree, mapping)
    return tree


def _is_of_another_task(section: str, values: Mapping[str, object]) -> bool:
    """Return whether the section is of a task that the recipe does not have, so that null removes it."""
    return section in TASKS.names() and section != values.get("task")


def _find_beside(tree: Tree, folder: Path) -> None:
    """Give a file in ``model.implementation`` that is beside the recipe its whole path."""
    model = tree.values.get("model")
    implementation = model.get("implementation") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(implementation, str) and is_file(implementation):
        beside = folder / expand_user_path(implementation)
        if Path(str(beside).rpartition(":")[0]).is_file():
            model["implementation"] = str(beside.absolute())


def _take_includes(tree: Tree) -> Iterator[tuple[str, Origin]]:
    """Remove ``include`` from the tree; yield the file names in it and their places."""
    value = tree.values.pop("include", None)
    origins = {path: origin for path, origin in tree.origins.items() if path[0] == "include"}
    for path in origins:
        del tree.origins[path]
    names = [value] if isinstance(value, str) else value
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) and n for n in names)):
        tree.problems.append(Problem(origins[("include",)], "include: expected a file name or a list of them"))
        return
    for index, name in enumerate(names or []):
        yield name, origins.get(("include", index), origins[("include",)])


def _read_override(override: str) -> tuple[Tree, int]:
    """Return the tree of an override and the depth of merging: sections merge by key, values are replaced."""
    origin = override.origin if isinstance(override, Override) else Origin(f"override {override!r}")
    source = str(origin)
    written_key, equals, text = override.partition("=")
    if written_key.startswith("~"):
        raise RequestError(
            f"{source}: ~ is Hydra's; remove the key from the recipe for its default, or set it to null where that is "
            "allowed"
        )
    key = written_key.lstrip("+")  # of Hydra
    path: KeyPath = tuple(key.split("."))
    if not equals or not all(path) or key != key.strip():
        raise RequestError(f"{source}: expected section.key=value, for example train.max_steps=100")
    if path[0] == "include":
        raise RequestError(f"{source}: include is only allowed in recipe files")
    if not text.strip():
        raise RequestError(f"{source}: has no value; use {key}=null for null")
    value, tree = parse_value(text, source, path)
    for part in reversed(path):
        value = {part: value}
    tree.values = value
    tree.origins[path] = origin
    rename_keys(tree)
    if path not in tree.origins:
        path = next(iter(tree.origins))
    if key != written_key:
        tree.problems.append(
            Problem(origin, "+ is Hydra's; leave it out: an override also sets keys that the recipe does not have")
        )
    return tree, max(len(path), 2)


def _merge(base: Tree, over: Tree, depth: float = math.inf) -> None:
    """Merge ``over`` into ``base``: mappings above ``depth`` key by key, everything else replaced."""
    _merge_values(base, base.values, over.values, (), depth)
    base.origins.update(over.origins)
    base.problems.extend(over.problems)


def _merge_values(tree: Tree, base: dict[str, object], over: dict[str, object], path: KeyPath, depth: float) -> None:
    for key, value in over.items():
        full_path, earlier = (*path, key), base.get(key)
        if isinstance(value, dict) and len(full_path) < depth:
            if isinstance(earlier, str) and full_path in _IN_ONE_WORD:
                base[key] = earlier = {_IN_ONE_WORD[full_path]: earlier}
            if full_path == OBSERVERS_KEY:
                base[key] = earlier = convert_names(earlier)
            if isinstance(earlier, dict):
                _merge_values(tree, earlier, value, full_path, depth)
                continue
        if full_path == OBSERVERS_KEY:
            value = convert_names(value, earlier)
        if key in base:
            for place in [place for place in tree.origins if place[: len(full_path)] == full_path]:
                del tree.origins[place]
        base[key] = value


def _keep_value(value: Any) -> Any:
    return value


# By old key: the new one, and what the value becomes.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "logging.tensorboard": ("logging.observers.tensorboard", _keep_value),
    "logging.report": ("logging.observers.report", _keep_value),
    "logging.prometheus": (
        "logging.observers.prometheus",
        lambda address: False if address is None else {"address": address},
    ),
    "unlearn.trainable": ("model.trainable", _keep_value),
    "model.adapter.quantisation": ("model.adapter.quantization", _keep_value),
    "model.adapter.double_quantisation": ("model.adapter.double_quantization", _keep_value),
    "model.adapter.rank_stabilised": ("model.adapter.rank_stabilized", _keep_value),
}


def rename_keys(tree: Tree, *, silently: bool = False) -> None:
    """Give old keys of a tree that was just read their new names.

    Args:
        silently: without the notice: the tree is of a run of the last version.
    """
    for old_key, (new_key, convert) in _RENAMED.items():
        old, new = tuple(old_key.split(".")), tuple(new_key.split("."))
        parent: Any = tree.values
        for key in old[:-1]:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or old[-1] not in parent:
            continue
        target: Any = tree.values
        for key in new[:-1]:
            target[key] = target = convert_names(target.get(key) or {})
        if not isinstance(target, dict):
            continue  # of a type that the key cannot have
        target[new[-1]] = convert(parent.pop(old[-1]))
        for path in [path for path in tree.origins if path[: len(old)] == old]:
            tree.origins[(*new, *path[len(old) :])] = tree.origins.pop(path)
        if not silently:
            origin = tree.origins.get(new)
            _print_notice(f"note: {'' if origin is None else f'{origin}: '}{old_key} is now {new_key}")


@cache  # once for each file and key
def _print_notice(line: str) -> None:
    say(f"{line}; the old key will not be read by the next version", file=sys.stderr)
