"""A run's first steps are compared with its plan by their speed: steps differ in their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.engine.event_reader import explain_slow_steps
from trainwright.engine.events import Event, Notice
from trainwright.machine.usage import OwnProcess
from trainwright.planning.plan_watch import PlanWatch, WatchedPlan

PLAN = {"predicted": {"step_time": 1.0, "tokens_per_second": 1000.0, "threads": 4, "measured": 1.0}}


def notices(tmp_path: Path, rate: float, tokens: list[int], threads: int = 4) -> list[Notice]:
    emitted: list[Event] = []
    watched = WatchedPlan.of(tmp_path, PLAN, replan=False)
    assert watched is not None
    watch = PlanWatch(watched, emitted.append, OwnProcess(threads))
    for step, count in enumerate(tokens, start=1):
        watch({"event": "step", "step": step, "step_time": count / rate, "tokens_per_second": rate})
    return [event for event in emitted if isinstance(event, Notice)]


@pytest.mark.parametrize("tokens", [[1000] * 12, [200, 4000] * 6, [2500] * 12])
def test_at_the_planned_speed_nothing_is_reported(tmp_path: Path, tokens: list[int]) -> None:
    assert notices(tmp_path, 1000.0, tokens) == []


@pytest.mark.parametrize(("rate", "expected", "found"), [(500.0, 1.5, 3.0), (2000.0, 1.5, 0.75)])
def test_another_speed_is_reported_in_seconds_of_these_steps(
    tmp_path: Path, rate: float, expected: float, found: float
) -> None:
    (notice,) = notices(tmp_path, rate, [1000, 2000] * 6)
    assert notice.details is not None
    assert notice.details["predicted"] == pytest.approx(expected)
    assert notice.details["measured"] == pytest.approx(found)


def test_a_plan_without_a_speed_is_not_compared(tmp_path: Path) -> None:
    assert WatchedPlan.of(tmp_path, {"predicted": {"memory_bytes": 1.0}}, replan=False) is None


def test_fewer_threads_than_planned_are_named_beside_every_other_cause(tmp_path: Path) -> None:
    (notice,) = notices(tmp_path, 500.0, [1000] * 12, threads=1)
    assert notice.details is not None
    assert "threads" in notice.details["causes"]
    assert "1 thread per process, where 4 were expected" in notice.message
    (faster,) = notices(tmp_path, 2000.0, [1000] * 12, threads=1)
    assert faster.details is not None and faster.details["causes"] == []


SLOW = {"step_time": 2.0, "tokens_per_second": 500.0, "steps": 20, "threads": 4, "processes": 1, "cores": 4}


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({}, []),
        ({"waited": 0.3, "other_cores": 1.5}, ["waited for a core 30% of the time: other programs use this machine"]),
        ({"waited": 0.3}, ["waited for a core 30% of the time: other programs use this machine"]),
        ({"waited": 0.3, "processes": 2, "other_cores": 0.0}, ["2 processes of 4 threads share 4 cores; lower"]),
        (
            {"throttled": 0.2, "waited": 0.3, "stolen": 0.25, "other_cores": 0.0},
            ["gave 25% of its CPU time", "stopped the process in 20% of its periods"],
        ),
        ({"disk": 0.5, "asleep": 0.6, "in_collectives": 0.2}, ["waited for disks 40% of the time"]),
        ({"threads": 2, "heat": 0.6}, ["heat slowed down its processors for 60%", "2 threads per process, where 4"]),
    ],
)
def test_a_slow_run_has_every_reason_that_was_measured_and_no_other(
    measured: dict[str, float], words: list[str]
) -> None:
    found = list(explain_slow_steps(PLAN["predicted"], {**SLOW, **measured}))
    assert len(found) == len(words) and all(part in line for part, line in zip(words, found, strict=True))
    assert list(explain_slow_steps(PLAN["predicted"], {**SLOW, **measured, "step_time": 1.2})) == []
