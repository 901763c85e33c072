"""Where one trial takes place: directories of its own, its commands, the undisturbed run, and what must hold."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from support.faults import phases, promises
from support.faults.commands import TRAINWRIGHT, Command, Ended, environment
from support.faults.kinds import KINDS, Case, Trial
from support.faults.verdicts import Broken, Missed, require

FINISHED, REQUEST, MACHINE, FAILED, STOPPED = 0, 2, 3, 4, 75
RECIPE = Path(__file__).with_name("recipe.yaml")
# A command on a loaded machine; one that only refuses does so sooner, and in bounded memory.
RUN_SECONDS, REFUSAL_SECONDS, REFUSAL_BYTES = 150.0, 60.0, 1536 * 2**20
# How often a fault is tried to be put in at its moment.
_ATTEMPTS = 6
# What no message may have in it: control characters, the terminal's own sequences among them.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Warning|Exit)\b")


class Scene:
    """What the function of a kind works with.

    Attributes:
        work: the current directory of commands; `run` is in it, and nothing else of it may change.
        draw: the trial's own random numbers.
    """

    def __init__(self, trial: Trial, directory: Path, shared: Path, code: str) -> None:
        self.trial = trial
        self.case: Case = trial.case
        self.draw = random.Random(f"{trial.seed}/{trial.name}")
        self.directory = directory
        self.work, self.home, self.temporary = (directory / name for name in ("work", "home", "tmp"))
        for path in (self.work, self.home, self.temporary):
            path.mkdir(parents=True)
        self.run = self.work / "run"
        self.more_runs: list[Path] = []
        self.cache = shared / "cache"
        self.recipe = self.work / "recipe.yaml"
        self.commands: list[Command] = []
        self._shared, self._code = shared, code
        shutil.copy(RECIPE, self.recipe)
        write_rows(self.work / "rows.jsonl")
        (self.work / "bystander.txt").write_text("not part of the run\n")
        self._before: dict[str, str] | None = None

    @property
    def phase(self) -> str:
        return self.case.phase

    @property
    def variant(self) -> str:
        return self.case.variant

    def use_own_cache(self) -> None:
        """Have data prepared anew, in a cache of the trial's own."""
        self.cache = self.directory / "cache"

    # Commands

    def command(
        self,
        *arguments: str,
        before: Callable[[], None] | None = None,
        prefix: Sequence[str] = (),
        variables: dict[str, str] | None = None,
    ) -> Command:
        """Start a command in the trial's directory."""
        self.remember()
        self.cache.mkdir(parents=True, exist_ok=True)
        all_variables = {**environment(self.home, self.temporary, self.cache), **(variables or {})}
        output = self.directory / f"output-{len(self.commands)}.txt"
        command = Command([*prefix, *arguments], cwd=self.work, output=output, variables=all_variables, before=before)
        self.commands.append(command)
        return command

    def trainwright(self, *arguments: str, **how: Any) -> Command:
        return self.command(*TRAINWRIGHT, *arguments, **how)

    def train(self, *overrides: str, **how: Any) -> Command:
        """Start the run, spread as the case has it."""
        return self.trainwright("train", *self.asked(*overrides), **how)

    def asked(self, *overrides: str) -> tuple[str, ...]:
        """The recipe and what is put over it."""
        strategy, processes = self.case.spread
        spread = (f"parallel.strategy={strategy}", f"parallel.num_processes={processes}")
        return (str(self.recipe.name), f"logging.run_directory={self.run}", *spread, *overrides)

    def go_on(self, *overrides: str, first: Sequence[str] = ()) -> Ended:
        """Do what a user does after a stop: resume the run, or where nothing was kept, start it again."""
        if (self.run / "recipe.yaml").exists():
            command = self.trainwright("train", "--resume", str(self.run), *overrides)
        else:
            require(not self.run.exists(), f"{self.run} is there, without a recipe: {_listing(self.run)}")
            command = self.train(*first, *overrides)
        return command.wait(RUN_SECONDS)

    def reach(self, command: Command) -> None:
        """Wait for the phase of the case."""
        phases.reach(command, self.run, self.phase, self.draw)

    def wait_until(self, command: Command, seen: Callable[[], Any]) -> None:
        phases.wait_until(command, seen)

    def workers(self, command: Command) -> dict[int, int]:
        """The process of each rank, when all of them are there."""
        found: dict[int, int] = {}

        def all_there() -> bool:
            found.clear()
            found.update(command.workers())
            if len(found) == self.case.spread[1]:
                return True
            time.sleep(0.02)  # it is a look at all processes of the machine
            return False

        phases.wait_until(command, all_there)
        return found

    # Promises

    def expect(self, ended: Ended, codes: Collection[int], says: str | Sequence[str] = ()) -> None:
        """The command ended with one of the codes, in words, saying all of these patterns where it is not 0."""
        require(ended.code in codes, f"wanted exit code {' or '.join(map(str, codes))}, got {ended}")
        self.words(ended)
        if ended.code != FINISHED:
            for pattern in [says] if isinstance(says, str) else says:
                found = re.search(pattern, ended.text, re.IGNORECASE | re.DOTALL)
                require(found, f"the message lacks {pattern!r}: {ended}")

    def words(self, ended: Ended) -> None:
        """The message is words: no traceback, no exception's name as the last line, no control characters."""
        require("Traceback (most recent call last)" not in ended.text, f"a traceback: {ended}")
        found = [line for line in ended.text.splitlines() if line.strip()]
        if ended.code > 0:
            require(found, f"not a word: {ended}")
            require(not _EXCEPTION.match(found[-1].strip()), f"ends in an exception's name: {ended}")
        control = _CONTROL.search(ended.text)
        require(not control, f"control character {control and control[0]!r} in the output: {ended.text[-1000:]!r}")

    def refused(self, ended: Ended, says: str | Sequence[str], codes: Collection[int] = (REQUEST,)) -> None:
        """It was refused in words, in bounded time and memory, and nothing was left behind."""
        self.expect(ended, codes, says)
        require(ended.peak < REFUSAL_BYTES, f"took {ended.peak / 2**20:.0f} MiB: {ended}")
        require(not self.run.exists(), f"a refused run is there: {_listing(self.run)}")

    def stays_undisturbed(self, ended: Ended, overrides: Sequence[str] = ()) -> None:
        """The command finished the run as if nothing had happened."""
        self.expect(ended, (FINISHED,))
        self.as_undisturbed(overrides)

    def resumes(self, *more: str, overrides: Sequence[str] = (), exact: bool = True) -> None:
        """The run goes on to its end, and is the undisturbed run.

        Args:
            more: overrides of the resumption alone.
            overrides: those that the run began with.
        """
        ended = self.go_on(*more, first=overrides)
        self.expect(ended, (FINISHED,))
        self.as_undisturbed(overrides, exact=exact)

    def as_undisturbed(self, overrides: Sequence[str] = (), *, exact: bool = True) -> None:
        promises.complete_and_same(self.run, self.reference(overrides), exact=exact)
        promises.none_lost(self.run)
        leftovers = [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        require(not leftovers, f"left in checkpoints/: {leftovers}")

    def nothing_else_changed(self) -> None:
        """Outside the run's directory everything is as it was."""
        if self._before is None:
            return
        now = self._snapshot()
        for path in sorted(self._before.keys() | now.keys()):
            if self._before.get(path) != now.get(path):
                what = "changed" if path in self._before and path in now else ("made" if path in now else "removed")
                raise Broken(f"{path} was {what}, and is not of the run")

    def remember(self) -> None:
        """Take what is outside the run's directory now for what has to stay."""
        if self._before is None:
            self._before = self._snapshot()

    def accept_changes(self) -> None:
        """Accept what the trial itself changed outside the run directory."""
        self._before = self._snapshot()

    def _snapshot(self) -> dict[str, str]:
        found = {}
        for top in (self.work, self.home):
            for directory, names, files in os.walk(top):
                names[:] = [name for name in names if Path(directory, name) not in (self.run, *self.more_runs)]
                for name in [*files, *names]:
                    path = Path(directory, name)
                    if path.is_symlink() or not path.is_file():
                        found[str(path)] = os.readlink(path) if path.is_symlink() else "directory"
                    else:
                        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    # The undisturbed run

    def stopped_run(self) -> None:
        """Have a run in the trial's directory that was killed after its third checkpoint, copied from one made once."""
        place = self._once("stopped", (), self._make_stopped)
        shutil.copytree(place, self.run, symlinks=True)
        self.remember()

    def reference(self, overrides: Sequence[str] = ()) -> Path:
        """The directory of the run of this case without a fault, made once."""
        return self._once("undisturbed", overrides, self._make_reference)

    def _once(self, name: str, overrides: Sequence[str], make: Callable[[Path, Sequence[str]], None]) -> Path:
        """The run that `make` makes at a path, with this case's spread; another product or recipe has another."""
        strategy, processes = self.case.spread
        texts = [name, self._code, strategy, str(processes), *overrides]
        files = [self.recipe, self.work / "rows.jsonl"]
        digest = hashlib.sha256(json.dumps([*texts, *(f.read_text() for f in files)]).encode()).hexdigest()[:16]
        place = self._shared / "runs" / digest
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "run").exists():
                for file in files:
                    shutil.copy(file, place / file.name)
                shutil.rmtree(place / "scratch", ignore_errors=True)
                make(place / "scratch", overrides)
                (place / "scratch").rename(place / "run")
        return place / "run"

    def _start_at(self, run: Path, overrides: Sequence[str]) -> Command:
        asked = [f"logging.run_directory={run}" if a.startswith("logging.run_d") else a for a in self.asked()]
        (self._shared / "cache").mkdir(parents=True, exist_ok=True)
        return Command(
            [*TRAINWRIGHT, "train", *asked, *overrides],
            cwd=run.parent,
            output=run.with_name("output.txt"),
            variables=environment(self.home, self.temporary, self._shared / "cache"),
        )

    def _make_reference(self, run: Path, overrides: Sequence[str]) -> None:
        ended = self._start_at(run, overrides).wait(RUN_SECONDS)
        if ended.code != FINISHED:
            raise Broken(f"the undisturbed run did not finish: {ended}")

    def _make_stopped(self, run: Path, overrides: Sequence[str]) -> None:
        for _ in range(10):
            shutil.rmtree(run, ignore_errors=True)
            command = self._start_at(run, overrides)
            phases.wait_until(command, lambda: phases.has_event(run, "step", phases.STEPS - 4))
            command.kill()
            if promises.checkpoint_steps(run) == [6, 12, 18]:
                return
        raise Broken("no run could be killed between its third checkpoint and its end")


def perform(trial: Trial, directory: Path, shared: Path, code: str) -> None:
    """Put the trial's fault into a run; raises a verdict unless everything held."""
    kind = KINDS[trial.kind]
    for attempt in range(_ATTEMPTS):
        place = directory / f"try-{attempt}"
        scene = Scene(trial, place, shared, code)
        scene.draw.seed(f"{trial.seed}/{trial.name}/{attempt}")
        try:
            kind.inject(scene)
            scene.nothing_else_changed()
            return
        except Missed:
            if attempt == _ATTEMPTS - 1:
                raise
        except Broken:
            if os.path.ismount(scene.run.parent):  # seen by this process alone, and gone with it
                shutil.copytree(scene.run, place / "kept", symlinks=True, dirs_exist_ok=True)
            raise
        finally:
            for command in scene.commands:
                command.kill()


def write_rows(path: Path, count: int = 72) -> None:
    """Questions and answers, the same on every machine."""
    draw = random.Random(7)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(90), draw.randrange(90)
            answer = f"{a} and {b} make {a + b}" + ", which is even." * ((a + b) % 2 == 0)
            file.write(json.dumps({"question": f"What is {a} and {b}?", "answer": answer}) + "\n")


def _listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))[:40]
