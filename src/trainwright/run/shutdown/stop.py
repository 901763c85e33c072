"""Stop requests: signals reach the launcher, the launcher raises one flag, and the workers read it.

The flag is a byte of shared memory, so every worker sees the request exactly once, no matter how many signals were sent
and to which process (a terminal's ctrl-C goes to the whole group, a scheduler's SIGTERM may too). `StopWatcher` ends
workers that do not follow a request: some are suspended, others have nothing to save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from trainwright.errors import Interrupted
from trainwright.utils.text import say

START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"
# Schedulers send SIGUSR1 or SIGUSR2 before the end, if configured, and the kernel SIGXCPU (ulimit -t).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

# Wrappers such as make or a notebook forward a ctrl-C that the terminal has already sent to every process: a second
# signal within this time is the same request.
_SAME_REQUEST_SECONDS = 1.0
_LOOK_SECONDS = 0.5
# A worker that gets SIGTERM waits this long for its launcher, which may have got it too, to decide what it means.
_LAUNCHER_DECIDES_SECONDS = 1.0

_SHELLS = {"bash", "sh", "dash", "zsh", "ksh", "mksh", "csh", "tcsh", "fish", "busybox"}

# What a stopped launch can be resumed from.
CHECKPOINT, NEWEST, BEFORE_FIRST_STEP = "checkpoint", "newest", "before the first step"


class Flag(Protocol):
    """Shared or local memory that is zero until the event of its name has happened."""

    value: int


class _LocalFlag:
    value = 0


# The values of the flag `resize`: after the next checkpoint, at once, or after a checkpoint that is to be written now.
RESIZE_AT_CHECKPOINT, RESIZE_NOW, RESIZE_SAVING = 1, 2, 3

_flag: Flag = _LocalFlag()
_resize: Flag = _LocalFlag()
_fresh: Flag = _LocalFlag()
_handles_signals = False  # whether a launcher of ours handles signals, or has done so


class Flags:
    """Flags in memory that a launcher shares with its workers.

    Attributes:
        stop: a stop was requested.
        fresh: the workers have not changed their initial state yet, so nothing is lost if they end.
        resize: the run is to go on with another number of processes, after its next checkpoint or one written now.
    """

    def __init__(self) -> None:
        import multiprocessing  # every command imports this module

        context = multiprocessing.get_context(START_METHOD)
        self.stop: Flag = context.RawValue(ctypes.c_byte, 0)
        self.fresh: Flag = context.RawValue(ctypes.c_byte, 0)
        self.resize: Flag = context.RawValue(ctypes.c_byte, 0)


def set_fresh(fresh: bool) -> None:
    """Set whether this worker still has its initial state: True when it begins, False before it changes the state."""
    _fresh.value = int(fresh)


def request_stop() -> None:
    """Request a stop of the run from within one of its processes."""
    _flag.value = 1


def stop_requested() -> bool:
    """Return True once this run was asked to stop. Ranks may see it at different times: agree before acting."""
    return bool(_flag.value) or _resize.value == RESIZE_NOW


def is_resize_requested() -> bool:
    """Return whether this run is to end after its next checkpoint, to go on with another number of processes."""
    return bool(_resize.value)


def list_heeded_signals() -> list[signal.Signals]:
    """Return the stop signals without a SIGHUP that is ignored: with nohup, the run is to outlive the terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]


def take_save_to_resize() -> bool:
    """Return whether a checkpoint is to be written to go on with another number of processes; it is asked for once."""
    save = _resize.value == RESIZE_SAVING
    if save:
        _resize.value = RESIZE_AT_CHECKPOINT
    return save


