from __future__ import annotations

import math
from typing import Any

import pytest

from trainwright.engine.optimizer import Schedule
from trainwright.recipe.schema import OptimizerSection


def rates(steps: int, **settings: Any) -> list[float]:
    schedule = Schedule(OptimizerSection(learning_rate=1.0, **settings), steps)
    return [schedule(step) for step in range(1, steps + 1)]


def test_constant() -> None:
    assert rates(4, schedule="constant") == [1.0] * 4


def test_linear_reaches_its_floor_at_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(5, schedule="linear", final_learning_rate_ratio=0.5)[-1] == pytest.approx(0.5)


def test_cosine_is_half_a_period() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(1, 9)]
    assert rates(8, schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [4, 0.4])
def test_warm_up_rises_evenly_to_the_full_rate(warmup: int | float) -> None:
    got = rates(10, schedule="constant", warmup_steps=warmup)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 6)
    assert rates(10, schedule="linear", warmup_steps=warmup)[4:] == pytest.approx(
        [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    )


@pytest.mark.parametrize("decay", [5, 0.25])
def test_warmup_stable_decay_holds_and_falls_at_the_end(decay: int | float) -> None:
    got = rates(20, schedule="warmup_stable_decay", warmup_steps=3, decay_steps=decay)
    assert got[:3] == pytest.approx([0.25, 0.5, 0.75])
    assert got[3:15] == [1.0] * 12
    assert got[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero() -> None:
    assert rates(3, schedule="cosine", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75])
