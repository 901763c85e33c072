"""When a run saves its state. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.recipe.sections.fields import seconds_of

# The meaning of ``checkpoint.every: auto``.
_FIRST_SECONDS, _SECONDS, _SHARE = 120.0, 600.0, 0.02


class Saving:
    """Decide after each step whether a checkpoint is due. Time is measured by rank 0's clock for all ranks.

    Args:
        every: ``checkpoint.every`` of the recipe.
    """

    def __init__(self, every: int | str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._since = clock()
        self._interval = _FIRST_SECONDS if every == "auto" else seconds_of(every) if isinstance(every, str) else None

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._interval is not None and self._clock() - self._since >= self._interval

    def begun(self) -> None:
        """Record that a checkpoint is written from now on."""
        self._since = self._clock()

    def took(self, seconds: float) -> None:
        """Record that a checkpoint was written, or failed; training waited ``seconds`` for it."""
        if self._every == "auto":
            self._interval = max(_SECONDS, seconds / _SHARE)


def auto_reason() -> str:
    """Return the description of ``checkpoint.every: auto`` for a plan."""
    return (
        f"checkpoint.every auto: after {_FIRST_SECONDS / 60:.0f} min, then every {_SECONDS / 60:.0f} min, or less "
        f"often so that saving takes at most {_SHARE:.0%} of the time"
    )
