"""Load a checked Recipe from a file and the command line's overrides, and write it back to YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from pydantic import ValidationError

from trainwright.errors import RequestError
from trainwright.recipe.merging import read_merged
from trainwright.recipe.problems import explain, explain_hidden, unknown_keys
from trainwright.recipe.schema import Recipe, recipe_model
from trainwright.recipe.yaml_text import KeyPath, Origin, Problem, Tree, to_yaml

_MOST_LINES = 100  # of a message


class LoadedRecipe(NamedTuple):
    """A recipe and where each of its values was written; defaults have no origin."""

    recipe: Recipe
    origins: Mapping[KeyPath, Origin]


def load_recipe(path: Path | Tree, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at ``path`` with ``overrides`` (``section.key=value``, the value in YAML) over it.

    Raises RequestError with every problem found, one line each: the file and line (or the override), the key, the
    problem and the fix.
    """
    return load_with_origins(path, overrides).recipe


def recipe_of(overrides: Sequence[str], name: str) -> Recipe:
    """Return the recipe of the overrides ``section.key=value`` alone; ``name`` replaces its file in messages."""
    return checked(read_merged(None, overrides), Origin(name)).recipe


def load_with_origins(path: Path | Tree, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe like load_recipe, with the origin of each value."""
    return loaded(read_merged(path, overrides))


def loaded(tree: Tree) -> LoadedRecipe:
    """Return the recipe of a tree that was read. Raises RequestError like load_recipe."""
    if "objectives" in tree.values and "task" not in tree.values:
        raise RequestError(f"{tree}: is an unlearning study, not a recipe; run trainwright unlearn-study {tree}")
    return checked(tree, Origin(str(tree)))


def checked(tree: Tree, file: Origin) -> LoadedRecipe:
    """Validate ``tree``, after reading and merging; ``file`` is the origin of values that are written nowhere in it.

    Raises RequestError like load_recipe.
    """
    for section in list(tree.values):
        if tree.values[section] is None and section != "task":
            tree.values[section] = {}  # all keys of the section are commented out
    problems = list(tree.problems)
    recipe_model()  # an error in an installed package is no fault of the recipe
    try:
        recipe = Recipe.model_validate(tree.values)
    except ValidationError as error:
        problems += explain(error, tree, file) + _behind_unknown_keys(error, tree, file)
    if problems:
        problems.sort(key=lambda problem: (problem.origin.source, problem.origin.line or 0))
        lines = list(dict.fromkeys(map(str, problems)))
        more = [f"and {len(lines) - _MOST_LINES:,} more problems"] if len(lines) > _MOST_LINES else []
        raise RequestError("\n".join([*lines[:_MOST_LINES], *more]))
    return LoadedRecipe(recipe, tree.origins)


def dump_recipe(recipe: Recipe, origins: Mapping[KeyPath, Origin] | None = None) -> str:
    """Return the recipe as YAML with every key, including defaults, so that the text alone gives the same recipe.

    With ``origins`` (of load_with_origins), comments on the keys say where their values were written.
    """
    if origins is None:
        return to_yaml(recipe.model_dump())
    return "".join(_annotated(key, value, origins) for key, value in recipe.model_dump().items())


def _behind_unknown_keys(error: ValidationError, tree: Tree, file: Origin) -> list[Problem]:
    """Return contradictions that a mistyped key hides: they are checked only in sections that are valid."""
    unknown = unknown_keys(error, tree)
    for path in unknown:
        parent = tree.values
        for part in path[:-1]:
            parent = parent[part]
        parent.pop(path[-1], None)
    try:
        Recipe.model_validate(tree.values)
    except ValidationError as hidden:
        return explain_hidden(hidden, unknown, tree, file) if unknown else []
    return []


def _annotated(section: str, value: object, origins: Mapping[KeyPath, Origin]) -> str:
    if not isinstance(value, dict):
        return _commented(to_yaml({section: value}), (section,), origins)
    lines = [_commented(indent(to_yaml({key: item}), "  "), (section, key), origins) for key, item in value.items()]
    return f"{section}:\n" + "".join(lines)


def _commented(text: str, path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    first, newline, rest = text.partition("\n")
    where = str(origins[path]) if path in origins else "default"
    return f"{first}  # {where}{newline}{rest}"