class Stopping:
    """The launcher's side: while entered, the first stop signal raises the flag and a second SIGINT kills.

    `kill` is called on that second SIGINT, in the main thread; it may raise. `notice` is shown on the first signal.
    """

    def __init__(self, notice: str = "stopping: each worker finishes its step and a checkpoint is written") -> None:
        self.flags = Flags()
        self.kill: Callable[[], None] = _interrupt
        self.killed = False
        self.resumes_from = CHECKPOINT
        self._notice = notice
        self._look: Callable[[], str | None] | None = None
        self._looked = self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        global _handles_signals
        _handles_signals = True
        for number in list_heeded_signals():
            self._previous[number] = signal.signal(number, self._handle)
        _stop_with_shell()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def flag(self) -> Flag:
        """Return the flag that workers read."""
        return self.flags.stop

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested."""
        now = time.monotonic()
        if self._look is not None and not self.flag.value and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if (reason := self._look()) is not None:
                self.flag.value = 1
                _notify(f"stopping: {reason}")
        return bool(self.flag.value)

    @contextmanager
    def add_look(self, look: Callable[[], str | None]) -> Iterator[None]:
        """Ask ``look`` too whether a stop is requested, while the context is entered; it returns the reason."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    @contextmanager
    def let_workers_run(self) -> Iterator[None]:
        """While entered, only set `killed` on the second SIGINT: who runs the workers looks at it."""
        before, self.kill = self.kill, lambda: None
        try:
            yield
        finally:
            self.kill = before

    def end(self, resumes_from: str) -> None:
        """Kill the workers now. ``resumes_from``: what the run can be resumed from."""
        self.killed, self.resumes_from = True, resumes_from
        self.kill()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.flag.value:
            self.flag.value = 1
            self._first = now
            _notify(self._notice)
        elif number == signal.SIGINT and now - self._first > _SAME_REQUEST_SECONDS:
            self.end(NEWEST)


def describe_stop(run: Path, resumes_from: str = CHECKPOINT) -> str:
    """Return how a stopped run ended, and what it can be resumed from.

    Args:
        resumes_from: of ``Stopping``.
    """
    from trainwright.engine.checkpoints.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=False)
    steps = checkpoints.steps()
    if not steps:
        return "stopped before the first checkpoint; nothing was kept"
    if resumes_from == CHECKPOINT:
        return "stopped after a checkpoint"
    outcome = "killed" if resumes_from == NEWEST else "stopped before another step"
    return f"{outcome}; the newest complete checkpoint is kept ({checkpoints.path(steps[-1])})"


def _notify(line: str) -> None:
    """Write a line to standard error, past the buffered sys.stderr, which a signal may have interrupted.

    A terminal or a pipe that is closed, which may be why the run is to stop, must not keep it from its checkpoint.
    """
    with suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


@contextmanager
def interrupt_on_stop(*, to_the_end: bool = False) -> Iterator[None]:
    """Raise Interrupted in the main thread on a stop signal, while nothing has begun.

    ``to_the_end``: what follows is the end of the process, whose exit code no signal changes any more.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _handles_signals:  # otherwise it is handled when all is done
            raise Interrupted

    previous = {number: signal.signal(number, interrupt) for number in list_heeded_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if to_the_end else handler)


def follow_launcher(flags: Flags, ended: Callable[[signal.Signals], None]) -> None:
    """Follow the launcher in this worker: its flag decides, and signals to the worker itself are ignored.

    There are two exceptions. SIGTERM ends the process if no stop was requested, after ``ended`` was called. A Python
    handler would not run while the main thread waits inside a collective, so a thread reads the signal from a pipe.
    SIGXCPU goes to the process that has used up its CPU time, and stops the whole run.
    """
    global _flag, _fresh, _resize
    _flag, _fresh, _resize = flags.stop, flags.fresh, flags.resize
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in list_heeded_signals():
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=restore_default_signals)
    threading.Thread(target=_watch_termination, args=(read, flags, ended), daemon=True).start()


def follow_signals() -> None:
    """Handle signals in a worker of another launcher (torchrun, srun): any stop signal requests a stop."""
    for number in list_heeded_signals():
        signal.signal(number, lambda *_: request_stop())


def restore_default_signals() -> None:
    """Restore the default signal handling, for child processes that do not handle stop requests."""
    signal.set_wakeup_fd(-1)
    for number in (*list_heeded_signals(), signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def _watch_termination(read: int, flags: Flags, ended: Callable[[signal.Signals], None]) -> None:
    while signals := os.read(read, 1):
        if signals[0] == signal.SIGXCPU:
            flags.stop.value = 1
        if signals[0] != signal.SIGTERM:
            continue
        deadline = time.monotonic() + _LAUNCHER_DECIDES_SECONDS
        while not flags.stop.value and time.monotonic() < deadline:
            time.sleep(0.02)
        if not flags.stop.value:
            ended(signal.SIGTERM)
            os._exit(128 + signal.SIGTERM)


def _ignore(number: int, frame: FrameType | None) -> None:
    # A function, not SIG_IGN: SIG_IGN would be inherited by every program a worker starts.
    pass


def _interrupt() -> None:
    raise KeyboardInterrupt


def _stop_with_shell() -> None:
    """Have the kernel send SIGTERM when the job script's shell dies: the run stops after a checkpoint."""
    parent = os.getppid()
    if not sys.platform.startswith("linux") or find_scheduler_job() is None or not is_shell(parent):
        return
    if signal_after_parent(signal.SIGTERM, parent):
        os.kill(os.getpid(), signal.SIGTERM)


