"""The notebook runs from top to bottom, as a kernel runs it: output replaced, an event loop running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment

NOTEBOOK = ROOT / "docs" / "tutorials" / "python.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
KERNEL = """
import ast, asyncio, io, json, sys

async def cells(sources):
    shown, space = [], {"__name__": "__main__"}
    for source in sources:
        sys.stdout = io.StringIO()  # it has no descriptor, as a kernel's has none that the notebook shows
        *lines, last = ast.parse(source).body
        exec(compile(ast.Module(lines, []), "cell", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        shown.append(sys.stdout.getvalue() + ("" if value is None else repr(value)))
        sys.stdout = sys.__stdout__
    return shown

json.dump(asyncio.run(cells(json.load(open(sys.argv[1])))), open(sys.argv[2], "w"))
"""


def test_the_notebook_has_no_outputs_that_could_be_old() -> None:
    assert len(CELLS) == 6 and all(cell["outputs"] == [] for cell in CELLS)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in CELLS]))
    command = [sys.executable, "-c", KERNEL, "cells.json", "shown.json"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(MPLBACKEND="agg"), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    recipe, plan, trained, resumed, evaluated, plotted = json.loads((tmp_path / "shown.json").read_text())
    assert recipe == "<Recipe: sft>" and "chosen" in plan
    assert "step 20/20" in trained and "Run('runs/recipe-" in trained
    assert resumed.startswith("('finished', [20, 40], {") and "token_accuracy" in evaluated and "Legend" in plotted
