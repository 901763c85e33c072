"""A rank that is slower than the others by more than noise is named; a healthy one is not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.slow import slow_but
from trainwright.engine.policies.stragglers import RankComparison, Straggler

PHASES = (0.002, 0.03, 0.05, 0.01)  # seconds of data, forward, backward, optimizer
SLOW_FROM, STEPS = 60, 120


def named(
    seed: int, noise: float, ranks: int = 2, slow: int | None = None, share: float = 0.3, outliers: float = 0.01
) -> dict[int, Straggler]:
    """The stragglers by step, with noise of this part, and now and then a step that takes ten times as long."""
    draw, comparison, found = np.random.default_rng(seed), RankComparison(), {}
    for step in range(STEPS):
        seconds = np.array(PHASES) * draw.lognormal(0.0, noise, (ranks, len(PHASES)))
        seconds[:, 1] *= np.where(draw.random(ranks) < outliers, 10.0, 1.0)
        if slow is not None and step >= SLOW_FROM:
            seconds[slow, 2] += share * sum(PHASES) * draw.lognormal(0.0, noise)
        wall = float(seconds.sum(axis=1).max()) + 0.01
        if (straggler := comparison.add(seconds.tolist(), wall)) is not None:
            found[step] = straggler
    return found


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", slow_but(0.05, among=(0.01, 0.05, 0.1)))
def test_healthy_ranks_are_not_named(noise: float, ranks: int) -> None:
    assert [seed for seed in range(100) if named(seed, noise, ranks)] == []


@pytest.mark.parametrize("share", [0.15, 0.5, 2.0])
def test_a_slow_rank_is_named_within_20_steps_with_its_phase_and_the_gain(share: float) -> None:
    for seed in range(50):
        found = named(seed, 0.02, ranks=4, slow=seed % 4, share=share, outliers=0.0)
        step, straggler = next(iter(found.items()))
        assert step < SLOW_FROM + 20 and (straggler.rank, straggler.phase) == (seed % 4, "backward")
        assert len(found) == 1, "it is named once"
        whole = sum(PHASES) + 0.01
        assert straggler.gain == pytest.approx(share * sum(PHASES) / (whole + share * sum(PHASES)), abs=0.05)


def compared(before: float, wall: float, slow: float, compute: float = 0.1) -> list[Straggler]:
    """One of two ranks computes longer from SLOW_FROM on; steps take `before`, later `wall` seconds."""
    comparison, found = RankComparison(), []
    for step in range(STEPS):
        late = step >= SLOW_FROM
        seconds = [[0.0, compute + (slow if late else 0.0), 0.0, 0.0, 0.0], [0.0, compute, 0.0, 0.0, 0.0]]
        found.append(comparison.add(seconds, wall if late else before))
    return [straggler for straggler in found if straggler is not None]


def test_the_gain_is_at_least_what_the_others_have_waited() -> None:
    (straggler,) = compared(before=0.5, wall=0.4, slow=0.116)  # steps were longer before: other rows, a busy machine
    assert straggler.slower > 1.0 and straggler.gain >= 0.116 / 0.4 - 1e-6


def test_what_a_slow_rank_costs_of_long_steps_is_small() -> None:
    (straggler,) = compared(before=20.0, wall=20.0, slow=0.116)
    assert straggler.gain < 0.02, "no notice says so"
