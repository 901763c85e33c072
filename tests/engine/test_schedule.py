from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler
from transformers import optimization

from trainwright.engine.optimizer import Schedule
from trainwright.recipe.schema import OptimizerSection


def rates(steps: int, **settings: Any) -> list[float]:
    schedule = Schedule(OptimizerSection(learning_rate=1.0, **settings), steps)
    return [schedule(step) for step in range(1, steps + 1)]


def rates_of(steps: int, scheduler: Callable[[SGD], LRScheduler]) -> list[float]:
    """Return the rates that a training loop with torch's ``scheduler`` and a peak of 1 uses."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    following = scheduler(optimizer)
    used = []
    for _ in range(steps):
        used.append(float(following.get_last_lr()[0]))
        optimizer.step()
        following.step()
    return used


def test_constant() -> None:
    assert rates(4, schedule="constant") == [1.0] * 4


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("linear", optimization.get_linear_schedule_with_warmup),
        ("cosine", optimization.get_cosine_schedule_with_warmup),
    ],
)
def test_the_decay_is_that_of_transformers(
    schedule: str, theirs: Callable[[SGD, int, int], LRScheduler], warmup: int, steps: int
) -> None:
    used = rates(steps, schedule=schedule, warmup_steps=warmup)
    expected = rates_of(steps, lambda optimizer: theirs(optimizer, warmup, steps))
    assert used[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    assert min(used) > 0
    if warmup < steps:
        assert used[warmup] == 1.0


@pytest.mark.parametrize("decay", [5, 0.25])
def test_warmup_stable_decay_is_that_of_transformers(decay: int | float) -> None:
    used = rates(20, schedule="warmup_stable_decay", warmup_steps=3, decay_steps=decay, final_learning_rate_ratio=0.1)
    expected = rates_of(
        20,
        lambda optimizer: optimization.get_wsd_schedule(
            optimizer, 3, 5, num_stable_steps=12, decay_type="linear", min_lr_ratio=0.1
        ),
    )
    assert used[3:] == pytest.approx(expected[3:], rel=1e-12)
    assert used[:3] == pytest.approx([0.25, 0.5, 0.75])


@pytest.mark.parametrize("warmup", [0, 3])
def test_polynomial_and_cosine_with_restarts_are_those_of_transformers(warmup: int) -> None:
    used = rates(20, schedule="polynomial", power=3.0, warmup_steps=warmup, final_learning_rate_ratio=0.1)
    expected = rates_of(
        20,
        lambda optimizer: optimization.get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, 20, lr_end=0.1, power=3.0
        ),
    )
    assert used[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    used = rates(20, schedule="cosine_restarts", cycles=4, warmup_steps=warmup)
    expected = rates_of(
        20,
        lambda optimizer: optimization.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, warmup, 20, 4),
    )
    assert used[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    assert used.count(1.0) == (4 if not warmup else 1)  # 17 steps do not divide into 4


def test_inverse_sqrt_falls_by_the_steps_since_the_begin() -> None:
    used = rates(36, schedule="inverse_sqrt", warmup_steps=3)
    assert used[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert used[15] == pytest.approx(0.5) and used[35] == pytest.approx(1 / 3)


@pytest.mark.parametrize("warmup", [4, 0.4])
def test_warm_up_is_linear_lr_of_torch(warmup: int | float) -> None:
    used = rates(10, schedule="constant", warmup_steps=warmup)
    assert used == pytest.approx(rates_of(10, lambda optimizer: LinearLR(optimizer, 1 / 5, total_iters=4)), rel=1e-12)
    assert used[4] == 1.0


def test_the_rate_falls_to_its_floor() -> None:
    expected = rates_of(8, lambda optimizer: CosineAnnealingLR(optimizer, T_max=8, eta_min=0.25))
    assert rates(8, schedule="cosine", final_learning_rate_ratio=0.25) == pytest.approx(expected, rel=1e-12)
    assert rates(5, schedule="linear", final_learning_rate_ratio=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


def test_a_run_shorter_than_its_warm_up_never_divides_by_zero() -> None:
    assert rates(3, schedule="cosine", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75])
