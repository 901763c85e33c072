"""Relaunch a run from its newest checkpoint: as it is after a machine's fault, with half the micro-batch if memory ran
out, or with another plan.

The second is for cases that a worker cannot handle itself: the ranks of a sharded model wait for each other in every
pass, and a process that the kernel kills cannot react. The third is for a plan that proved wrong. `Restarts` decides
how often a fault is worth another launch.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.engine.event_reader import read_events
from trainwright.engine.events import Event, Fault, Restart
from trainwright.errors import EXIT_TRAINING
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import parse_rate
from trainwright.run import run_directory
from trainwright.run.shutdown.failure import FROM_OUTSIDE, Cause, Failure, MemoryFailure, raise_failure
from trainwright.utils.paths import write_file
from trainwright.utils.text import say

# The file that names what to change of a run that is to continue with another plan.
REPLAN = "replan.json"
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
        self._started_at = time.time()

    def decide(self, failure: Failure, goes_on: bool) -> Event:
        """Return the event that the next launch reports.

        Args:
            goes_on: whether there may be a next one.

        Raises:
            TrainwrightError: the failure, if there is no next launch.
        """
        if not goes_on:
            raise_failure(failure)
        if failure.ran_out is not None and (halving := self._halve(failure.ran_out)) is not None:
            return halving
        decision = self._restarts.decide(failure)
        if isinstance(decision, Failure):
            raise_failure(decision)
        say(decision.line(), file=sys.stderr)
        return decision

    def _halve(self, ran_out: MemoryFailure) -> Fault | None:
        """Halve the micro-batch in the run's recipe; return the event, or None if another launch is of no use."""
        from trainwright.engine.policies.micro_batch_halving import (  # these import torch
            count_rows,
            explain_halving,
            halve_rows,
            set_rows,
        )

        recipe = load_recipe(self._run / run_directory.RECIPE)
        rows = count_rows(recipe, ran_out.rows)
        if rows == 1 or not ran_out.in_training or not self._trained():
            return None
        text = run_directory.format_recipe(set_rows(recipe, halve_rows(rows)))
        try:
            run_directory.change_recipe(self._run, text, explain_halving(halve_rows(rows), rows, ran_out.step))
        except OSError:  # the workers would read the old one
            return None
        self._started_at = time.time()
        # No field `step`: events of a step are discarded when that step is repeated.
        return Fault(
            kind="out_of_memory",
            rank=ran_out.rank,
            detail=ran_out.detail + ("" if ran_out.step is None else f", at step {ran_out.step}"),
            action=f"micro-batch {rows} -> {halve_rows(rows)}; started again from the newest checkpoint",
        )

    def _trained(self) -> bool:
        """Return whether the last launch reached training: smaller micro-batches do not help a model too large."""
        try:
            events = read_events(self._run / "events.jsonl")
        except OSError:
            return False
        return any(event["event"] == "start" and event["time"] >= self._started_at for event in events)


def is_replan_requested(run: Path) -> bool:
    """Return whether the run is to stop after its next checkpoint, to continue with another plan."""
    return (run / REPLAN).is_file()


