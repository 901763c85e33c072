"""Nothing but a strategy's own folder and the registries knows a strategy by its name; others read its spec."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainwright
from trainwright.parallel.strategy import Strategy
from trainwright.planning.memory.strategies import StrategyMemory, load_memory_model
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.recipe.strategy_spec import load_strategies, look_up_strategy

SOURCES = Path(trainwright.__file__).parent
FAMILY = re.compile(r"zero")  # what the names of several begin with


def special_cases(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """The lines that decide by a strategy's name: compared, matched, a key, a part of a name, an alternative."""
    for node in ast.walk(tree):
        if any(isinstance(one, ast.Constant) and one.value in names for one in _decisive(node)):
            yield node.lineno  # type: ignore[attr-defined]


def _decisive(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            parts: list[ast.expr | None] = [node.left, *node.comparators]
        case ast.MatchValue():
            parts = [node.value]
        case ast.Dict():
            parts = [*node.keys]
        case ast.Subscript():  # of a table, or the alternatives of a Literal
            parts = [node.slice]
        case ast.Call(ast.Attribute(attr="startswith" | "removeprefix" | "endswith" | "get" | "index")):
            parts = [*node.args]
        case ast.Assign() | ast.AnnAssign() if isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            parts = [node.value]  # alternatives that something is looked for in
        case _:
            return
    for part in parts:
        if part is not None:
            yield from _alternatives(part)


def _alternatives(part: ast.expr) -> Iterator[ast.expr]:
    for one in part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else ():
        yield from _alternatives(one)
    yield part


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("parallel.strategy == 'ddp'", 1),
        ("'single' in (one, other)", 1),
        ("if choice.strategy in ('single', 'ddp'): pass", 1),
        ("{'fsdp': 1}", 1),
        ("x['zero1']", 1),
        ("name: Literal['auto', 'single', 'ddp']", 1),
        ("strategy.startswith('zero')", 1),
        ("table.get('fsdp')", 1),
        ("match name:\n    case 'zero3': pass", 1),
        ("_SAME = ('single', 'ddp')", 1),
        ("Choice('fsdp', 2)", 0),
        ("draft.set('parallel.strategy', 'ddp')", 0),
        ("print('use parallel.strategy ddp')", 0),
    ],
)
def test_special_cases_are_found(source: str, count: int) -> None:
    assert len(list(special_cases(ast.parse(source), _names()))) == count


def test_no_special_case_of_a_strategy_is_outside_its_folder() -> None:
    own = {"/".join(spec.implementation.split(":")[0].split(".")[1:-1]) for spec in load_strategies().values()}
    assert own == {"parallel/replicated", "parallel/fsdp", "parallel/zero"}
    found, names = [], _names()
    for file in sorted(SOURCES.rglob("*.py")):
        place = file.relative_to(SOURCES).as_posix()
        if place != "recipe/registries.py" and not any(place.startswith(f"{folder}/") for folder in own):
            text = file.read_text("utf-8")
            if any(f'"{name}"' in text for name in names):
                found += [f"{place}:{line}" for line in special_cases(ast.parse(text), names)]
    assert found == []


def _names() -> set[str]:
    return {*STRATEGIES.names(), *(found[0] for name in STRATEGIES.names() if (found := FAMILY.match(name)))}


def test_the_specs_import_no_torch() -> None:
    code = (
        "from trainwright.recipe.strategy_spec import load_strategies; load_strategies();"
        "from trainwright.planning.memory.strategies import load_memory_model; load_memory_model('zero3');"
        "import sys; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_spec_names_code_and_keys_that_exist(name: str) -> None:
    spec = look_up_strategy(name)
    module, _, attribute = spec.implementation.partition(":")
    implementation = getattr(importlib.import_module(module), attribute)
    methods = [one for one, member in vars(Strategy).items() if callable(member) and not one.startswith("_")]
    assert methods and not [one for one in methods if not callable(getattr(implementation, one, None))]
    assert issubclass(load_memory_model(name), StrategyMemory)
    assert {*spec.keys, *(key for layout in spec.layouts for key in layout)} <= set(ParallelSection.model_fields)
