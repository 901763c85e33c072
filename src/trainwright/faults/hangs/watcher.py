"""Watch the workers on this machine, by what they report and what the kernel knows, and report when one hangs.

Those that another launcher started are watched by a process beside them. It ends when the worker that started it closes
its standard input, or has ended.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from trainwright.engine.events import Fault, Notice, append_event
from trainwright.errors import EXIT_TRAINING, TrainingError
from trainwright.faults.hangs import evidence
from trainwright.faults.hangs.judge import STORAGE, Machines, RankState, Verdict, find_conflict, judge
from trainwright.machine.usage import compute_process_age
from trainwright.recipe.loading import load_recipe
from trainwright.run.run_directory import RECIPE
from trainwright.run.shutdown.exit_code import record_exit_code
from trainwright.run.shutdown.failure import Cause
from trainwright.run.supervisor import WatcherVerdict
from trainwright.utils.heartbeat import Beat, build_heartbeat_path, create_heartbeat_directory, read
from trainwright.utils.text import format_seconds, say

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.worker_processes import WorkerRanks


_BYTES_PER_SECOND = 64 * 2**10  # a process that moves fewer does not read or write a model
_READ = 16  # `count_moved_bytes` counts one byte for each 16 that were read, but not from storage


@dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
        suspended: stopped by a signal, while the process that started it runs.
        paused: held by a debugger, or stopped together with the process that started it: somebody wants it so.
        on_disk: in an uninterruptible wait, normally for a disk or a network file system.
        used: seconds of CPU time of all its threads.
        waited: seconds for which a thread was ready but had no core, by thread; empty where the kernel does not count.
    """

    suspended: bool
    paused: bool
    on_disk: bool
    used: float
    waited: Mapping[int, float]

    def measure_starvation(self, before: ProcessState) -> float:
        """Return the most seconds since ``before`` for which one of its threads was ready but had no core."""
        common = self.waited.keys() & before.waited.keys()
        return max((self.waited[thread] - before.waited[thread] for thread in common), default=0.0)


def read_state(pid: int, *, closely: bool = False) -> ProcessState | None:
    """Return the state of a process; None if it has ended.

    Args:
        closely: look at all threads, which takes milliseconds where there are many; else at the main one.
    """
    try:
        process = psutil.Process(pid)
        status, times = process.status(), process.cpu_times()
        stopped = status == psutil.STATUS_STOPPED
        paused = status == psutil.STATUS_TRACING_STOP or (stopped and _is_stopped(process.parent()))
    except psutil.Error:
        return None
    if status == psutil.STATUS_ZOMBIE:
        return None
    on_disk = status == psutil.STATUS_DISK_SLEEP
    seconds = times.user + times.system
    return ProcessState(stopped and not paused, paused, on_disk, seconds, _read_waited_seconds(pid, closely))


