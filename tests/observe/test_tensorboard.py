"""TensorBoard's files, read back with its own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import environment
from trainwright.run.observers.tensorboard import TensorBoardObserver


def feed(directory: Path, first: int, last: int, resumed_from: int | None = None) -> None:
    observer = TensorBoardObserver(directory)
    observer({"event": "start", "resumed_from": resumed_from})
    for step in range(first, last + 1):
        observer({"event": "step", "step": step, "loss": float(step), "learning_rate": 0.1})
    observer({"event": "evaluate", "step": last, "metrics": {"loss": 1.25}})
    observer({"event": "generate", "step": last, "prompt": "Hello?", "text": "Hi."})
    observer({"event": "finish", "status": "finished", "step": last})


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(name)]


def test_curves_and_texts_are_written(tmp_path: Path) -> None:
    feed(tmp_path, 1, 3)
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(tmp_path, "evaluate/loss") == [(3, 1.25)]


def test_resumed_run_replaces_the_steps_it_does_over(tmp_path: Path) -> None:
    feed(tmp_path, 1, 5)
    feed(tmp_path, 3, 4, resumed_from=2)
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_run_that_begins_anew_before_its_first_checkpoint_replaces_all_it_did(tmp_path: Path) -> None:
    feed(tmp_path, 1, 5)
    feed(tmp_path, 1, 2)
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_nothing_of_tensorboard_is_imported_before_the_first_step(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from trainwright.run.observers.tensorboard import TensorBoardObserver\n"
        "TensorBoardObserver(Path('x'))({'event': 'start', 'resumed_from': None})\n"
        "print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
