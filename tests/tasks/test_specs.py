"""Nothing but a task's own folder and the registries knows a task by its name; others read its spec."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainwright
from trainwright.recipe.registries import TASKS
from trainwright.recipe.schema import RecipeSchema, build_recipe_model
from trainwright.recipe.task_spec import TaskSpec

SOURCES = Path(trainwright.__file__).parent


def special_cases(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """The lines where a name is compared, matched, a key, or an attribute of something called ``recipe``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in names and ast.unparse(node.value).endswith("recipe"):
                yield node.lineno
        elif any(isinstance(one, ast.Constant) and one.value in names for one in _decisive(node)):
            yield node.lineno  # type: ignore[attr-defined]


def _decisive(node: ast.AST) -> Iterator[ast.AST]:
    """What a node decides by: both sides of a comparison, a pattern, keys."""
    match node:
        case ast.Compare(ast.Attribute(attr="loss" | "objective")):
            return  # of preference tuning and of unlearning, one of which is called dpo as well
        case ast.Compare():
            parts: list[ast.expr | None] = [node.left, *node.comparators]
        case ast.MatchValue():
            parts = [node.value]
        case ast.Dict():
            parts = [*node.keys]
        case ast.Subscript():
            parts = [node.slice]
        case _:
            return
    for part in parts:
        if part is not None:
            yield from ast.walk(part) if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("recipe.task == 'dpo'", 1),
        ("if task in ('sft', 'dpo'): pass", 1),
        ("{'unlearn': 1}", 1),
        ("x['pretrain']", 1),
        ("match task:\n    case 'sft': pass", 1),
        ("recipe.unlearn is None", 1),
        ("found.recipe.dpo", 1),
        ("section.loss == 'dpo'", 0),
        ("print('sft')", 0),
    ],
)
def test_special_cases_are_found(source: str, count: int) -> None:
    assert len(list(special_cases(ast.parse(source), {*TASKS.names()}))) == count


def test_no_special_case_of_a_task_is_outside_its_folder() -> None:
    names = {*TASKS.names()}
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        inside = file.relative_to(SOURCES).parts
        if inside != ("recipe", "registries.py") and not (inside[0] == "tasks" and inside[1] in names):
            text = file.read_text(encoding="utf-8")
            if any(f'"{name}"' in text or f".{name}" in text for name in names):
                found += [f"{'/'.join(inside)}:{line}" for line in special_cases(ast.parse(text), names)]
    assert found == []


def test_the_specs_import_no_torch() -> None:
    seen = (
        "from trainwright.recipe.schema import build_recipe_model; build_recipe_model(); import sys; print('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True).stdout == "False\n"


def test_the_sections_of_a_recipe_are_those_of_the_specs() -> None:
    sections = {name for name in TASKS.names() if TASKS.get(name).section is not None}
    assert set(build_recipe_model().model_fields) == {*RecipeSchema.model_fields, *sections}


@pytest.mark.parametrize("name", TASKS.names())
def test_every_spec_names_code_that_builds_the_task(name: str) -> None:
    from importlib import import_module

    module = import_module(TASKS.get(name).module)
    assert callable(module.build) and callable(module.prepare_once)


def test_a_task_adds_keys_and_changes_none() -> None:
    theirs = {"data": {"train": "other rows", "max_length": 8}, "train": {"epochs": 2}, "seed": None}
    spec = TaskSpec(name="copy", summary="copying", module="copying", fill=lambda values: {**values, **theirs})
    found = spec.fill_values({"data": {"train": "rows.jsonl"}, "train": None})
    assert found == {"data": {"train": "rows.jsonl", "max_length": 8}, "train": None, "seed": None}
