"""Where one trial takes place: directories of its own, its commands, the undisturbed run, and what must hold."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.faults.drills import invariants, watched_commands
from trainwright.faults.drills.invariants import InvariantBroken, Missed, Undisturbed, require
from trainwright.faults.drills.kinds import KINDS, DrillTrial, FaultCase, Spread
from trainwright.faults.drills.trial_settings import REFERENCE, TrialSettings, forget_refusals, make_once
from trainwright.faults.drills.watched_commands import TRAINWRIGHT, Command, CommandResult
from trainwright.run.run_directory import format_directory_override, set_directory

FINISHED, REQUEST, MACHINE, FAILED, FAULT, STOPPED = 0, 2, 3, 4, 5, 75
# Attempts to inject a fault at its moment.
_ATTEMPTS = 6
# Not allowed in messages: control characters and terminal escape sequences.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Warning|Exit)\b")


class Scene:
    """What the function of a kind works with.

    Attributes:
        work: the trial's directory; ``run`` is in it, and nothing else of it may change.
        draw: the trial's own random numbers.
        injected: when the fault was put in, in seconds since the epoch; None: not yet.
    """

    def __init__(self, trial: DrillTrial, directory: Path, setting: TrialSettings) -> None:
        self.trial = trial
        self.setting = setting
        self.case: FaultCase = trial.case
        self.draw = random.Random(f"{trial.seed}/{trial.name}")
        self.directory = directory
        self.work, self.home, self.temporary = (directory / name for name in ("work", "home", "tmp"))
        for path in (self.work, self.home, self.temporary):
            path.mkdir(parents=True)
        self.run = self.work / "run"
        self.more_runs: list[Path] = []
        self.cache = setting.shared / "cache"
        self.recipe = self.work / "recipe.yaml"
        self.commands: list[Command] = []
        self.injected: float | None = None
        self._before: dict[str, str] | None = None
        for name, file in setting.files.items():
            shutil.copy(file, self.work / name)

    @property
    def phase(self) -> str:
        """Return the phase of the case."""
        return self.case.phase

    @property
    def variant(self) -> str:
        """Return the variant of the case."""
        return self.case.variant

    def use_own_cache(self) -> None:
        """Prepare the data again, in a cache of its own."""
        self.cache = self.directory / "cache"

    # Commands

    def command(
        self, *arguments: str, before: Callable[[], None] | None = None, variables: dict[str, str] | None = None
    ) -> Command:
        """Start a command in the trial's directory."""
        self.remember()
        self.cache.mkdir(parents=True, exist_ok=True)
        command = Command(
            arguments,
            cwd=self.setting.directory or self.work,
            output=self.directory / f"output-{len(self.commands)}.txt",
            variables={**self._variables(self.cache), **(variables or {})},
            before=before,
        )
        self.commands.append(command)
        return command

    def trainwright(self, *arguments: str, **how: Any) -> Command:
        """Start a command of this package."""
        return self.command(*TRAINWRIGHT, *arguments, **how)

    def train(self, *overrides: str, **how: Any) -> Command:
        """Start the run with the strategy and processes of the case."""
        return self.trainwright("train", *self.asked(*overrides), **how)

    def asked(self, *overrides: str) -> tuple[str, ...]:
        """Return the recipe and its overrides."""
        strategy, processes = self.case.spread
        spread = (f"parallel.strategy={strategy}", f"parallel.num_processes={processes}")
        return (str(self.recipe), format_directory_override(self.run), *spread, *overrides)

    def go_on(self, *overrides: str, first: Sequence[str] = ()) -> CommandResult:
        """Continue as a user would after a stop: resume the run, or start it again if nothing was saved."""
        if (self.run / "recipe.yaml").exists():
            command = self.trainwright("train", "--resume", str(self.run), *overrides)
        else:
            files = sorted(str(path.relative_to(self.run)) for path in self.run.rglob("*"))[:40]
            require(not self.run.exists(), f"{self.run} is there, without a recipe: {files}")
            command = self.train(*first, *overrides)
        return self.wait(command)

    def wait(self, command: Command) -> CommandResult:
        """Return how a command ends, in bounded time."""
        return command.wait(self.setting.patience)

    def reach(self, command: Command) -> None:
        """Wait for the phase of the case, just before the fault."""
        sight = watched_commands.build_phase_check(self.run, self.phase, self.draw, evaluates=self.setting.evaluates)
        watched_commands.reach(command, sight, self.phase, self.draw, self.setting.patience)
        self.injected = time.time()

    def wait_until(self, command: Command, condition: Callable[[], Any]) -> None:
        """Return as soon as ``condition()``; see watched_commands.py."""
        watched_commands.wait_until(command, condition, self.setting.patience)

    def wait_for_step(self, command: Command, step: int, starts: int) -> None:
        """Wait until the launch with this index has reached a step."""
        self.wait_until(command, lambda: invariants.find_step_since(self.run, starts) >= step)

    def list_workers(self, command: Command) -> dict[int, int]:
        """Return the process of each rank, once all exist."""
        workers: dict[int, int] = {}

        def all_there() -> bool:
            workers.clear()
            workers.update(command.list_workers())
            if len(workers) == self.case.spread[1]:
                return True
            time.sleep(0.02)  # it reads all processes of the machine
            return False

        self.wait_until(command, all_there)
        return workers

    def draw_worker(self, command: Command) -> tuple[int, int]:
        """Return a rank, drawn once the processes of all exist, and its process."""
        workers = self.list_workers(command)
        rank = self.draw.choice(list(workers))
        return rank, workers[rank]

    def wait_for_interruption(self, command: Command) -> CommandResult:
        """Return how a command ends that was sent a signal. Missed if the run had finished before."""
        result = self.wait(command)
        if result.code == FINISHED:
            raise Missed("the run had finished when the signal came")
        return result

    # Promises

    def expect(self, ended: CommandResult, codes: Collection[int], says: str | Sequence[str] = ()) -> None:
        """Require one of the exit codes and, unless it is 0, a message with all of these patterns."""
        require(ended.code in codes, f"wanted exit code {' or '.join(map(str, codes))}, got {ended}")
        self.words(ended)
        if ended.code != FINISHED:
            for pattern in [says] if isinstance(says, str) else says:
                match = re.search(pattern, ended.text, re.IGNORECASE | re.DOTALL)
                require(match, f"the message lacks {pattern!r}: {ended}")

    def words(self, ended: CommandResult) -> None:
        """Require a clear message: no traceback, no exception name as the last line, no control characters."""
        require("Traceback (most recent call last)" not in ended.text, f"a traceback: {ended}")
        lines = [line for line in ended.text.splitlines() if line.strip()]
        if ended.code > 0:
            require(lines, f"not a word: {ended}")
            require(not _EXCEPTION.match(lines[-1].strip()), f"ends in an exception's name: {ended}")
        control = _CONTROL.search(ended.text)
        require(not control, f"control character {control and control[0]!r} in the output: {ended.text[-1000:]!r}")

    def check_finished_undisturbed(self, ended: CommandResult, overrides: Sequence[str] = ()) -> None:
        """Require that the command finished the run as if nothing had happened."""
        self.expect(ended, (FINISHED,))
        self.check_undisturbed(overrides)

    def resume_and_compare(self, *more: str, overrides: Sequence[str] = (), exact: bool = True) -> None:
        """Resume the run to its end, and require that it is the undisturbed run.

        Args:
            more: overrides of the resumption alone.
            overrides: those that the run began with.
        """
        result = self.go_on(*more, first=overrides)
        self.expect(result, (FINISHED,))
        self.check_undisturbed(overrides, exact=exact)

    def check_undisturbed(self, overrides: Sequence[str] = (), *, exact: bool = True) -> None:
        """Require that the run is the undisturbed one, with nothing half-written beside its checkpoints."""
        invariants.check_complete_and_same(self.run, self.reference(overrides), exact=exact)
        invariants.check_none_lost(self.run)
        leftovers = [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        require(not leftovers, f"left in checkpoints/: {leftovers}")

    def check_nothing_else_changed(self) -> None:
        """Require that outside the run's directory nothing of the trial has changed, nor in its home if it has one."""
        if self._before is None:
            return
        now = self._snapshot()
        for path in sorted(self._before.keys() | now.keys()):
            if self._before.get(path) != now.get(path):
                change = "changed" if path in self._before and path in now else ("made" if path in now else "removed")
                raise InvariantBroken(f"{path} was {change}, and is not of the run")

    def remember(self) -> None:
        """Record what is outside the run's directory, which must not change."""
        if self._before is None:
            self._before = self._snapshot()

    def accept_changes(self) -> None:
        """Accept what the trial itself changed outside the run directory."""
        self._before = self._snapshot()

    def _snapshot(self) -> dict[str, str]:
        contents = {}
        for top in (self.work, self.home):
            for directory, names, files in os.walk(top):
                names[:] = [name for name in names if Path(directory, name) not in (self.run, *self.more_runs)]
                for name in [*files, *names]:
                    path = Path(directory, name)
                    if path.is_symlink() or not path.is_file():
                        contents[str(path)] = os.readlink(path) if path.is_symlink() else "directory"
                    else:
                        contents[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return contents

    # The undisturbed run

    def provide_stopped_run(self) -> None:
        """Provide a run that was killed after its third checkpoint, copied from one that is made once."""
        original = self._make_run_once("stopped", (), self._make_stopped)
        shutil.copytree(original, self.run, symlinks=True)
        self.remember()

    def reference(self, overrides: Sequence[str] = ()) -> Path:
        """Return the directory of the run of this case without a fault, made once."""
        return self._make_run_once(REFERENCE, overrides, self._make_reference)

    def can_train(self, spread: Spread) -> bool:
        """Return whether the run finishes without a fault on another strategy or number of processes."""
        try:
            _make_reference_run(self.setting, replace(self.trial, case=FaultCase(spread)))
        except Undisturbed:
            return False
        return True

    def _make_run_once(self, name: str, overrides: Sequence[str], make: Callable[[Path, Sequence[str]], None]) -> Path:
        files = [self.work / name for name in self.setting.files]
        return make_once(self.setting, files, self.case.spread, name, overrides, make)

    def _variables(self, cache: Path) -> dict[str, str]:
        """Return the environment of a command: the campaign's variables, and over them the trial's own directories.

        A home is the trial's own only if the campaign has none.
        """
        own = {"TMPDIR": str(self.temporary), "TRAINWRIGHT_CACHE": str(cache), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        return {"HOME": str(self.home), **self.setting.variables, **own}

    def _start_at(self, run: Path, overrides: Sequence[str]) -> Command:
        arguments = set_directory(self.asked(), run)
        cache = self.setting.shared / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        return Command(
            [*TRAINWRIGHT, "train", *arguments, *overrides],
            cwd=self.setting.directory or run.parent,
            output=run.with_name("output.txt"),
            variables=self._variables(cache),
        )

    def _make_reference(self, run: Path, overrides: Sequence[str]) -> None:
        start = time.time()
        command = self._start_at(run, overrides)
        try:
            result = self.wait(command)
        finally:
            command.kill()
        if result.code != FINISHED:
            raise Undisturbed(result.code, result.text)
        first = next(event["time"] for event in invariants.read_lines(run) if event["event"] == "step")
        run.with_name("seconds.json").write_text(json.dumps({"start": first - start, "all": result.seconds}))

    def _make_stopped(self, run: Path, overrides: Sequence[str]) -> None:
        # In the background, the third checkpoint of a large model is still being written two steps later.
        overrides = (*overrides, "checkpoint.background=false")
        for _ in range(10):
            shutil.rmtree(run, ignore_errors=True)
            command = self._start_at(run, overrides)
            try:
                self.wait_until(command, lambda: watched_commands.has_event(run, "step", watched_commands.STEPS - 4))
            finally:
                command.kill()
            if invariants.list_checkpoint_steps(run) == [6, 12, 18]:
                return
        raise InvariantBroken("no run could be killed between its third checkpoint and its end")


def inject_fault(trial: DrillTrial, directory: Path, setting: TrialSettings) -> dict[str, float]:
    """Inject the trial's fault into a run; return the measurements. Raises a verdict unless everything held."""
    kind = KINDS[trial.kind]
    for attempt in range(_ATTEMPTS):
        attempt_directory = directory / f"try-{attempt}"
        scene = Scene(trial, attempt_directory, setting)
        scene.draw.seed(f"{trial.seed}/{trial.name}/{attempt}")
        try:
            scene.reference()  # a run that does not finish without a fault is not tried with one
            kind.inject(scene)
            scene.check_nothing_else_changed()
            return measure_trial(scene)
        except Missed:
            if attempt == _ATTEMPTS - 1:
                raise
        except InvariantBroken:
            if os.path.ismount(scene.run.parent):  # seen by this process alone, and gone with it
                shutil.copytree(scene.run, attempt_directory / "kept", symlinks=True, dirs_exist_ok=True)
            raise
        finally:
            for command in scene.commands:
                command.kill()
    raise AssertionError("unreachable")


def measure_trial(scene: Scene) -> dict[str, float]:
    """Return the measures of the trial; ``start``: what an undisturbed start takes to its first step, with imports."""
    if scene.injected is None or not scene.run.exists():
        return {}
    failure_times = [command.wait(0).at for command in scene.commands if command.ended and command.wait(0).code]
    measures = compute_measures(invariants.read_lines(scene.run), scene.injected, failure_times)
    if "recovery" in measures:
        measures["start"] = read_undisturbed_seconds(scene.reference())["start"]
    return measures


def compute_measures(events: Sequence[dict[str, Any]], injected: float, failed: Sequence[float]) -> dict[str, float]:
    """Return the seconds until the fault was reported and until the next step, and the repeated steps.

    Args:
        injected: when the fault was put in.
        failed: when commands ended that did not finish the run.
    """
    failure_times = [*failed, *(event["time"] for event in events if event["event"] == "fault")]
    detection_time = min((time for time in failure_times if time >= injected), default=None)
    measures = {} if detection_time is None else {"detection": detection_time - injected}
    goes_on = ("start", "rewind")
    restart_index = next((n for n, e in enumerate(events) if e["event"] in goes_on and e["time"] > injected), None)
    if restart_index is None:
        return measures
    resume_step = int(events[restart_index].get("resumed_from") or 0)
    reached_step = max((event["step"] for event in events[:restart_index] if event["event"] == "step"), default=0)
    measures["lost"] = max(0, reached_step - resume_step)
    step = next((event for event in events[restart_index:] if event["event"] == "step"), None)
    if step is not None:
        measures["recovery"] = step["time"] - injected
    return measures


def read_undisturbed_seconds(reference: Path) -> dict[str, float]:
    """Return what an undisturbed run took to its first step, and in all."""
    seconds: dict[str, float] = json.loads(reference.with_name("seconds.json").read_text())
    return seconds


def measure_undisturbed_seconds(setting: TrialSettings, trials: Iterable[DrillTrial]) -> float:
    """Return what a run takes without a fault, of the first strategy and number of processes with which it finishes:
    those of the trials, then others. Raises Undisturbed, of the first run, if none does; the next call tries all again.
    """
    every = {trial.case.spread: trial for trial in trials}
    some = next(iter(every.values()))
    every |= {spread: replace(some, case=FaultCase(spread)) for spread in setting.spreads if spread not in every}
    first: Undisturbed | None = None
    for trial in every.values():
        try:
            return read_undisturbed_seconds(_make_reference_run(setting, trial))["all"]
        except Undisturbed as error:
            first = first or error
    forget_refusals(setting, every)
    assert first is not None, "there is a trial"
    raise first


def _make_reference_run(setting: TrialSettings, trial: DrillTrial) -> Path:
    with tempfile.TemporaryDirectory(prefix="trainwright-drill-") as directory:
        return Scene(trial, Path(directory, "scene"), setting).reference()
