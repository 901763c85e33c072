"""Relaunch a run from its newest checkpoint: as it is after a machine's fault, with half the micro-batch if memory ran
out, or with another plan.

The second is for cases that a worker cannot handle itself: the ranks of a sharded model wait for each other in every
pass, and a process that the kernel kills cannot react. The third is for a plan that proved wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.engine.events import Event, Fault
from trainwright.engine.policies.halving import halved, reason, rows_of, with_rows
from trainwright.launch import run_directory
from trainwright.launch.ending.failure import Failure, MemoryFailure
from trainwright.launch.ending.restarts import Restarts
from trainwright.launch.supervisor import raise_failure
from trainwright.observe.plan_watch import REPLAN
from trainwright.observe.reader import read_events
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import Recipe
from trainwright.text import say

# What a plan changes of a run.
_PARALLEL = ("strategy", "num_processes", "replicate_size", "reshard_after_forward")
_TRAIN = ("micro_batch_size", "activation_checkpointing")


class Relaunch:
    """Decide whether a run that failed goes on.

    Args:
        restarts: ``faults.restarts`` of the recipe.
    """

    def __init__(self, run: Path, restarts: str) -> None:
        self._run = run
        self._restarts = Restarts(run, restarts)
        self._begun = time.time()

    def decide(self, failure: Failure, goes_on: bool) -> Event:
        """Return the event that the next launch reports.

        Args:
            goes_on: whether there may be a next one.

        Raises:
            TrainwrightError: the failure, if there is no next launch.
        """
        if not goes_on:
            raise_failure(failure)
        if failure.ran_out is not None and (halved := self._halve(failure.ran_out)) is not None:
            return halved
        decision = self._restarts.decide(failure)
        if isinstance(decision, Failure):
            raise_failure(decision)
        say(decision.line(), file=sys.stderr)
        return decision

    def _halve(self, ran_out: MemoryFailure) -> Fault | None:
        """Halve the micro-batch in the run's recipe; return the event, or None if another launch is of no use."""
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
        return Fault(
            kind="out_of_memory",
            rank=ran_out.rank,
            detail=ran_out.detail + ("" if ran_out.step is None else f", at step {ran_out.step}"),
            action=f"micro-batch {rows} -> {halved(rows)}; started again from the newest checkpoint",
        )

    def _trained(self) -> bool:
        """Return whether the last launch reached training: smaller micro-batches do not help a model that does not
        fit.
        """
        try:
            events = read_events(self._run / "events.jsonl")
        except OSError:
            return False
        return any(event["event"] == "start" and event["time"] >= self._begun for event in events)


def is_replan_requested(run: Path) -> bool:
    """Return whether the run is to stop after its next checkpoint, to continue with another plan."""
    return (run / REPLAN).is_file()


def take_replan(run: Path) -> tuple[Recipe, int | None] | None:
    """Return the recipe to continue with and the threads per process; None if no change is requested.

    The run's recipe and plan are updated.
    """
    file = run / REPLAN
    try:
        offer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        before = load_recipe(run / run_directory.RECIPE)
        recipe, seconds = _changed(before, offer), float(offer["seconds"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # the run may be anybody's
        return None
    text = run_directory.recipe_text(recipe)
    for section, keys in (("parallel", _PARALLEL), ("train", _TRAIN)):
        for key in keys:
            old, new = getattr(getattr(before, section), key), getattr(getattr(recipe, section), key)
            if old != new:
                why = f"{section}.{key} {new}: {old} was slower than planned (train.replan: auto)"
                run_directory.change(run, text, why)
    run_directory.expect(run, {"step_time": seconds}, offer)
    return recipe, offer.get("threads")


def _changed(recipe: Recipe, offer: Mapping[str, Any]) -> Recipe:
    values = recipe.model_dump()
    values["parallel"].update({key: offer[key] for key in _PARALLEL})
    values["train"].update({key: offer[key] for key in _TRAIN})
    values["train"]["gradient_accumulation_steps"] = "auto"
    return type(recipe).model_validate(values)