def is_shell(pid: int) -> bool:
    """Return whether a process is a shell."""
    try:
        return Path(f"/proc/{pid}/exe").resolve().name in _SHELLS
    except OSError:
        return False


# Time from the request until anything is forced: the first step may be over in a moment.
_FRESH_SECONDS = 5.0
# How long a process may be suspended after the request, and again after it was told to continue.
_STILL_SECONDS, _WOKEN_SECONDS = 3.0, 10.0


class StopWatcher:
    """Ensure that a stop ends a launch in bounded time. Call ``check`` repeatedly.

    Args:
        processes: pid of the worker of every rank.
    """

    def __init__(
        self,
        stopping: Stopping,
        processes: Callable[[], Mapping[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopping = stopping
        self._processes = processes
        self._clock = clock
        self._since: float | None = None  # when the request was seen
        self._still: dict[int, float] = {}  # by rank: the time since it was found suspended
        self._woken: dict[int, float] = {}

    def check(self) -> None:
        """Wake suspended workers (SIGSTOP), and end the launch if that does not help or nothing is lost."""
        if not self._stopping.flag.value:
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if self._stopping.flags.fresh.value and now - self._since >= _FRESH_SECONDS:
            self._stopping.end(BEFORE_FIRST_STEP)
        for rank, pid in self._processes().items():
            if not _is_suspended(pid):
                self._still.pop(rank, None)
            elif now - self._still.setdefault(rank, now) >= _STILL_SECONDS:
                self._wake(rank, pid, now)

    def _wake(self, rank: int, pid: int, now: float) -> None:
        if rank not in self._woken:
            self._woken[rank] = now
            say(f"rank {rank} (process {pid}) is stopped; sending SIGCONT", file=sys.stderr)
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        elif now - self._woken[rank] >= _WOKEN_SECONDS:
            say(f"rank {rank} (process {pid}) does not continue, so all workers are killed", file=sys.stderr)
            self._stopping.end(NEWEST)


def _is_suspended(pid: int) -> bool:
    import psutil  # here, as every command imports this module

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


# Set in every job of Slurm, PBS (and Torque), LSF, Grid Engine, Flux and Cobalt.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID", "COBALT_JOBID")
# Set by what starts a run again after a fault of a machine, and is no scheduler that sets one of these.
STARTS_AGAIN = "TRAINWRIGHT_STARTS_AGAIN"


def find_scheduler_job() -> str | None:
    """Return the number of the scheduler's job of this process, with Slurm's index in an array; None outside of one.

    Without its index, the element of an array that starts last has the number of the array, which Slurm's commands take
    for all of its elements.
    """
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and element:
        return f"{array}_{element}"
    return next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), None)


def is_restart() -> bool:
    """Return whether what has started this process may start it again when a machine has failed (exit code 5)."""
    return find_scheduler_job() is not None or bool(os.environ.get(STARTS_AGAIN))


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def signal_after_parent(number: signal.Signals, parent: int) -> bool:
    """Have the kernel send this signal to this process when its parent dies in any way (prctl(2)), on Linux only.

    Returns:
        Whether ``parent``, its pid, has died before that.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() != parent
