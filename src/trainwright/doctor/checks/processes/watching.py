"""Watch two processes of a launch, so that one that is stopped is reported and killed instead of waited for."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from trainwright.doctor.checks.check import CannotCheck, CheckEnded, Finding, Severity

_LOOKS = 0.25  # seconds between checks
_STILL_SECONDS = 2.0  # seconds for which a process may be stopped
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@contextmanager
def watched(what: str, seconds: float, end: float) -> Iterator[None]:
    """Watch the launches of the body, from the main thread's timer signal (setitimer(2)).

    Args:
        what: a name of the launch for messages.
        seconds: how long the body may take.
        end: time.monotonic() at which all checks must have ended.

    Raises:
        CheckEnded: a process was stopped, or did not end within ``seconds``; all of them have been killed.
        CannotCheck: time was up for all checks.
    """
    limit = time.monotonic() + seconds
    watch = _Watch(min(limit, end), what)
    before = signal.signal(signal.SIGALRM, watch.look)
    signal.setitimer(signal.ITIMER_REAL, _LOOKS, _LOOKS)
    try:
        yield
    except Exception:
        if watch.finding is None:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    if watch.finding is not None:
        if watch.is_late and end < limit:
            raise CannotCheck("the time limit was reached before it finished; run it alone")
        raise CheckEnded(watch.finding)


class _Watch:
    def __init__(self, end: float, what: str) -> None:
        self.finding: Finding | None = None
        self.is_late = False
        self._end = end
        self._what = what
        self._workers: dict[int, int] = {}  # pid by the number in the name of the process
        self._still: dict[int, float] = {}  # by rank: since when it is stopped

    def look(self, number: int, frame: FrameType | None) -> None:
        """Check every process; end the launch if one is stopped."""
        now = time.monotonic()
        for rank, pid in self._ranks():
            if _status(pid) not in _STOPPED:
                self._still.pop(rank, None)
            elif now - self._still.setdefault(rank, now) >= _STILL_SECONDS:
                self._end_with(_stopped(self._what, rank, pid))
        if now > self._end:
            self.is_late = self.finding is None
            self._end_with(self._late())

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yield rank and pid of each worker; they are started in the order of the ranks, and numbered."""
        for child in multiprocessing.active_children():
            number = child.name.rpartition("-")[2]
            if number.isdigit() and child.pid is not None:
                self._workers[int(number)] = child.pid
        yield from enumerate(pid for _, pid in sorted(self._workers.items()))

    def _late(self) -> Finding:
        states = ", ".join(f"rank {rank} is {_status(pid) or 'gone'}" for rank, pid in self._ranks())
        return Finding(
            Severity.BROKEN,
            f"{self._what}: the ranks did not finish in time ({states or 'none is left'})",
            "they may wait for each other, the disk or the network",
            "run it alone on an idle machine, `trainwright doctor strategies`; usual causes are a firewall on the "
            "loopback interface, a disk that does not answer, and a driver that hangs (dmesg)",
        )

    def _end_with(self, finding: Finding) -> None:
        if self.finding is None:
            self.finding = finding
            raise CheckEnded(finding)


def _status(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def _stopped(what: str, rank: int, pid: int) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what}: rank {rank} (process {pid}) is stopped",
        "the other ranks wait for it in a collective, until they time out",
        "find what stops processes on this machine (SIGSTOP, ctrl-Z, a debugger, a scheduler that suspends jobs); a "
        "stopped "
        "process continues with `kill -CONT PID`",
    )
