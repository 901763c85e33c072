"""What kept this process from computing."""

from __future__ import annotations

import pytest

from trainwright.machine.measured.contention import CpuContention


def test_parts_are_of_the_time_since_then() -> None:
    before = CpuContention(ran={"1": 100}, waited={"1": 50}, periods={"a": (10, 5), "b": (0, 0)}, stolen=5, all=100)
    after = CpuContention(
        ran={"1": 400, "2": 100}, waited={"1": 150, "2": 0}, periods={"a": (30, 10), "b": (10, 5)}, stolen=15, all=200
    )
    # 400 ns of running and 100 ns of waiting; 5 of 20 periods of one group and 5 of 10 of the one above it.
    assert after.since(before) == pytest.approx({"waited": 0.2, "throttled": 0.5, "stolen": 0.1})


def test_what_is_not_counted_is_left_out() -> None:
    nothing = CpuContention(ran={}, waited={}, periods={"a": (0, 0)}, stolen=0, all=0)
    assert nothing.since(nothing) == {}


def test_this_machine_answers_with_parts() -> None:
    before = CpuContention.now()
    sum(range(100_000))
    assert all(0.0 <= part <= 1.0 for part in CpuContention.now().since(before).values())


def test_the_longest_wait_is_of_a_thread_that_has_work() -> None:
    before = CpuContention(ran={"1": 0, "2": 100}, waited={"1": 0, "2": 0}, periods={}, stolen=0, all=0)
    after = CpuContention(
        ran={"1": 900, "2": 700, "3": 10}, waited={"1": 100, "2": 400, "3": 90}, periods={}, stolen=0, all=100
    )
    assert after.find_longest_wait(before) == 0.4
    assert after.find_longest_wait(after) == 0.0
