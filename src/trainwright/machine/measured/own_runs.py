"""Measured relative to predicted values of runs on this machine, which correct later plans.

Kept in the cache by machine and versions, with a limited number of runs. Imports no torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.machine.cache import find_cache_root, try_write
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import hash_value, list_hardware, read_versions

_FORM = 2  # increased when the file changes, or predictions do, which earlier runs were compared with
_MOST = 100  # number of runs kept per machine
_LAST = 5  # number of runs of a class that are used
# Factors outside this range indicate other causes than rates.
_LEAST_FACTOR, _MOST_FACTOR = 0.2, 5.0


@dataclass(frozen=True)
class OwnRun:
    """A run on this machine.

    ``model``: key of what is the same for all ways of running it; ``way``: how it was run. ``seconds`` and ``memory``:
    measured divided by predicted, of a step and of a process; None if unknown. ``basis``: the source of the prediction.
    """

    model: str
    way: str
    basis: str
    seconds: float
    memory: float | None = None


@dataclass(frozen=True)
class Correction:
    """The factor on predictions.

    ``runs``: number of runs it is from; ``spread``: their largest relative deviation. ``exact``: they were run in this
    way, not in another.
    """

    seconds: float = 1.0
    runs: int = 0
    spread: float = 0.0
    exact: bool = False


@dataclass(frozen=True)
class OwnRuns:
    """The runs of a machine, the newest last."""

    runs: tuple[OwnRun, ...] = ()

    def correction(self, model: str, way: str, basis: str) -> Correction:
        """Return the correction for a way of running a model.

        It is from runs in that way, or else from other ways of running the same model, which share the error of the
        machine's rates.
        """
        runs = [run for run in self.runs if run.model == model and run.basis == basis]
        same = [run.seconds for run in runs if run.way == way]
        if same:
            return _compute_correction(same, exact=True)
        # One value per way, so that many runs in one way do not dominate.
        ways: dict[str, list[float]] = {}
        for run in runs:
            ways.setdefault(run.way, []).append(run.seconds)
        medians = [statistics.median(ratios[-_LAST:]) for ratios in ways.values()]
        return _compute_correction(medians, exact=False) if medians else Correction()


def _compute_correction(factors: Sequence[float], exact: bool) -> Correction:
    last = factors[-_LAST:]
    middle = statistics.median(last)
    return Correction(middle, len(last), max(abs(factor / middle - 1) for factor in last), exact)


def read_own_runs(machine: Machine) -> OwnRuns:
    """Return the runs of ``machine``; empty if it is not this machine or the file cannot be read."""
    try:
        content: Any = json.loads(_locate_runs(machine).read_text(encoding="utf-8"))
        if content["form"] != _FORM:
            return OwnRuns()
        return OwnRuns(tuple(OwnRun(**run) for run in content["runs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return OwnRuns()


def remember_run(machine: Machine, run: OwnRun) -> None:
    """Keep one more run, unless its figures are impossible."""
    if not (math.isfinite(run.seconds) and _LEAST_FACTOR <= run.seconds <= _MOST_FACTOR):
        return
    runs = (*read_own_runs(machine).runs, run)[-_MOST:]
    content = {"form": _FORM, "runs": [asdict(saved_run) for saved_run in runs]}
    try_write(_locate_runs(machine), json.dumps(content) + "\n")


def parse_run(record: Mapping[str, Any], seconds: float, memory: float | None) -> OwnRun | None:
    """Return a run from a plan's description of its prediction; None if that lacks a value."""
    names = {field.name for field in fields(OwnRun)}
    texts = {name: str(value) for name, value in record.items() if name in names}
    if not {"model", "way", "basis"} <= texts.keys():
        return None
    return OwnRun(texts["model"], texts["way"], texts["basis"], seconds, memory)


def _locate_runs(machine: Machine) -> Path:
    described = machine.described_by is not None
    key = [*list_hardware(machine), sorted(read_versions(machine).items()), described]
    return find_cache_root() / "runs" / f"{hash_value(key)}.json"