def count_moved_bytes(pid: int) -> int:
    """Return the bytes that a process and those that it has started have written, and read from storage, so far.

    Of what was read otherwise a part is added: it is from caches, file systems that do not tell, or from /proc, where
    the ledger of a rank reads some 20 KB every second.
    """
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, AttributeError, OSError):  # it has ended, or the system does not count
                counters = member.io_counters()
                total += int(counters.write_chars + counters.read_bytes + counters.read_chars // _READ)
    return total


class Moving:
    """Whether a process reads or writes a model; the ledger of a rank writes some bytes all the time."""

    def __init__(self) -> None:
        self._moved: int | None = None
        self._seconds = 0.0

    def __call__(self, pid: int, passed: float) -> bool:
        """Return whether it has moved the bytes of a model since it last did; ``passed``: seconds since the last call.

        The first call returns True.
        """
        total, self._seconds = count_moved_bytes(pid), self._seconds + passed
        if self._moved is not None and total - self._moved < _BYTES_PER_SECOND * max(1.0, self._seconds):
            return False
        self._moved, self._seconds = total, 0.0
        return True


def read_suspended_seconds() -> float:
    """Return the seconds that the machine has been suspended since it was started."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _is_stopped(process: psutil.Process | None) -> bool:
    return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _read_waited_seconds(pid: int, closely: bool) -> dict[int, float]:
    tasks = Path(f"/proc/{pid}/task")
    seconds: dict[int, float] = {}
    for thread in _list_threads(tasks) if closely else (pid,):
        with suppress(OSError, ValueError):
            _, nanoseconds, _ = (tasks / str(thread) / "schedstat").read_text(encoding="ascii").split()
            seconds[thread] = int(nanoseconds) / 1e9
    return seconds


def _list_threads(tasks: Path) -> Iterable[int]:
    try:
        return [int(task.name) for task in tasks.iterdir()]
    except OSError:
        return []


_CHECK_SECONDS = 0.25
# A longer gap between two checks is time in which this process, and probably the workers, did not run.
_LONGEST_GAP = 1.0
# Connections and file systems may take a while after the machine was suspended.
_AFTER_SLEEP = 60.0
# How long waiting for a disk is not counted.
_DISK_SECONDS = 120.0
# A rank without a mark for this time is looked at closely, which takes more.
_QUIET = 3.0
_KIND = "hang"


@dataclass(frozen=True)
class WatchedRun:
    """The run whose workers are watched.

    Attributes:
        on_hang: ``faults.on_hang`` of the recipe.
        compiled: whether the model is compiled.
        restarts: whether the launcher can restart it.
    """

    run: Path
    on_hang: str
    compiled: bool
    restarts: bool = True

    @classmethod
    def of(cls, run: Path) -> WatchedRun:
        """Read from the run's recipe what a watcher needs."""
        recipe = load_recipe(run / RECIPE)
        return cls(run, recipe.faults.on_hang, recipe.train.compile is True)


@dataclass
class _Rank:
    """What the watcher remembers about a rank since its last mark."""

    beat: Beat
    state: ProcessState
    used: float  # at the mark
    quiet: float = 0.0
    passed: float = 0.0  # seconds of the watcher's clock
    on_disk: float = 0.0
    suspended: float = 0.0
    moving: Moving = field(default_factory=Moving)

    @property
    def seen(self) -> RankState:
        busy = (self.state.used - self.used) / self.passed if self.passed else 0.0
        return RankState(self.beat, self.quiet, self.suspended, busy)


class HangWatcher:
    """Report when a worker hangs. Call ``check`` repeatedly, from a process that is not a worker.

    Args:
        processes: returns the pid of the worker of every rank here.
        machines: the watchers of the run's machines, if there are several; only that of rank 0 reports.
        ending: called with the exit code and the message before the workers are killed.
    """

    def __init__(
        self,
        watched: WatchedRun,
        processes: Callable[[], Mapping[int, int]],
        machines: Machines | None = None,
        ending: Callable[[int, str], None] = lambda code, message: None,
    ) -> None:
        self._watched = watched
        self._processes = processes
        self._machines = machines
        self._decides = machines is None or machines.decides
        self._ending = ending
        self._everyone: dict[int, RankState] = {}
        self._directory = create_heartbeat_directory(watched.run)
        self._ranks: dict[int, _Rank] = {}
        self._ever: dict[int, int] = {}  # the ranks here with their processes
        self._checked = time.monotonic()
        self._asleep = read_suspended_seconds()
        self._reported: tuple[int, ...] = ()  # the late ranks of the hang that goes on
        self._since = 0.0
        self._asked: dict[int, int] = {}  # ranks that write their collectives

    def check(self) -> None:
        """Look at the workers, at most a few times a second.

        Raises:
            WatcherVerdict: they hang and the recipe asks to end or to restart the run; they have been killed.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        elapsed, self._checked = min(now - self._checked, _LONGEST_GAP), now
        self._look(elapsed)
        verdict = self._build_verdict()
        if verdict is None:
            self._recovered(now)
        elif not self._reported:
            self._reported, self._since = verdict.ranks, now
            self._report(verdict)

    def close(self) -> str | None:
        """Remove the heartbeats; say how the collectives of the ranks differ, also of those that have ended."""
        everyone = {rank: state.beat for rank, state in self._everyone.items()}
        conflict = find_conflict(everyone | self._read_beats(self._ever))
        if self._machines is not None:
            self._machines.close()
        if self._directory is not None:
            evidence.remove_pipes(self._directory, self._ever)
            for rank in self._ever:
                build_heartbeat_path(self._directory, rank).unlink(missing_ok=True)
            with suppress(OSError):  # another machine of the run may be this one
                self._directory.rmdir()
        return None if conflict is None else conflict.detail

    def _look(self, passed: float) -> None:
        pids = self._processes()
        self._ever |= pids
        quiet = {rank for rank, observed in self._ranks.items() if observed.quiet > _QUIET}
        process_states = {rank: read_state(pid, closely=rank in quiet) for rank, pid in pids.items()}
        states = {rank: state for rank, state in process_states.items() if state is not None}
        beats = self._read_beats({rank: pids[rank] for rank in states})
        observed = {rank: self._ranks[rank] for rank in beats if rank in self._ranks}
        starvation = max([0.0, *(states[rank].measure_starvation(record.state) for rank, record in observed.items())])
        asleep, self._asleep = read_suspended_seconds() - self._asleep, read_suspended_seconds()
        for rank, beat in beats.items():
            before, state = observed.get(rank), states[rank]
            if before is None or before.beat.marks != beat.marks:
                self._ranks[rank] = _Rank(beat, state, state.used)
                continue
            before.state = state
            if state.paused:
                continue
            before.passed += passed
            before.suspended = before.suspended + passed if state.suspended else 0.0
            if state.on_disk and before.on_disk < _DISK_SECONDS:
                before.on_disk += passed
            else:
                before.quiet += max(0.0, passed - starvation)
            if rank in quiet and beat.phase in STORAGE and before.moving(pids[rank], passed):
                before.quiet = _QUIET
            if asleep > _CHECK_SECONDS:
                before.quiet = -_AFTER_SLEEP
        for rank in self._ranks.keys() - beats.keys():
            del self._ranks[rank]

    def _read_beats(self, pids: Mapping[int, int]) -> dict[int, Beat]:
        """Return what the processes have written; files of earlier launches are left out."""
        if self._directory is None:
            return {}
        read_now = {rank: read(build_heartbeat_path(self._directory, rank)) for rank in pids}
        return {rank: beat for rank, beat in read_now.items() if beat is not None and beat.pid == pids[rank]}

    def _build_verdict(self) -> Verdict | None:
        everyone: dict[int, RankState] | None = {rank: record.seen for rank, record in self._ranks.items()}
        if self._machines is not None:
            everyone = self._machines.exchange_reports(everyone or {})
            if not self._machines.decides:
                return self._machines.read_decision(self._processes())
        if everyone is None:
            return None
        self._everyone = everyone
        return judge(everyone, compiled=self._watched.compiled)

    def _report(self, verdict: Verdict) -> None:
        ends = self._watched.on_hang != "warn"
        if self._decides:
            self._record(Fault(kind=_KIND, rank=verdict.ranks[0], detail=verdict.detail, action=self._watched.on_hang))
            if self._machines is not None:
                self._machines.decide(verdict, self._everyone)
        pids, stacks = dict(self._processes()), self._stacks()
        everyone = self._everyone.keys() | pids.keys()
        stack_texts = [f"rank {rank}:\n{stacks[rank]}" for rank in sorted(stacks)]
        why = {True: "no stack, as its process does not respond", False: "no stack has arrived from its machine"}
        missing = [f"rank {rank}: {why[rank in pids]}" for rank in sorted(everyone - stacks.keys())]
        first = evidence.locate_stacks_file(self._watched.run / "logs", verdict.ranks[0])
        files = f"all threads: {first.with_name('rank-*.stacks')}"
        message = f"the run hangs: {verdict.detail}"
        if ends:
            text = "\n".join([message, *stack_texts, *missing, files])
            self._ending(verdict.exit_code, text)
            evidence.wait_for_collectives(self._watched.run / "logs", self._asked)
            for pid in pids.values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            raise WatcherVerdict(text, verdict.ranks[0], Cause.HANG if self._watched.on_hang == "restart" else None)
        if self._decides:
            alternative = "restart would restart it, and " if self._watched.restarts else ""
            goes_on = f"it goes on; faults.on_hang: {alternative}stop would end it with exit code {verdict.exit_code}"
            say("\n".join([f"warning: {message}", *stack_texts, *missing, files, goes_on]), file=sys.stderr)

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of the threads that train: of all machines where rank 0 is."""
        pids = dict(self._processes())
        if self._directory is not None:
            self._asked = evidence.write_collectives(self._directory, pids, self._watched.run / "logs")
        local_stacks = {
            rank: evidence.extract_training_thread(text)
            for rank, text in evidence.collect_stacks(pids, self._watched.run / "logs").items()
        }
        if self._machines is None:
            return local_stacks
        if self._machines.decides:
            return local_stacks | self._machines.stacks(frozenset(self._everyone.keys() - pids.keys()))
        self._machines.give(local_stacks)
        return local_stacks

    def _recovered(self, now: float) -> None:
        if self._reported:
            late = ", ".join(map(str, self._reported))
            message = f"the run goes on, {format_seconds(now - self._since)} after rank {late} was reported to hang"
            self._reported = ()
            if self._machines is not None and self._decides:
                self._machines.decide(None, {})
            if self._decides:
                self._record(Notice(message=message))
                say(message, file=sys.stderr)

    def _record(self, event: Fault | Notice) -> None:
        with suppress(OSError):
            append_event(self._watched.run / "events.jsonl", event)


_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_END_SECONDS = 5.0
_TOLD = b"told"  # the worker has finished, or said why not
_TICK_SECONDS = 0.05  # of the clock that processes' ages are counted in


@contextmanager
def watch_run(
    run: Path, rank_info: RankInfo, terminal: TextIO, heard: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Have a process watch this machine's workers while the first of them trains.

    Args:
        terminal: where the process of rank 0's machine writes what it finds.
        heard: returns what was told of another rank's failure, so that this rank's own is not.

    Raises:
        TrainingError: training has failed, and workers here have entered different collectives, which breaks their
            connections.
    """
    process = _start(run, rank_info, terminal) if rank_info.local_rank == 0 else None
    start, is_told = time.monotonic() - compute_process_age(), True
    try:
        yield
    except Exception as error:
        # Also of workers that have ended. All of this launch wait for each other before they begin.
        beats = {rank: beat for rank, beat in _read_beats(run, rank_info.size).items() if beat.started_at > start}
        conflict = find_conflict(beats)
        if conflict is None:
            raise
        is_told = not heard() or conflict.detail in heard()
        raise TrainingError(f"{conflict.detail}\n{type(error).__name__}: {error}") from error
    finally:
        if process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(_TOLD if is_told else None, timeout=_END_SECONDS)


def _start(run: Path, rank_info: RankInfo, terminal: TextIO) -> subprocess.Popen[bytes]:
    watched_run = WatchedRun.of(run)
    request = [str(run.absolute()), watched_run.on_hang, watched_run.compiled, rank_info.size]
    alone = rank_info.local_size == rank_info.size
    code = "import sys; from trainwright.faults.hangs.watcher import main; main(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([*request, alone, rank_info.rank == 0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # ctrl-C is for the workers
    )


def main(request: str) -> None:
    """Watch until the worker that started this process ends."""
    for name in _IGNORED:  # schedulers send them to every process of a job
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    run, on_hang, compiled, size, alone, decides = json.loads(request)
    watched_run, parent = WatchedRun(Path(run), on_hang, compiled, restarts=False), os.getppid()

    def ending(code: int, message: str) -> None:
        record_exit_code(code, outweighs=True)
        if decides:
            say(f"error: {message}", file=sys.stderr)

    watcher = HangWatcher(
        watched_run,
        lambda: _list_workers(watched_run.run, size),
        None if alone else Machines(watched_run.run, size, decides),
        ending,
    )
    is_told = True
    try:
        while os.getppid() == parent and not _is_readable(_CHECK_SECONDS):
            watcher.check()
        # If it was killed, processes that it has started may keep the pipe open.
        is_told = _is_readable(0) and os.read(sys.stdin.fileno(), len(_TOLD)) == _TOLD
    except WatcherVerdict:
        pass
    finally:
        conflict = watcher.close()
        if conflict is not None and not is_told:
            ending(EXIT_TRAINING, conflict)
        directory = create_heartbeat_directory(watched_run.run)  # also of a run too short to be watched
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _is_readable(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _list_workers(run: Path, size: int) -> dict[int, int]:
    """Return the pids of the workers on this machine by rank.

    A job that was killed with all its processes has left its heartbeats; other processes may have their pids now.
    """
    return {rank: beat.pid for rank, beat in _read_beats(run, size).items() if _is_of(beat)}


def _read_beats(run: Path, size: int) -> dict[int, Beat]:
    """Return what workers on this machine do or have done, by rank, also of earlier launches."""
    directory = create_heartbeat_directory(run)
    if directory is None:
        return {}
    beats = {}
    for file in directory.glob("rank-*"):
        rank = int(file.name.removeprefix("rank-"))
        if rank < size and (beat := read(build_heartbeat_path(directory, rank))) is not None:
            beats[rank] = beat
    return beats


def _is_of(beat: Beat) -> bool:
    """Return whether the process that has the pid of a heartbeat is the one that writes it: not younger."""
    try:
        return time.monotonic() - compute_process_age(beat.pid) < beat.started_at + _TICK_SECONDS
    except psutil.Error:
        return False


class HangDetection:
    """A ``run.supervisor.Watcher``."""

    def install(self, run: Path, rank: int) -> None:
        """Have torch keep this worker's collectives, and write its stacks on a signal."""
        evidence.keep_collectives(run / "logs", create_heartbeat_directory(run))
        evidence.write_stacks_on_signal(run / "logs", rank)

    def watch(self, run: Path, ranks: WorkerRanks, processes: Callable[[], Mapping[int, int]]) -> HangWatcher:
        """Return the watcher of the supervisor's workers."""
        machines = None if ranks.is_alone else Machines(run, ranks.size, not ranks.first)
        return HangWatcher(WatchedRun.of(run), processes, machines)

    def watch_beside(
        self, run: Path, rank_info: RankInfo, terminal: TextIO, received: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Watch in a process beside the workers of this machine."""
        return watch_run(run, rank_info, terminal, received)


HANGS = HangDetection()
