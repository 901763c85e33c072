"""Waits of the host for the device, by line."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from trainwright.simulation.recorders.phases import STEP_PHASES, Phases
from trainwright.simulation.recorders.places import place


class Wait(NamedTuple):
    """A wait of the host. ``place``: the line that waits."""

    step: int
    phase: str
    cause: str
    place: str


class WaitLog:
    """Waits by step and phase; step 0 is what comes before the first one."""

    def __init__(self, phases: Phases) -> None:
        self.found: Counter[Wait] = Counter()
        self._phases = phases

    def note(self, cause: str) -> None:
        """Add a wait at the line that is running."""
        self.found[Wait(self._phases.step, self._phases.phase, cause, place())] += 1

    def of_step(self, step: int) -> dict[tuple[str, str], int]:
        """Return the number of waits of a step by cause and place, most frequent first."""
        found: Counter[tuple[str, str]] = Counter()
        for wait, count in self.found.items():
            if wait.step == step and wait.phase in STEP_PHASES:
                found[wait.cause, wait.place] += count
        return dict(found.most_common())
