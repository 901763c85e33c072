"""How much longer a run is said to take."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.run.observers import progress
from trainwright.run.observers.progress import Remaining


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def run(self, left: Remaining, *events: tuple[float, dict[str, Any]]) -> None:
        for seconds, event in events:
            self.now += seconds
            left.see(event)


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number}


def evaluation(number: int) -> list[tuple[float, dict[str, Any]]]:
    """30 s, and 10 s for two samples."""
    samples = [(5.0, {"event": "generate", "step": number, "prompt": "", "text": ""})] * 2
    return [(30.0, {"event": "evaluate", "step": number, "metrics": {}}), *samples]


def test_steps_evaluations_samples_checkpoints_and_export_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    left = Remaining({"max_steps": 10, "evaluate_every": 4, "checkpoint_every": 5})
    clock.run(left, *evaluation(0), (9.0, step(1)))
    # Nine steps by the first, which is taken for all of them until there is a second; evaluations of 4, 8 and 10.
    assert left.after(1, 9.0) == 9 * 9.0 + 3 * 40.0
    clock.run(left, *((1.0, step(number)) for number in range(2, 5)))
    assert left.after(4, 1.0) == 6 * 1.0 + 3 * 40.0  # that of step 4 is still to come
    clock.run(
        left, *evaluation(4), (1.0, step(5)), (6.0, {"event": "checkpoint", "step": 5, "path": "", "seconds": 6.0})
    )
    clock.run(left, *((1.0, step(number)) for number in (6, 7)))
    assert left.after(7, 1.0) == 3 * 1.0 + 2 * 40.0 + 2 * 6.0  # a checkpoint at the end, and the model
    clock.run(left, (1.0, step(8)), *evaluation(8), (1.0, step(9)), (1.0, step(10)))
    assert left.after(10, 1.0) == 40.0 + 2 * 6.0


def test_what_has_no_schedule_goes_on_as_often_as_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    left = Remaining({"max_steps": 40, "evaluate_every": None, "checkpoint_every": None})
    for number in range(1, 21):
        clock.run(left, (1.0, step(number)))
        if number % 5 == 0:
            clock.run(left, (3.0, {"event": "checkpoint", "step": number, "path": "", "seconds": 3.0}))
    clock.run(left, (1.0, step(21)))
    assert left.after(21, 1.0) == pytest.approx(19 * 1.0 + (4 / 21 * 19 + 1) * 3.0)


def test_a_resumed_run_knows_what_its_evaluations_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    past = [{"event": "evaluate", "step": 0, "metrics": {}, "seconds": 20.0}]
    left = Remaining({"max_steps": 10, "evaluate_every": None}, past)
    clock.run(left, (1.0, step(6)))
    assert left.after(6, 1.0) == 4 * 1.0 + 20.0
