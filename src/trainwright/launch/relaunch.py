"""Relaunch a run that ran out of memory, with half the micro-batch.

For cases that a worker cannot handle itself: the ranks of a sharded model wait for each other in every pass, and a
process that the kernel kills cannot react.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.engine.policies.halving import halved, reason, rows_of, with_rows
from trainwright.launch import run_directory
from trainwright.launch.ending.failure import MemoryFailure
from trainwright.observe.reader import read_events
from trainwright.recipe.loading import load_recipe


class Relaunch:
    """Decide whether to relaunch a run, and what its workers execute.

    Args:
        resumed: what every worker executes then, given the fault to report.
    """

    def __init__(self, run: Path, resumed: Callable[[dict[str, Any]], Callable[[], int]]) -> None:
        self.resumed = resumed
        self._run = run
        self._begun = time.time()

    def decide(self, ran_out: MemoryFailure) -> dict[str, Any] | None:
        """Halve the micro-batch in the run's recipe; return the `fault`, or None if another launch is of no use."""
        recipe = load_recipe(self._run / run_directory.RECIPE)
        rows = rows_of(recipe, ran_out.rows)
        if rows == 1 or not ran_out.in_training or not self._trained():
            return None
        text = run_directory.recipe_text(with_rows(recipe, halved(rows)))
        try:
            run_directory.change(self._run, text, reason(halved(rows), rows, ran_out.step))
        except OSError:  # the workers would read the old one
            return None
        self._begun = time.time()
        # No field `step`: events of a step are discarded when that step is repeated.
        return {
            "kind": "out_of_memory",
            "rank": ran_out.rank,
            "detail": ran_out.detail + ("" if ran_out.step is None else f", at step {ran_out.step}"),
            "action": f"micro-batch {rows} -> {halved(rows)}; started again from the newest checkpoint",
        }

    def _trained(self) -> bool:
        """Return whether the last launch reached training: smaller micro-batches do not help a model that does not
        fit.
        """
        try:
            events = read_events(self._run / "events.jsonl")
        except OSError:
            return False
        return any(event["event"] == "start" and event["time"] >= self._begun for event in events)
