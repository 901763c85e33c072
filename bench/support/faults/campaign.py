"""A campaign: trials, each in a process of its own, their verdicts in a file that the next start goes on from."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.faults.commands import ROOT
from support.faults.kinds import KINDS, Trial
from support.faults.scene import perform
from support.faults.verdicts import Broken, Missed, Skipped

HELD, BROKEN, SKIPPED, MISSED = "held", "broken", "skipped", "missed"


@dataclass(frozen=True)
class Results:
    """The verdicts so far: one JSON object a line, the last one of a trial counts."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return {f"{line['seed']}:{line['trial']}": line for line in found}

    def add(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_trials(trials: Sequence[Trial], results: Results, work: Path, jobs: int, keep: bool) -> None:
    """Perform the trials, `jobs` at once, and add each verdict as it comes."""
    code, commit = code_of_the_product(), _commit()
    context = multiprocessing.get_context("fork")
    waiting, going = list(trials), {}
    done = 0
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                trial = waiting.pop(0)
                place = work / "trials" / f"{trial.seed}-{trial.name.replace('/', '-').replace(' ', '_')}"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                process = context.Process(target=_in_process, args=(trial, place, work, code))
                process.start()
                going[process] = (trial, place, time.monotonic())
            for process in list(going):
                trial, place, begun = going[process]
                seconds = time.monotonic() - begun
                if process.is_alive() and seconds < KINDS[trial.kind].seconds:
                    continue
                verdict, why = _verdict(process, place, seconds)
                del going[process]
                done += 1
                line = {
                    "trial": trial.name,
                    "seed": trial.seed,
                    "case": str(trial.case),
                    "verdict": verdict,
                    "why": why,
                    "seconds": round(seconds, 1),
                    "commit": commit,
                }
                results.add(line)
                first = why.splitlines()[0][:200] if why else ""
                print(
                    f"[{done}/{len(trials)}] {trial.name} ({trial.case}): {verdict}, {seconds:.1f} s  {first}",
                    flush=True,
                )
                if verdict in (HELD, SKIPPED) and not keep:
                    shutil.rmtree(place, ignore_errors=True)
            time.sleep(0.05)
    finally:
        for process in going:
            _end(process)


def print_table(trials: Sequence[Trial], results: Results) -> bool:
    """What came of each kind; whether every trial held, or could not be tried here."""
    verdicts = results.read()
    found = {trial: verdicts.get(f"{trial.seed}:{trial.name}") for trial in trials}
    print(f"\n{'kind':44} {'tries':>6} {'held':>6} {'broken':>7} {'missed':>7} {'skipped':>8} {'seconds':>8}")
    rows: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for trial, line in sorted(found.items(), key=lambda item: item[0].name):
        row = rows.setdefault(trial.kind, Counter())
        row[line["verdict"] if line else "to do"] += 1
        seconds[trial.kind] += line["seconds"] if line else 0
    total: Counter[str] = Counter()
    for kind, row in [*rows.items(), ("all", total)]:
        total += row if row is not total else Counter()
        tries = row[HELD] + row[BROKEN] + row[MISSED]
        spent = seconds[kind] if kind in seconds else sum(seconds.values())
        print(f"{kind:44} {tries:6} {row[HELD]:6} {row[BROKEN]:7} {row[MISSED]:7} {row[SKIPPED]:8} {spent:8.0f}")
    for trial, line in found.items():
        if line and line["verdict"] in (BROKEN, MISSED):
            print(f"\n{line['verdict']}: {trial.name} ({trial.case}), --only '{trial.name}'\n  {line['why'][:1500]}")
    skipped = {(trial.kind, line["why"]) for trial, line in found.items() if line and line["verdict"] == SKIPPED}
    for kind, why in sorted(skipped):
        print(f"not tried on this machine: {kind}: {why}")
    commits = {line["commit"] for line in found.values() if line}
    if len(commits) > 1:
        print(f"the verdicts are of several versions of the code: {', '.join(sorted(commits))}")
    if total["to do"]:
        print(f"{total['to do']} still to do")
    return not (total[BROKEN] or total[MISSED] or total["to do"])


def code_of_the_product() -> str:
    """A digest of the product's source: another source has other undisturbed runs."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or code_of_the_product()


def _in_process(trial: Trial, place: Path, work: Path, code: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kind = KINDS[trial.kind]
    verdict, why = HELD, ""
    try:
        if reason := kind.needs():
            raise Skipped(reason)
        perform(trial, place, work, code)
    except Broken as error:
        verdict, why = BROKEN, str(error)
    except Missed as error:
        verdict, why = MISSED, str(error)
    except Skipped as error:
        verdict, why = SKIPPED, str(error)
    except Exception:
        verdict, why = BROKEN, f"the trial itself failed:\n{traceback.format_exc()}"
    (place / "verdict.json").write_text(json.dumps([verdict, why]))


def _verdict(process: Any, place: Path, seconds: float) -> tuple[str, str]:
    if process.is_alive():
        _end(process)
        return BROKEN, f"no end in {seconds:.0f} s"
    process.join()
    try:
        verdict, why = json.loads((place / "verdict.json").read_text())
    except (OSError, ValueError):
        return BROKEN, f"the trial's process ended with {process.exitcode} and no verdict"
    return verdict, why


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
