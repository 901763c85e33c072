"""Ranks must decide the same: a step policy that skips an update on some of them gives each other weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainwright.engine.policies.base import StepPolicy
from trainwright.errors import TrainingError
from trainwright.parallel.world import World


def check_skips(step: int, policies: Sequence[StepPolicy], skipped: Sequence[bool], world: World) -> None:
    """Compare before an update which of the recipe's policies skip it; nothing is exchanged for those that never do.

    Raises:
        TrainingError: on every rank, if they have not decided the same.
    """
    asked = [policy for policy in policies if type(policy).skips is not StepPolicy.skips]
    if not asked:
        return
    decided = [float(skip) for policy, skip in zip(policies, skipped, strict=True) if policy in asked]
    for policy, of_ranks in zip(asked, zip(*world.gather_floats(decided), strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            ranks = ([rank for rank, skip in enumerate(of_ranks) if bool(skip) is kind] for kind in (True, False))
            skipping, others = map(_named, ranks)
            raise TrainingError(
                f"the step policy {type(policy).__module__}:{type(policy).__qualname__} skips the update of step "
                f"{step} on {skipping} and not on {others}; its method skips must return the same on every rank. "
                "Correct it, and --resume"
            )


def check_steps(steps: Sequence[int]) -> None:
    """Raise TrainingError, on every rank, if the ranks are not at the same step. ``steps``: that of each rank."""
    if len(set(steps)) == 1:
        return
    usual = Counter(steps).most_common(1)[0][0]
    others = [rank for rank, step in enumerate(steps) if step != usual]
    raise TrainingError(
        f"{_named(others)} computed step {steps[others[0]]} when the other ranks computed step {usual}: a step policy "
        "repeated or added a pass on some ranks only. Its methods before and again must do the same on every rank. "
        "Correct it, and --resume"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
