"""The notebook runs from top to bottom in a real kernel, with its event loop, output streams and interrupts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, environment, wait_for

MISSING = "needs nbclient and ipykernel, which `make install` installs"
nbformat = pytest.importorskip("nbformat", reason=MISSING)
nbclient = pytest.importorskip("nbclient", reason=MISSING)
pytest.importorskip("ipykernel", reason=MISSING)

NOTEBOOK = nbformat.read(ROOT / "docs" / "tutorials" / "python.ipynb", as_version=4)
CELLS = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
RECIPE = CELLS[0].source
LONG = """
try:
    settings = "train.max_steps=100000", "train.compile=false", "logging.run_directory=runs/long"
    tw.train(recipe, *settings, progress=True)
except tw.Stopped as stopped:
    print(stopped, stopped.run)
"""
AWAITED = """
import asyncio, signal
run = await asyncio.to_thread(tw.train, recipe, "train.max_steps=2", "data.validation=null", progress=True)
run.status, asyncio.get_running_loop().is_running(), signal.getsignal(signal.SIGUSR1)
"""


def run(notebook: Any, directory: Path, interrupt_at: Path | None = None) -> list[Any]:
    """The code cells of the notebook with their outputs, run in ``directory`` by a new kernel.

    ``interrupt_at``: the kernel is interrupted once, when training has written a step into this file.
    """
    home = directory / "jupyter"
    variables = environment(IPYTHONDIR=str(home), JUPYTER_RUNTIME_DIR=str(home), JUPYTER_DATA_DIR=str(home))
    variables.pop("MPLBACKEND", None)  # the kernel sets its own
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": directory}}, timeout=400
    )
    if interrupt_at is not None:
        threading.Thread(target=interrupt, args=(client, interrupt_at), daemon=True).start()
    client.execute(env=variables)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def interrupt(client: Any, at: Path) -> None:
    """What the button of a notebook does: a signal to the kernel's process group."""
    wait_for(lambda: at.is_file() and '"event": "step"' in at.read_text())
    os.killpg(client.km.provisioner.pid, signal.SIGINT)


def streams(cell: Any) -> str:
    """What the cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def result(cell: Any) -> str:
    """The value of its last line, as shown."""
    return "".join(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result")


def test_the_notebook_has_no_outputs_that_could_be_old() -> None:
    assert len(CELLS) == 6 and all(cell.outputs == [] for cell in CELLS)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    recipe, plan, trained, resumed, evaluated, plotted = run(nbformat.from_dict(NOTEBOOK), tmp_path)
    assert result(recipe) == "<Recipe: sft>" and "chosen" in streams(plan)
    assert "step 20/20" in streams(trained) and "Run('runs/recipe-" in result(trained)
    assert result(resumed).startswith("('finished',\n [20, 40],\n {'loss': ") and streams(resumed) == ""
    assert "token_accuracy" in streams(evaluated) and "Legend" in result(plotted)
    images = [output.data for output in plotted.outputs if output.output_type == "display_data"]
    assert [sorted(image) for image in images] == [["image/png", "text/plain"]]


@pytest.mark.slow
def test_interrupting_the_kernel_stops_the_run_after_a_checkpoint_and_cells_can_await(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (RECIPE, LONG, AWAITED)])
    _, stopped, awaited = run(notebook, tmp_path, interrupt_at=tmp_path / "runs" / "long" / "events.jsonl")
    assert "stopping: " in streams(stopped), streams(stopped)
    assert streams(stopped).endswith("--resume runs/long runs/long\n")
    assert list((tmp_path / "runs" / "long" / "checkpoints").iterdir())
    assert "step 2/2" in streams(awaited) and result(awaited).startswith("('finished', True, ")
