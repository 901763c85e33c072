"""The learning rate is named as the cause of numbers that are not finite where it is a likely one."""

from __future__ import annotations

import math

import pytest

from trainwright.engine.passes import Divergence
from trainwright.engine.policies.base import StepGradients
from trainwright.recipe.schema import OptimizerSection


def advice(losses: list[float], rate: float, norms: list[float] | None = None, updates: int | None = None) -> str:
    divergence = Divergence()
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        divergence.add(StepGradients(None, loss, norm, [], []))  # type: ignore[arg-type]
    optimizer = OptimizerSection(learning_rate=rate)
    return divergence.describe_advice(optimizer, rate, len(losses) if updates is None else updates)


@pytest.mark.parametrize(
    ("losses", "rate", "norms", "shown"),
    [
        ([2.3], 1e9, None, "usually trained with 1e-6 to 1e-3"),
        ([2.3, 2.2, 4.0, 9.5], 1e-3, None, "the loss had grown from 2.2 to 9.5"),
        ([2.3, 2.2, 2.4], 5e-3, [1.0, 3.0, 1e5], "the gradient norm had grown from 1 to 1e+05"),
        ([math.nan, 2.3], 0.5, None, "optimizer.learning_rate 0.5 (0.5 in the last update)"),
    ],
)
def test_a_likely_learning_rate_is_named(
    losses: list[float], rate: float, norms: list[float] | None, shown: str
) -> None:
    found = advice(losses, rate, norms)
    assert shown in found and "optimizer.learning_rate" in found and "lower it" in found


@pytest.mark.parametrize(
    ("losses", "rate", "updates"),
    [([], 1e9, 0), ([2.3, 2.2, 2.1, 1.9], 1e-4, None), ([0.1, 0.05, 0.3], 2e-5, None), ([], 1e-3, 40)],
)
def test_what_is_something_else_does_not_blame_it(losses: list[float], rate: float, updates: int | None) -> None:
    assert advice(losses, rate, updates=updates) == ""
