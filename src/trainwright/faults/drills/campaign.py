"""A campaign: trials, each in a process of its own, their verdicts in a file that the next start goes on from, and a
table of them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.faults.drills.invariants import InvariantBroken, Missed, Skipped, Undisturbed
from trainwright.faults.drills.kinds import KINDS, DrillTrial
from trainwright.faults.drills.trial_environment import perform
from trainwright.faults.drills.trial_settings import TrialSettings
from trainwright.run.shutdown.stop import signal_after_parent
from trainwright.utils import text

HELD, BROKEN, SKIPPED, MISSED = "held", "broken", "skipped", "missed"


@dataclass(frozen=True)
class CampaignResults:
    """The verdicts so far: one JSON object a line, the last one of a trial counts."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts by the trials' keys."""
        texts = self.path.read_text().splitlines() if self.path.exists() else []
        lines = {}
        for each in texts:
            with contextlib.suppress(ValueError):  # cut by a kill or a full disk
                line = json.loads(each)
                lines[f"{line['seed']}:{line['trial']}:{line['case']}"] = line
        return lines

    def add(self, line: dict[str, Any]) -> None:
        """Append a verdict."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begins = b"\n" if file.read(1) not in (b"", b"\n") else b""  # the last line was cut
            file.write(begins + json.dumps(line).encode() + b"\n")

    def of(self, trials: Iterable[DrillTrial]) -> dict[DrillTrial, dict[str, Any] | None]:
        """Return the verdict of each trial; None where there is none yet."""
        lines = self.read()
        return {trial: lines.get(trial.key) for trial in trials}


def run_trials(
    trials: Sequence[DrillTrial],
    setting: TrialSettings,
    work: Path,
    jobs: int = 1,
    keep: bool = False,
    until: Callable[[], bool] = lambda: False,
    waiting: Callable[[Sequence[DrillTrial], float], None] = lambda trials, seconds: None,
) -> Iterator[dict[str, Any]]:
    """Perform the trials, ``jobs`` at once, and yield the line of each as it comes.

    Args:
        work: for the directories of trials.
        keep: keep also those of trials that held.
        until: asked before each trial whether to begin no more.
        waiting: called once a second with the trials that are going on, and the seconds that the oldest has taken.
    """
    context = multiprocessing.get_context("fork")
    to_come = list(trials)
    reported_at = time.monotonic()
    going: dict[Any, tuple[DrillTrial, Path, float]] = {}
    try:
        while to_come or going:
            while to_come and len(going) < jobs:
                if until():
                    to_come.clear()
                    break
                trial = to_come.pop(0)
                directory = work / f"{trial.seed}-{trial.name.replace('/', '-').replace(' ', '_')}"
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                process = context.Process(target=_in_process, args=(trial, directory, setting))
                process.start()
                going[process] = (trial, directory, time.monotonic())
            for process in list(going):
                trial, directory, started = going[process]
                seconds = time.monotonic() - started
                if process.is_alive() and seconds < KINDS[trial.kind].seconds + 2 * setting.patience:
                    continue
                verdict, why, measures = _verdict(process, directory, seconds)
                del going[process]
                if verdict in (HELD, SKIPPED) and not keep:
                    shutil.rmtree(directory, ignore_errors=True)
                yield {
                    "trial": trial.name,
                    "seed": trial.seed,
                    "case": str(trial.case),
                    "verdict": verdict,
                    "why": why,
                    "seconds": round(seconds, 1),
                    **{name: round(value, 3) for name, value in measures.items()},
                    "code": setting.code,
                }
            if going and time.monotonic() - reported_at >= 1:
                reported_at = time.monotonic()
                waiting([one for one, *_ in going.values()], reported_at - min(began for *_, began in going.values()))
            time.sleep(0.05)
    finally:
        for process in going:
            _end(process)


def _in_process(trial: DrillTrial, directory: Path, setting: TrialSettings) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the trial ends its commands
    signal_after_parent(signal.SIGTERM)
    kind = KINDS[trial.kind]
    verdict, why, measures = HELD, "", {}
    try:
        if reason := kind.needs():
            raise Skipped(reason)
        measures = perform(trial, directory, setting)
    except InvariantBroken as error:
        verdict, why = BROKEN, str(error)
    except Missed as error:
        verdict, why = MISSED, str(error)
    except (Skipped, Undisturbed) as error:
        verdict, why = SKIPPED, str(error)
    except Exception:
        verdict, why = BROKEN, f"the trial itself failed:\n{traceback.format_exc()}"
    (directory / "verdict.json").write_text(json.dumps([verdict, why, measures]))


def _verdict(process: Any, directory: Path, seconds: float) -> tuple[str, str, dict[str, float]]:
    if process.is_alive():
        _end(process)
        return BROKEN, f"no end in {seconds:.0f} s", {}
    process.join()
    try:
        verdict, why, measures = json.loads((directory / "verdict.json").read_text())
    except (OSError, ValueError):
        return BROKEN, f"the trial's process ended with {process.exitcode} and no verdict", {}
    return verdict, why, measures


def _end(process: Any) -> None:
    """End a trial's process and what it has started: its commands are its children, in sessions of their own."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.join()


