"""Where a bench writes its results: beside those of the repository, unless it is told to replace them."""

from __future__ import annotations

import sys
from pathlib import Path

_BENCH = Path(__file__).parents[1]
_WRITE = "--write"


def results_directory() -> Path:
    """Return ``bench/results`` if the command has ``--write``, which is taken from it, else ``build/bench``, which git
    ignores.

    The page of benchmarks is made from ``bench/results``, and tests compare the two, so that trying a bench must not
    change them.
    """
    if _WRITE in sys.argv:
        _taken.append(sys.argv.pop(sys.argv.index(_WRITE)))
    if _taken:
        return _BENCH / "results"
    directory = _BENCH.parent / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


_taken: list[str] = []
