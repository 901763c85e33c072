"""A run's first steps are compared with its plan by their speed: steps differ in their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.engine.events import Event, Notice
from trainwright.observe.plan_watch import PlanWatch, Watched

PLAN = {"predicted": {"step_time": 1.0, "tokens_per_second": 1000.0, "measured": 1.0}}


def notices(tmp_path: Path, rate: float, tokens: list[int]) -> list[Notice]:
    emitted: list[Event] = []
    watched = Watched.of(tmp_path, PLAN, replan=False)
    assert watched is not None
    watch = PlanWatch(watched, emitted.append)
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
    assert Watched.of(tmp_path, {"predicted": {"memory_bytes": 1.0}}, replan=False) is None
