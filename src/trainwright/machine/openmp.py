"""How the threads of a process that compute together wait for one another. Imports no torch."""

from __future__ import annotations

import os

# GNU's OpenMP, which torch computes with on CPUs: how often a thread looks whether the others are ready, before it sleeps.
_SPIN_COUNT = "GOMP_SPINCOUNT"
_WAITING = ("OMP_WAIT_POLICY", _SPIN_COUNT)
# Enough for threads that end together. The default, 300,000, is up to 20 ms on Intel's processors: a thread that waits
# for one whose core another program uses takes that time from it, and the threads of a step wait hundreds of times.
_SPINS = 1_000


def limit_spinning() -> None:
    """Have waiting threads sleep soon, unless the user has set how they wait. Call this before importing torch."""
    if not any(name in os.environ for name in _WAITING):
        os.environ[_SPIN_COUNT] = str(_SPINS)
