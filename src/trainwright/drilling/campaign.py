"""A campaign: trials, each in a process of its own, their verdicts in a file that the next start goes on from."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.drilling.kinds import KINDS, Trial
from trainwright.drilling.scene import perform
from trainwright.drilling.setting import Setting
from trainwright.drilling.verdicts import Broken, Missed, Skipped, Undisturbed

HELD, BROKEN, SKIPPED, MISSED = "held", "broken", "skipped", "missed"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Results:
    """The verdicts so far: one JSON object a line, the last one of a trial counts."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts by the trials' keys."""
        texts = self.path.read_text().splitlines() if self.path.exists() else []
        found = {}
        for text in texts:
            with contextlib.suppress(ValueError):  # cut by a kill or a full disk
                line = json.loads(text)
                found[f"{line['seed']}:{line['trial']}:{line['case']}"] = line
        return found

    def add(self, line: dict[str, Any]) -> None:
        """Append a verdict."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begins = b"\n" if file.read(1) not in (b"", b"\n") else b""  # the last line was cut
            file.write(begins + json.dumps(line).encode() + b"\n")

    def of(self, trials: Iterable[Trial]) -> dict[Trial, dict[str, Any] | None]:
        """Return the verdict of each trial; None where there is none yet."""
        known = self.read()
        return {trial: known.get(trial.key) for trial in trials}


def run_trials(
    trials: Sequence[Trial],
    setting: Setting,
    work: Path,
    jobs: int = 1,
    keep: bool = False,
    until: Callable[[], bool] = lambda: False,
    waiting: Callable[[Sequence[Trial], float], None] = lambda trials, seconds: None,
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
    told = time.monotonic()
    going: dict[Any, tuple[Trial, Path, float]] = {}
    try:
        while to_come or going:
            while to_come and len(going) < jobs:
                if until():
                    to_come.clear()
                    break
                trial = to_come.pop(0)
                place = work / f"{trial.seed}-{trial.name.replace('/', '-').replace(' ', '_')}"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                process = context.Process(target=_in_process, args=(trial, place, setting))
                process.start()
                going[process] = (trial, place, time.monotonic())
            for process in list(going):
                trial, place, begun = going[process]
                seconds = time.monotonic() - begun
                if process.is_alive() and seconds < KINDS[trial.kind].seconds + 2 * setting.patience:
                    continue
                verdict, why, measures = _verdict(process, place, seconds)
                del going[process]
                if verdict in (HELD, SKIPPED) and not keep:
                    shutil.rmtree(place, ignore_errors=True)
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
            if going and time.monotonic() - told >= 1:
                told = time.monotonic()
                waiting([one for one, *_ in going.values()], told - min(began for *_, began in going.values()))
            time.sleep(0.05)
    finally:
        for process in going:
            _end(process)


def _in_process(trial: Trial, place: Path, setting: Setting) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the trial ends its commands
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    kind = KINDS[trial.kind]
    verdict, why, measures = HELD, "", {}
    try:
        if reason := kind.needs():
            raise Skipped(reason)
        measures = perform(trial, place, setting)
    except Broken as error:
        verdict, why = BROKEN, str(error)
    except Missed as error:
        verdict, why = MISSED, str(error)
    except (Skipped, Undisturbed) as error:
        verdict, why = SKIPPED, str(error)
    except Exception:
        verdict, why = BROKEN, f"the trial itself failed:\n{traceback.format_exc()}"
    (place / "verdict.json").write_text(json.dumps([verdict, why, measures]))


def _verdict(process: Any, place: Path, seconds: float) -> tuple[str, str, dict[str, float]]:
    if process.is_alive():
        _end(process)
        return BROKEN, f"no end in {seconds:.0f} s", {}
    process.join()
    try:
        verdict, why, measures = json.loads((place / "verdict.json").read_text())
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
