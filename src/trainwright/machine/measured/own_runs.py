"""What runs on this machine took beside what was predicted of them: plans that follow are corrected by it.

Kept in the cache by machine and versions, a bounded number of runs. Imports no torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.machine.cache import cache_root, keep
from trainwright.machine.detect import Machine
from trainwright.machine.measured.calibration import digest, hardware, versions

_FORM = 1
_MOST = 100  # runs that are kept of a machine
_LAST = 5  # of a class, that count
# A run that took more or less than this is a sign of something else than rates.
_LEAST_FACTOR, _MOST_FACTOR = 0.2, 5.0


@dataclass(frozen=True)
class OwnRun:
    """``model``: whatever is the same for all ways of running it; ``way``: how it was run. ``seconds`` and ``memory``:
    measured over predicted, of a step and of a process; None where that is not known. ``basis``: what the prediction
    went by."""

    model: str
    way: str
    basis: str
    seconds: float
    memory: float | None = None


@dataclass(frozen=True)
class Correction:
    """What predictions are multiplied by. ``runs``: how many it is from; ``spread``: how far they are from it at most.

    ``exact``: they were run this way, and not in another.
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
        """Of a way of running a model: of runs of just that; else of other ways of running the same model, as what the
        rates of a machine are off by is in all of them."""
        known = [run for run in self.runs if run.model == model and run.basis == basis]
        same = [run.seconds for run in known if run.way == way]
        if same:
            return _of(same, exact=True)
        # One way each, so that many runs of one do not count for all.
        ways: dict[str, list[float]] = {}
        for run in known:
            ways.setdefault(run.way, []).append(run.seconds)
        others = [statistics.median(found[-_LAST:]) for found in ways.values()]
        return _of(others, exact=False) if others else Correction()


def _of(factors: Sequence[float], exact: bool) -> Correction:
    last = factors[-_LAST:]
    middle = statistics.median(last)
    return Correction(middle, len(last), max(abs(factor / middle - 1) for factor in last), exact)


def own_runs(machine: Machine) -> OwnRuns:
    """Of ``machine``; none where it is not the one at hand or its file cannot be read."""
    try:
        content: Any = json.loads(_file(machine).read_text(encoding="utf-8"))
        if content["form"] != _FORM:
            return OwnRuns()
        return OwnRuns(tuple(OwnRun(**run) for run in content["runs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return OwnRuns()


def remember(machine: Machine, run: OwnRun) -> None:
    """Keep one more run, unless its figures are impossible."""
    if not (math.isfinite(run.seconds) and _LEAST_FACTOR <= run.seconds <= _MOST_FACTOR):
        return
    runs = (*own_runs(machine).runs, run)[-_MOST:]
    keep(_file(machine), json.dumps({"form": _FORM, "runs": [asdict(one) for one in runs]}) + "\n")


def run_of(known: Mapping[str, Any], seconds: float, memory: float | None) -> OwnRun | None:
    """From what a plan says of its prediction; None where it says nothing."""
    names = {field.name for field in fields(OwnRun)}
    texts = {name: str(value) for name, value in known.items() if name in names}
    if not {"model", "way", "basis"} <= texts.keys():
        return None
    return OwnRun(texts["model"], texts["way"], texts["basis"], seconds, memory)


def _file(machine: Machine) -> Path:
    described = machine.described_by is not None
    key = [*hardware(machine), sorted(versions(machine).items()), described]
    return cache_root() / "runs" / f"{digest(key)}.json"