# Measured by some trials: seconds until the fault was reported, and until the next step; repeated steps.
_MEASURES = {"detection": "noticed", "recovery": "recovered", "lost": "lost"}


@dataclass
class Row:
    """The results of the trials of one kind."""

    kind: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def count(self, *verdicts: str) -> int:
        """Return the number of trials with one of the verdicts."""
        return sum(line["verdict"] in verdicts for line in self.lines)

    def median(self, measure: str) -> float | None:
        """Return the median of a measure over the trials that have it."""
        values = [line[measure] for line in self.lines if measure in line]
        return round(statistics.median(values), 3) if values else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as a mapping; ``tries`` are the trials that were not skipped."""
        return {
            "kind": self.kind,
            "tries": self.count(HELD, BROKEN, MISSED),
            **{verdict: self.count(verdict) for verdict in (HELD, BROKEN, MISSED, SKIPPED)},
            **{f"median_{measure}": self.median(measure) for measure in (*_MEASURES, "start")},
            "skipped_because": sorted({line["why"] for line in self.lines if line["verdict"] == SKIPPED}),
        }


def rows_of(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> list[Row]:
    """Return a row for each kind with a verdict, by name, and the last one for all."""
    rows: dict[str, Row] = {}
    for trial, line in sorted(lines.items(), key=lambda item: item[0].name):
        if line is not None:
            rows.setdefault(trial.kind, Row(trial.kind)).lines.append(line)
    return [*rows.values(), Row("all", [line for row in rows.values() for line in row.lines])]


def table(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> str:
    """Return the table, as wide as it is, with its notes."""
    return shown(cells(lines), notes(lines))


def cells(lines: Mapping[DrillTrial, dict[str, Any] | None]) -> list[list[str]]:
    """Return the cells of the table by row, the head first."""
    table = [["kind", "tries", HELD, BROKEN, MISSED, SKIPPED, *_MEASURES.values()]]
    for row in rows_of(lines):
        counts = [str(row.count(*each)) for each in ((HELD, BROKEN, MISSED), (HELD,), (BROKEN,), (MISSED,), (SKIPPED,))]
        table.append([row.kind, *counts, *(_shown(measure, row.median(measure)) for measure in _MEASURES)])
    return table


def notes(results: Mapping[DrillTrial, dict[str, Any] | None], refused: Mapping[str, str] | None = None) -> list[str]:
    """Return the trials that did not hold with their reasons, and what could not be tried here.

    Args:
        refused: strategies with numbers of processes that the recipe could not be trained with, and why.
    """
    lines = [
        f"\n{line['verdict']}: {trial.name} ({trial.case})\n  {line['why'][:1500]}"
        for trial, line in results.items()
        if line and line["verdict"] in (BROKEN, MISSED)
    ]
    skipped = {(row.kind, why) for row in rows_of(results)[:-1] for why in row.as_json()["skipped_because"]}
    skipped |= set((refused or {}).items())
    lines += [f"not tried here: {kind}: {why}" for kind, why in sorted(skipped)]
    if missing := sum(line is None for line in results.values()):
        lines.append(f"{missing} of {len(results)} trials are left")
    return lines


def shown(cells: Sequence[Sequence[str]], notes: Sequence[str], width: int | None = None) -> str:
    """Return the table and its notes as text.

    Args:
        width: columns of the terminal: if they are too few, what no trial has is left out. None: as many as needed.
    """
    lines = list(text.table(cells, numbers=True))
    if width is not None and max(map(len, lines)) > width:
        columns = [column for column in zip(*cells, strict=True) if {*column[1:]} - {"0", "-"}]
        lines = list(text.table([*zip(*columns, strict=True)], width, numbers=True))
    return "\n".join([*lines, *notes])


def _shown(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g} step{'' if value == 1 else 's'}" if measure == "lost" else f"{value:.1f} s"
