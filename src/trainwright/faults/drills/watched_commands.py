"""Real commands: started with limits, watched from outside, including every process that they start.

So are the moments of a run that a fault can be put in at: files that appear, events that are written.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.faults.drills.invariants import InvariantBroken, Missed
from trainwright.machine.allocator import convert_peak_resident

LOOK_SECONDS = 0.004
# Seconds that processes of a command may outlive it.
_GONE_SECONDS = 20.0
_MARK = "TRAINWRIGHT_FAULT_TRIAL"


@dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    Attributes:
        code: negative for signals.
        peak: the resident memory of its largest process, in bytes.
        processor: the seconds of processors that it took, with the processes that it started and waited for.
        at: when, in seconds since the epoch.
    """

    code: int
    text: str
    seconds: float
    peak: int
    processor: float
    at: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s:\n{self.text.strip()[-3000:]}"


def _begin(before: Callable[[], None] | None) -> None:
    """In the child: a hangup is not ignored because the campaign was started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if before is not None:
        before()


class Command:
    """A command that runs in a session of its own; all that it starts is known by a mark in the environment.

    Args:
        before: called in the child before it becomes the command.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        output: Path,
        variables: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.output = output
        self._started_at = time.monotonic()
        self._ended: CommandResult | None = None
        with output.open("wb") as stream:
            self._process = subprocess.Popen(
                arguments,
                cwd=cwd,
                env={**variables, _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(_begin, before),
            )

    @property
    def pid(self) -> int:
        """Return the command's own process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        if self._ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code
                text = self.output.read_text(errors="replace")
                self._ended = CommandResult(
                    code,
                    text,
                    seconds=time.monotonic() - self._started_at,
                    peak=convert_peak_resident(usage.ru_maxrss),
                    processor=usage.ru_utime + usage.ru_stime,
                    at=time.time(),
                )
        return self._ended is not None

    def wait(self, seconds: float) -> CommandResult:
        """Return how it ended. Raises InvariantBroken if it does not end, or if a process that it started survives."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                text = self.output.read_text(errors="replace")
                tree = self.describe()
                self.kill()
                raise InvariantBroken(f"no end in {seconds:.0f} s; it had said:\n{text[-2000:]}\nprocesses: {tree}")
            time.sleep(LOOK_SECONDS)
        assert self._ended is not None
        deadline = time.monotonic() + _GONE_SECONDS
        while survivors := self.processes():
            if time.monotonic() > deadline:
                tree = self.describe()
                self.kill()
                raise InvariantBroken(f"{len(survivors)} processes live on: {tree}; {self._ended}")
            time.sleep(0.05)
        return self._ended

    def processes(self) -> list[int]:
        """Return the living processes of the command, itself included."""
        marker = f"{_MARK}={self.mark}".encode()
        pids = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):
                    alive = (directory / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                    if alive and marker in (directory / "environ").read_bytes():
                        pids.append(int(directory.name))
        return pids

    def list_workers(self) -> dict[int, int]:
        """Return the process of each rank, known by the log that it writes to."""
        workers = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                log = re.fullmatch(r"rank-(\d+)\.log", Path(os.readlink(f"/proc/{pid}/fd/1")).name)
                if log:
                    workers[int(log[1])] = pid
        return dict(sorted(workers.items()))

    def describe(self) -> str:
        """Return its processes, each with its state."""
        lines = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                ranks = [rank for rank, worker in self.list_workers().items() if worker == pid]
                lines.append(f"{pid} {state} {'rank ' + str(ranks[0]) if ranks else ''}".strip())
        return ", ".join(lines) or "none"

    def send(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to the command's own process, or to another one of it; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid if pid is None else pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to its process group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill every process of it."""
        deadline = time.monotonic() + 10
        while (survivors := self.processes()) and time.monotonic() < deadline:
            for pid in survivors:
                self.send(signal.SIGKILL, pid)
            time.sleep(0.02)
        if self._ended is None:
            self.send(signal.SIGKILL)
            while not self.ended and time.monotonic() < deadline:
                time.sleep(0.02)


# The command and not the API: faults hit its process, and its exit codes and messages are what is checked.
TRAINWRIGHT = (sys.executable, "-P", "-m", "trainwright")


IMPORTS, PREPARATION, JOINING = "imports", "preparation", "joining"
FIRST_STEP, STEP, EVALUATION, GENERATION = "first step", "step", "evaluation", "generation"
CHECKPOINT, EXPORT = "checkpoint", "export"
BEFORE_STEPS = (IMPORTS, PREPARATION, JOINING)
TRAINING = (FIRST_STEP, STEP, EVALUATION, GENERATION, CHECKPOINT)
ALL = (*BEFORE_STEPS, *TRAINING, EXPORT)

# How long after the sight of it, at most, in seconds.
_AFTER = {IMPORTS: 0.8, PREPARATION: 0.1, JOINING: 0.2, EVALUATION: 0.02, GENERATION: 0.02, CHECKPOINT: 0.01}
# What every recipe is shortened to.
STEPS, EVALUATES_EVERY, SAVES_EVERY = 24, 12, 6


def reach(command: Command, sight: Callable[[], Any], phase: str, draw: random.Random, patience: float) -> None:
    """Return in the phase, a moment drawn after the sight of it. Missed when the command ended before."""
    wait_until(command, sight, patience)
    time.sleep(draw.uniform(0, _AFTER.get(phase, 0.005)))


def wait_until(command: Command, condition: Callable[[], Any], patience: float) -> None:
    """Return as soon as `condition()`. Missed when the command has ended, InvariantBroken when neither comes."""
    deadline = time.monotonic() + patience
    while not condition():
        if command.ended:
            raise Missed(f"the command ended before the moment came: {command.wait(1)}")
        if time.monotonic() > deadline:
            command.kill()
            raise InvariantBroken(
                f"no sign of the moment in {patience:.0f} s: {command.output.read_text(errors='replace')}"
            )
        time.sleep(LOOK_SECONDS / 2)


def has_event(run: Path, kind: str, step: int | None = None) -> bool:
    """Whether the events have one of the kind (of that step or a later one)."""
    try:
        text = (run / "events.jsonl").read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if f'"event": "{kind}"' in line:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if step is None or event.get("step", 0) >= step:
                return True
    return False


def build_phase_check(run: Path, phase: str, draw: random.Random, *, evaluates: bool = True) -> Callable[[], Any]:
    """Return a function that tells whether the phase has begun.

    Args:
        evaluates: whether texts are generated after an evaluation; else, at the same steps, after the step.
    """
    evaluation_step = draw.choice([0, EVALUATES_EVERY])
    checkpoint_step = draw.choice([SAVES_EVERY, 2 * SAVES_EVERY, 3 * SAVES_EVERY])
    step = draw.randrange(2, STEPS - 3)
    checkpoints = run / "checkpoints"

    def stepped() -> bool:
        return has_event(run, "step", evaluation_step) if evaluation_step else has_event(run, "start")

    return {
        IMPORTS: lambda: (run / "recipe.yaml").exists(),
        PREPARATION: lambda: (run / "logs" / "prepare.log").exists(),
        JOINING: lambda: (run / "logs" / "rank-0.log").exists(),
        FIRST_STEP: lambda: has_event(run, "start"),
        STEP: lambda: has_event(run, "step", step),
        EVALUATION: stepped,
        GENERATION: (lambda: has_event(run, "evaluate", evaluation_step)) if evaluates else stepped,
        CHECKPOINT: lambda: any(
            checkpoints.glob(f".writing-step-{n:08d}")
            for n in range(checkpoint_step, STEPS + 1)
            if checkpoints.is_dir()
        ),
        EXPORT: lambda: any(run.glob(".final.*")) or (run / "final").exists(),
    }[phase]
