"""Interruptions of runs on a real Slurm, drawn by a seed: each at a random moment of a run of the smallest recipe.

A trial submits the run, interrupts it once, and touches nothing after. The run has to finish by itself, as the
undisturbed one, with at most one step done again where the interruption left any time, and no job or process of it may
be left.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.commands import MACHINE, environment
from tests.support.interruptions import KINDS, MINUTES, Interruption
from tests.support.runs import ON_ROWS, TINY
from tests.support.slurm import Slurm
from trainwright.faults.drills import invariants, watched_commands
from trainwright.faults.drills.invariants import InvariantBroken, require
from trainwright.faults.drills.trial_settings import load_shortened_recipe
from trainwright.recipe.loading import dump_recipe

START, STEP, EVALUATION, CHECKPOINT = "start-up", "step", "evaluation", "checkpoint"
PHASES = (START, STEP, EVALUATION, CHECKPOINT)
# Nodes and processes.
SPREADS = ((1, 1), (1, 2), (2, 2))
STEP_SECONDS = 0.25  # so that an interruption can come within a phase
PATIENCE = 300.0
_GONE_SECONDS = 20.0
HELD, BROKEN, MISSED = "held", "broken", "missed"


@dataclass(frozen=True)
class Trial:
    """One interruption of a run, drawn by its seed and number."""

    seed: int
    number: int
    kind: str
    phase: str
    nodes: int
    processes: int

    @property
    def name(self) -> str:
        """Unique among those of a seed."""
        return f"{self.number}"

    @property
    def case(self) -> str:
        """What is done, and to what."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.kind}, {self.phase}, {self.processes} process{'es' * (self.processes > 1)} on {nodes}"

    @property
    def key(self) -> str:
        """As the verdicts of a campaign are stored by."""
        return f"{self.seed}:{self.name}:{self.case}"


def drawn(seed: int, count: int) -> list[Trial]:
    """The first trials of a seed: all kinds in a drawn order, then all again; so for phases and nodes."""
    draw = random.Random(seed)
    kinds, moments, spreads = (_endless(draw, each) for each in (list(KINDS), list(PHASES), list(SPREADS)))
    return [Trial(seed, number, next(kinds), next(moments), *next(spreads)) for number in range(count)]


def perform(trial: Trial, slurm: Slurm, work: Path) -> dict[str, Any]:
    """Do a trial; return its verdict as a line of results. ``slurm`` is idle before and, if it held, after."""
    begun, verdict, why = time.monotonic(), HELD, ""
    try:
        _Scene(trial, slurm, work).play()
    except InvariantBroken as error:
        verdict, why = BROKEN, str(error)
    except _Missed as error:
        verdict, why = MISSED, str(error)
    except (AssertionError, OSError, subprocess.SubprocessError, psutil.Error) as error:
        verdict, why = BROKEN, f"the trial itself failed: {error!r}"
    seconds = round(time.monotonic() - begun, 1)
    found = {"trial": trial.name, "seed": trial.seed, "case": trial.case, "verdict": verdict}
    return {**found, "why": f"{why[:1000]}\n...\n{why[-3000:]}" if len(why) > 4000 else why, "seconds": seconds}


class _Missed(Exception):
    """The run was over before the interruption."""


