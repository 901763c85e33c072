"""Reading events back as one history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainwright.engine.event_reader import find_resumed_step, read_events, read_status

AT = {"time": 1.0}


def write(path: Path, events: list[dict[str, Any]], cut: str = "") -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + cut)
    return path


def steps(first: int, last: int, session: int) -> list[dict[str, Any]]:
    return [
        {**AT, "event": "step", "step": step, "loss": float(session), "step_time": 1.0}
        for step in range(first, last + 1)
    ]


def losses(path: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_events(path) if event["event"] == "step"]


def start(resumed_from: object = None) -> dict[str, Any]:
    return {**AT, "event": "start", "resumed_from": resumed_from}


def test_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "events.jsonl", [start(), *steps(1, 2, 1)], cut='{"event": "step", "st')
    assert losses(path) == [(1, 1.0), (2, 1.0)]


def test_steps_done_over_after_a_resume_are_replaced(tmp_path: Path) -> None:
    events = [
        start(),
        *steps(1, 5, 1),
        start(3),
        *steps(4, 6, 2),
        start("checkpoints/step-00000005"),
        *steps(6, 7, 3),
    ]
    path = write(tmp_path / "events.jsonl", events)
    assert losses(path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0), (7, 3.0)]


def test_evaluations_and_checkpoints_done_over_are_replaced_too(tmp_path: Path) -> None:
    evaluate = {**AT, "event": "evaluate", "step": 4, "metrics": {"loss": 1.0}}
    kept = {**AT, "event": "checkpoint", "step": 2, "path": "p", "seconds": 1.0}
    path = write(tmp_path / "events.jsonl", [start(), kept, evaluate, start(2), evaluate])
    assert [event["event"] for event in read_events(path)] == ["start", "checkpoint", "start", "evaluate"]


def test_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    evaluate = {**AT, "event": "evaluate", "step": 0, "metrics": {"loss": 1.0}}
    path = write(tmp_path / "events.jsonl", [start(), evaluate, *steps(1, 3, 1), start(), evaluate, *steps(1, 2, 2)])
    assert losses(path) == [(1, 2.0), (2, 2.0)]
    assert [event["event"] for event in read_events(path)].count("evaluate") == 1


def test_a_finished_run_that_was_made_longer_is_not_finished(tmp_path: Path) -> None:
    finish = {**AT, "event": "finish", "step": 3, "status": "finished"}
    ended = [start(), *steps(1, 3, 1), finish]
    assert read_status(tmp_path) == "unfinished"
    for events, status in (
        (ended, "finished"),
        ([*ended, start(3), *steps(4, 5, 2)], "unfinished"),
        ([*ended, start(3), *steps(4, 5, 2), finish | {"step": 5, "status": "stopped"}], "stopped"),
    ):
        write(tmp_path / "events.jsonl", events)
        assert read_status(tmp_path) == status


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    path = write(
        tmp_path / "events.jsonl", [{**AT, "event": "evaluate", "step": 1, "metrics": {"loss": "nan", "x": "inf"}}]
    )
    metrics = read_events(path)[0]["metrics"]
    assert math.isnan(metrics["loss"]) and metrics["x"] == math.inf


@pytest.mark.parametrize(("value", "step"), [(None, None), (0, 0), (40, 40), ("runs/x/checkpoints/step-00000040", 40)])
def test_resumed_step(value: object, step: int | None) -> None:
    assert find_resumed_step(start(value)) == step
