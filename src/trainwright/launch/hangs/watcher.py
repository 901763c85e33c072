"""Watch the workers on this machine, and report when one hangs."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright.engine.event_log import append_event
from trainwright.engine.events import Fault, Notice
from trainwright.heartbeat import Beat, heartbeat_directory, heartbeat_file, read
from trainwright.launch.hangs.judge import Conflict, Seen, Verdict, conflict_of, judge
from trainwright.launch.hangs.processes import ProcessState, seconds_asleep, state_of
from trainwright.launch.hangs.stacks import stacks_file, stacks_of, training_thread
from trainwright.text import say, span

_CHECK_SECONDS = 0.25
# A longer gap between two checks is time in which this process, and probably the workers, did not run.
_LONGEST_GAP = 1.0
# Connections and file systems may take a while after the machine was suspended.
_AFTER_SLEEP = 60.0
# How long waiting for a disk is not counted.
_DISK_SECONDS = 120.0
_KIND = "hang"


class RunHangs(Exception):
    """The run hangs, and the recipe asks to end or to restart it."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class Watched:
    """The run whose workers are watched.

    Attributes:
        on_hang: ``faults.on_hang`` of the recipe.
        compiled: whether the model is compiled.
    """

    run: Path
    on_hang: str
    compiled: bool


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

    @property
    def seen(self) -> Seen:
        busy = (self.state.used - self.used) / self.passed if self.passed else 0.0
        return Seen(self.beat, self.quiet, self.suspended, busy)


class HangWatcher:
    """Report when a worker hangs. Call ``check`` repeatedly, from a process that is not a worker.

    Args:
        processes: returns the pid of the worker of every rank here.
    """

    def __init__(self, watched: Watched, processes: Callable[[], Mapping[int, int]]) -> None:
        self._watched = watched
        self._processes = processes
        self._directory = heartbeat_directory(watched.run)
        self._ranks: dict[int, _Rank] = {}
        self._ever: dict[int, int] = {}  # the ranks here with their processes
        self._checked = time.monotonic()
        self._asleep = seconds_asleep()
        self._reported: tuple[int, ...] = ()  # the late ranks of the hang that goes on
        self._since = 0.0
        if self._directory is not None:  # files of an earlier launch
            shutil.rmtree(self._directory, ignore_errors=True)
            heartbeat_directory(watched.run)

    def check(self) -> None:
        """Look at the workers, at most a few times a second.

        Raises:
            RunHangs: they hang and the recipe asks to end or to restart the run; they have been killed.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        passed, self._checked = min(now - self._checked, _LONGEST_GAP), now
        self._look(passed)
        found = self._verdict()
        if found is None:
            self._recovered(now)
        elif not self._reported:
            self._reported, self._since = found.ranks, now
            self._report(found)

    def close(self) -> Conflict | None:
        """Remove the heartbeats; return how the collectives of the ranks differ, also of those that have ended."""
        conflict = conflict_of(self._beats(self._ever))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return conflict

    def _look(self, passed: float) -> None:
        pids = self._processes()
        self._ever |= pids
        states = {rank: state for rank, pid in pids.items() if (state := state_of(pid)) is not None}
        beats = {rank: beat for rank, beat in self._beats(states).items() if beat.pid == pids[rank]}
        known = {rank: self._ranks[rank] for rank in beats if rank in self._ranks}
        starved = max([0.0, *(states[rank].starved - each.state.starved for rank, each in known.items())])
        asleep, self._asleep = seconds_asleep() - self._asleep, seconds_asleep()
        for rank, beat in beats.items():
            before, state = known.get(rank), states[rank]
            if before is None or before.beat.marks != beat.marks:
                self._ranks[rank] = _Rank(beat, state, state.used)
                continue
            before.state = state
            before.passed += passed
            before.suspended = before.suspended + passed if state.suspended else 0.0
            if state.on_disk and before.on_disk < _DISK_SECONDS:
                before.on_disk += passed
            else:
                before.quiet += max(0.0, passed - starved)
            if asleep > _CHECK_SECONDS:
                before.quiet = -_AFTER_SLEEP
        for rank in self._ranks.keys() - beats.keys():
            del self._ranks[rank]

    def _beats(self, ranks: Mapping[int, object]) -> dict[int, Beat]:
        if self._directory is None:
            return {}
        read_now = {rank: read(heartbeat_file(self._directory, rank)) for rank in ranks}
        return {rank: beat for rank, beat in read_now.items() if beat is not None}

    def _verdict(self) -> Verdict | None:
        return judge({rank: known.seen for rank, known in self._ranks.items()}, compiled=self._watched.compiled)

    def _report(self, verdict: Verdict) -> None:
        pids, logs = dict(self._processes()), self._watched.run / "logs"
        ends = self._watched.on_hang != "warn"
        self._record(Fault(kind=_KIND, rank=verdict.ranks[0], detail=verdict.detail, action=self._watched.on_hang))
        stacks = stacks_of(pids, logs)
        shown = [f"rank {rank}:\n{training_thread(stacks[rank])}" for rank in sorted(stacks)]
        missing = [f"rank {rank}: no stack, as its process does not respond" for rank in sorted(pids.keys() - stacks)]
        files = f"all threads: {stacks_file(logs, verdict.ranks[0]).with_name('rank-*.stacks')}"
        message = f"the run hangs: {verdict.detail}"
        if ends:
            for pid in pids.values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            raise RunHangs(verdict, "\n".join([message, *shown, *missing, files]))
        goes_on = "it goes on; faults.on_hang: restart would restart it, and stop would end it with exit code 4"
        say("\n".join([f"warning: {message}", *shown, *missing, files, goes_on]), file=sys.stderr)

    def _recovered(self, now: float) -> None:
        if self._reported:
            late = ", ".join(map(str, self._reported))
            message = f"the run goes on, {span(now - self._since)} after rank {late} was reported to hang"
            self._reported = ()
            self._record(Notice(message=message))
            say(message, file=sys.stderr)

    def _record(self, event: Fault | Notice) -> None:
        with suppress(OSError):
            append_event(self._watched.run / "events.jsonl", event)