def take_replan(run: Path) -> tuple[RecipeSchema, int | None] | None:
    """Return the recipe to continue with and the threads per process; None if no change is requested.

    The run's recipe and plan are updated.
    """
    file = run / REPLAN
    try:
        offer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        before = load_recipe(run / run_directory.RECIPE)
        recipe, seconds = _apply_offer(before, offer), float(offer["seconds"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # the run may be anybody's
        return None
    text = run_directory.format_recipe(recipe)
    for section, keys in (("parallel", _PARALLEL), ("train", _TRAIN)):
        for key in keys:
            old, new = getattr(getattr(before, section), key), getattr(getattr(recipe, section), key)
            if old != new:
                why = f"{section}.{key} {new}: {old} was slower than planned (train.replan: auto)"
                run_directory.change_recipe(run, text, why)
    run_directory.replace_predictions(run, {"step_time": seconds}, offer)
    return recipe, offer.get("threads")


def _apply_offer(recipe: RecipeSchema, offer: Mapping[str, Any]) -> RecipeSchema:
    values = recipe.model_dump()
    values["parallel"].update({key: offer[key] for key in _PARALLEL})
    values["train"].update({key: offer[key] for key in _TRAIN})
    values["train"]["gradient_accumulation_steps"] = "auto"
    return type(recipe).model_validate(values)


# Beside the logs of the launches that it is about: the times of the restarts so far, the step and the error of each
# failure from within, and after which step the last restarts happened, with their number.
_RESTARTS_FILE = Path("logs") / "restarts.json"
_MAX_STUCK = 3  # restarts in a row that got no step further
# The lines of calls in a message of `hangs.judge.Conflict`; numbers and ranks are not the same in every launch.
_DIFFERENT_CALLS = re.compile(
    r"the ranks have entered different collectives: .* at (\S+), and rank \d+ .* at ([^\s;]+)"
)
_FAILED_RANK = re.compile(r"^rank \d+ ")  # that failed


class Restarts:
    """Count the restarts of a run, and compare each failure with the ones before it.

    Both are kept in the run's directory, as the launcher may be killed together with its workers and started again. On
    several hosts, both the launcher on the first host and the command that has started it decide about the same run.

    Args:
        allowed: ``faults.restarts``.
        clock: returns seconds since the epoch, as the run's events have them.
        started_at: when the launch began that may fail, by this clock. Default: now.
    """

    def __init__(
        self, run: Path, allowed: str, clock: Callable[[], float] = time.time, started_at: float | None = None
    ) -> None:
        self._run, self._allowed, self._clock = run, allowed, clock
        self._rate = parse_rate(allowed)
        self._times: list[float] = []
        self._failures: list[tuple[int | None, str]] = []
        self._stuck: tuple[int | None, int] = (None, 0)
        self._is_written = True
        self._started_at = clock() if started_at is None else started_at

    def decide(self, failure: Failure) -> Restart | Failure:
        """Return the event of a restart, or the failure that the run ends with, which says why there is none.

        An exception before the first step of a launch, and any failure from within that has happened at this step
        before, would happen again. So may one from outside after which several restarts got no step further.
        """
        if failure.cause is None or self._rate.times == 0:
            return failure
        self._read()
        now, step = self._clock(), self._last_step()
        if failure.cause not in FROM_OUTSIDE:
            if failure.cause is Cause.ERROR and step is None:
                return failure
            key = step, _extract_essence(failure.message)
            if key in self._failures:
                why = f"\nnot restarted again: the same error happened twice after {_describe_step(step)}"
                return replace(failure, message=failure.message + why, exit_code=EXIT_TRAINING)
            self._failures.append(key)
        stuck = self._stuck[1] if self._stuck[0] == step else 0
        if stuck >= _MAX_STUCK:
            why = f"\nnot restarted again: {stuck} restarts in a row got no further than {_describe_step(step)}"
            return replace(failure, message=failure.message + why)
        recent = [restart_time for restart_time in self._times if now - restart_time < self._rate.seconds]
        if len(recent) >= self._rate.times:
            why = f"\nnot restarted again: faults.restarts allows {self._allowed}"
            return replace(failure, message=failure.message + why)
        self._times.append(now)
        self._stuck = step, stuck + 1
        self._started_at = now
        self._write()
        return Restart(
            cause=str(failure.cause),
            detail=failure.message.splitlines()[0],
            number=len(self._times),
            allowed=self._allowed,
            after_step=step,
        )

    def _read(self) -> None:
        """Take what was decided last, here or by another; without the file, or if it is older, go on with our own."""
        if not self._is_written:
            return
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            state = json.loads((self._run / _RESTARTS_FILE).read_text(encoding="utf-8"))
            times = [float(restart_time) for restart_time in state["times"]]
            failures = [(step, str(error)) for step, error in state["failures"]]
            step, count = state.get("stuck", (None, 0))
            self._times, self._failures, self._stuck = times, failures, (step, int(count))

    def _write(self) -> None:
        file = self._run / _RESTARTS_FILE
        state = {"times": self._times, "failures": self._failures, "stuck": self._stuck}
        self._is_written = False
        with suppress(OSError):  # a full disk does not end a run that can go on
            file.parent.mkdir(exist_ok=True)
            write_file(file, json.dumps(state))
            self._is_written = True

    def _last_step(self) -> int | None:
        """Return the last step that this launch has recorded."""
        try:
            events = read_events(self._run / "events.jsonl")
        except OSError:
            return None
        steps = [event["step"] for event in events if event["event"] == "step" and event["time"] >= self._started_at]
        return steps[-1] if steps else None


def _extract_essence(message: str) -> str:
    """Return the part of a failure's message that is the same on every rank and in every launch."""
    different = _DIFFERENT_CALLS.search(message)
    if different is not None:
        return "different collectives at " + " and ".join(sorted(different.groups()))
    lines = [line for line in message.splitlines() if line and not line[0].isspace() and "log: " not in line]
    return _FAILED_RANK.sub("", lines[-1]).partition(" at 0x")[0] if lines else ""


def _describe_step(step: int | None) -> str:
    return "the start" if step is None else f"step {step}"