class _Scene:
    """The directories and the run of a trial. ``work/shared`` has what all trials of a campaign use."""

    def __init__(self, trial: Trial, slurm: Slurm, work: Path) -> None:
        self.trial, self.slurm = trial, slurm
        self.shared, self.directory = work / "shared", work / "trials" / f"{trial.seed}-{trial.number}"
        self.draw = random.Random(f"{trial.seed}/{trial.number}")
        self.recipe = recipe_in(self.shared)
        self.run = self.directory / "run"
        self.interruption: Interruption = KINDS[trial.kind]

    def play(self) -> None:
        wanted = reference(self.shared, self.trial.processes)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        job = self._submitted()
        try:
            self._wait_until(self._sight(job), job, f"no sight of the {self.trial.phase}")
            time.sleep(self.draw.uniform(0, 2.0 if self.trial.phase == START else STEP_SECONDS))
            if self._state(job) not in ("RUNNING", "CONFIGURING"):
                raise _Missed(f"the job was {self._state(job)} before the interruption")
            reached = invariants.find_last_step(self.run)
            undo = self.interruption.act(self.slurm, job, self.draw)
            self._wait_until(lambda: self._state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), job, "no end")
            undo()
            self._check(job, wanted, reached)
        finally:
            self._clean(job)
        shutil.rmtree(self.directory)

    def _submitted(self) -> str:
        trial = self.trial
        words = (f"logging.run_directory={self.run}", f"parallel.num_processes={trial.processes}")
        options = ("--to", "slurm", "--until-done", "--nodes", str(trial.nodes), "--time", f"{MINUTES}:00")
        command = (sys.executable, "-m", "trainwright", "submit", str(self.recipe), *words, *options)
        said = self.slurm.run(*command, cwd=self.directory)
        return next(line for line in said.splitlines() if line.startswith("job ")).removeprefix("job ")

    def _sight(self, job: str) -> Callable[[], object]:
        """What shows that the phase begins, or is about to."""
        step = {
            STEP: self.draw.randrange(1, watched_commands.STEPS - 2),
            EVALUATION: self.draw.choice([0, watched_commands.EVALUATES_EVERY - 1, watched_commands.EVALUATES_EVERY]),
            CHECKPOINT: self.draw.choice([1, 2, 3]) * watched_commands.SAVES_EVERY - self.draw.choice([0, 1]),
        }.get(self.trial.phase)
        if step is not None:
            return lambda: watched_commands.has_event(self.run, "step" if step else "start", step or None)
        files = ("job", "recipe.yaml", "logs/prepare.log", "logs/rank-0.log")
        file = self.draw.choice(files)
        return lambda: self._state(job) == "RUNNING" and (file == "job" or (self.run / file).exists())

    def _state(self, job: str) -> str:
        with suppress(AssertionError):  # the controller may be away
            return self.slurm.state(job)
        return "UNKNOWN"

    def _wait_until(self, seen: Callable[[], object], job: str, otherwise: str) -> None:
        end = time.monotonic() + PATIENCE
        while not seen():
            if time.monotonic() > end:
                shown = self._shown(job)
                raise InvariantBroken(f"{otherwise} in {PATIENCE:.0f} s: {shown}\n{self._log()}")
            time.sleep(0.1)

    def _check(self, job: str, wanted: Path, reached: int) -> None:
        state, log = self._state(job), self._log()
        require(state in self.interruption.ends, f"the job ended as {state}: {self._shown(job)}\n{log}")
        invariants.check_complete_and_same(self.run, wanted, exact=True)
        invariants.check_none_lost(self.run)
        left = [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        require(not left, f"left in checkpoints/: {left}")
        require("Traceback (most recent call last)" not in log, f"a traceback in the log: {log}")
        lost = _lost(self.run)
        bound = 1 if self.interruption.grace else watched_commands.SAVES_EVERY + 1
        # Before the first checkpoint there is nothing to resume from, whoever kills the run.
        require(
            lost <= bound or (not self.interruption.grace and reached < watched_commands.SAVES_EVERY),
            f"{lost} steps lost",
        )
        require(not self.slurm.run("squeue", "--noheader"), f"in the queue: {self.slurm.run('squeue')}")
        end = time.monotonic() + _GONE_SECONDS
        while (processes := self.slurm.processes(job)) and time.monotonic() < end:
            time.sleep(0.2)
        require(not processes, f"processes of the job are left: {processes}")

    def _clean(self, job: str) -> None:
        """Cancel what a trial that did not hold has left, and put all nodes back."""
        with suppress(AssertionError, subprocess.SubprocessError):
            self.slurm.run("scancel", "--user=root")
            self.slurm.resume_nodes()
            end = time.monotonic() + 60
            while not self.slurm.is_idle() and time.monotonic() < end:
                time.sleep(0.2)

    def _shown(self, job: str) -> str:
        with suppress(AssertionError, subprocess.SubprocessError):
            return self.slurm.run("scontrol", "show", "job", "--oneliner", job)
        return "scontrol does not answer"

    def _log(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted((self.run / "slurm").glob("*.log")))


def recipe_in(shared: Path) -> Path:
    """The recipe of all trials, with steps that last; made once."""
    file = shared / "recipe.yaml"
    if not file.exists():
        shared.mkdir(parents=True, exist_ok=True)
        settings = (ON_ROWS, "train.step_policies=['tests.support.slow_steps:SlowSteps']", "parallel.strategy=auto")
        recipe = load_shortened_recipe(
            TINY, [*settings, "evaluate.prompts=['What is a list?']", "parallel.num_processes=auto"]
        )
        own = file.with_name(f"recipe-{os.getpid()}.yaml")
        own.write_text(dump_recipe(recipe), encoding="utf-8")
        own.replace(file)
    return file


def variables(work: Path) -> dict[str, str]:
    """What jobs of a campaign in this directory need in their environment."""
    cache = str(work / "shared" / "cache")
    return {"STEP_SECONDS": str(STEP_SECONDS), "TRAINWRIGHT_CACHE": cache, "TRAINWRIGHT_MACHINE": str(MACHINE)}


def reference(shared: Path, processes: int) -> Path:
    """The undisturbed run on as many processes; made once, with make_references before several trials at once."""
    return shared / f"undisturbed-{processes}"


def make_references(work: Path) -> None:
    """Train the undisturbed runs that are not there."""
    shared = work / "shared"
    recipe = recipe_in(shared)
    for processes in sorted({processes for _, processes in SPREADS}):
        run = reference(shared, processes)
        if not (run / "final").exists():
            shutil.rmtree(run, ignore_errors=True)
            words = (f"logging.run_directory={run}", f"parallel.num_processes={processes}")
            command = (sys.executable, "-m", "trainwright", "train", str(recipe), *words)
            given = {**variables(work), "STEP_SECONDS": "0"}
            done = subprocess.run(command, env=environment(**given), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def _lost(run: Path) -> int:
    """The most steps that one start did again."""
    lost, last = 0, 0
    for event in invariants.read_lines(run):
        if event["event"] == "start":
            lost, last = max(lost, last - int(event["resumed_from"] or 0)), int(event["resumed_from"] or 0)
        elif event["event"] == "step":
            last = event["step"]
    return lost


def _endless(draw: random.Random, choices: Sequence[Any]) -> Iterator[Any]:
    for _ in itertools.count():
        yield from draw.sample(choices, len(choices))


def in_words(lines: Sequence[dict[str, Any]]) -> str:
    """A summary of verdicts, by kind."""
    by_kind: dict[str, list[str]] = {}
    for line in lines:
        by_kind.setdefault(line["case"].partition(",")[0], []).append(line["verdict"])
    rows = [f"{kind}: {found.count(HELD)} of {len(found)} held" for kind, found in sorted(by_kind.items())]
    return "\n".join(
        [
            *rows,
            json.dumps(
                {verdict: sum(f.count(verdict) for f in by_kind.values()) for verdict in (HELD, BROKEN, MISSED)}
            ),
        ]
    )
