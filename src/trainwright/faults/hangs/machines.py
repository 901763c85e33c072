"""What the watchers of a run's machines tell each other, in files of the run directory, which all of them see.

Each machine has a file, which changes only while none of its ranks makes progress: a run that trains costs nothing. The
watcher of rank 0 decides when all ranks are in these files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainwright.faults.hangs.judge import RankState, Verdict
from trainwright.utils.paths import write_file

_PUBLISH_SECONDS, _READ_SECONDS = 1.0, 0.2
# Without a mark for this time, a rank may hang.
_QUIET = 3.0
# A report that is not followed by another one is of a watcher that has ended.
_FRESH = 10.0
_STACKS_SECONDS = 8.0
_DECISION_FILE = "decision.json"


@dataclass(frozen=True)
class _Report:
    """What the watcher of a machine has written.

    Attributes:
        number: counts its reports.
        ranks: those of the machine; empty while any of them makes progress.
        stacks: of the threads that train, once they have been asked for.
    """

    number: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Decision:
    """What the watcher of rank 0 has found; ``pids`` tell it from one about an earlier launch."""

    verdict: Verdict | None = None
    pids: dict[int, int] = field(default_factory=dict)


_REPORT, _DECISION = TypeAdapter(_Report), TypeAdapter(_Decision)


class Machines:
    """The watchers of all machines of a run, seen from one of them.

    Args:
        run: the run directory.
        size: the number of ranks of the run.
        decides: whether rank 0 is on this machine.
    """

    def __init__(self, run: Path, size: int, decides: bool) -> None:
        self.decides = decides
        self._directory = run / "logs" / "hangs"
        self._size = size
        self._own: Path | None = None
        self._report = _Report()
        self._stacks: dict[int, str] = {}  # of the hang that goes on
        self._published = 0.0
        self._others: dict[Path, tuple[_Report, float]] = {}  # with the time at which it was new
        if decides:  # what an earlier launch has left
            self._remove(self._directory.glob("*.json"))

    def everyone(self, here: Mapping[int, RankState]) -> dict[int, RankState] | None:
        """Report what the ranks here do; return what all ranks do, or None if any of them may make progress."""
        quiet = here and all(each.quiet >= _QUIET or each.suspended or each.finished for each in here.values())
        now = time.monotonic()
        if now - self._published >= _PUBLISH_SECONDS and (quiet or self._report.ranks):
            self._published = now
            self._publish(dict(here) if quiet else {}, self._stacks if quiet else {})
        if not quiet or not self.decides:
            return None
        ranks = dict(here)
        for report in self._fresh_reports(now):
            ranks |= report.ranks
        return ranks if len(ranks) == self._size else None

    def decide(self, verdict: Verdict | None, everyone: Mapping[int, RankState]) -> None:
        """Tell the other watchers what was found, or that the run goes on."""
        decision = _Decision(verdict, {rank: state.beat.pid for rank, state in everyone.items()})
        self._write(self._directory / _DECISION_FILE, _DECISION.dump_json(decision))

    def decided(self, pids: Mapping[int, int]) -> Verdict | None:
        """Return what the watcher of rank 0 has found about the processes of the ranks here."""
        verdict = None
        with suppress(OSError, ValidationError):
            decision = _DECISION.validate_json((self._directory / _DECISION_FILE).read_bytes())
            if pids and all(decision.pids.get(rank) == pid for rank, pid in pids.items()):
                verdict = decision.verdict
        if verdict is None:
            self._stacks = {}
        return verdict

    def give(self, stacks: Mapping[int, str]) -> None:
        """Report the stacks of the ranks here to the watcher of rank 0."""
        self._stacks = dict(stacks)
        self._publish(self._report.ranks, self._stacks)

    def stacks(self, ranks: frozenset[int]) -> dict[int, str]:
        """Return the stacks of ranks of other machines, as far as their watchers answer."""
        deadline = time.monotonic() + _STACKS_SECONDS
        stacks: dict[int, str] = {}
        while ranks - stacks.keys() and time.monotonic() < deadline:
            time.sleep(_READ_SECONDS)
            for report in self._fresh_reports(time.monotonic()):
                stacks |= report.stacks
        return {rank: text for rank, text in stacks.items() if rank in ranks}

    def close(self) -> None:
        """Remove this machine's file; one with stacks is left to the watcher of rank 0, which may not have read it."""
        if self.decides:
            self._remove(self._directory.glob("*.json"))
        elif self._own is not None and not (self._stacks and (self._directory / _DECISION_FILE).exists()):
            self._remove([self._own])
        with suppress(OSError):  # until the last one has removed its file
            self._directory.rmdir()

    def _publish(self, ranks: dict[int, RankState], stacks: dict[int, str]) -> None:
        self._report = _Report(self._report.number + 1, ranks, stacks)
        if self._own is None:
            self._own = self._directory / f"rank-{min(ranks)}.json"
        self._write(self._own, _REPORT.dump_json(self._report))

    def _fresh_reports(self, now: float) -> list[_Report]:
        for file in self._directory.glob("rank-*.json"):
            if file == self._own:
                continue
            with suppress(OSError, ValidationError):
                report = _REPORT.validate_json(file.read_bytes())
                previous = self._others.get(file)
                if previous is None or previous[0].number != report.number:
                    self._others[file] = report, now
        return [report for report, since in self._others.values() if now - since < _FRESH]

    def _write(self, file: Path, content: bytes) -> None:
        with suppress(OSError):
            for directory in (self._directory.parent, self._directory):  # not the run's: a deleted one stays deleted
                directory.mkdir(exist_ok=True)
            write_file(file, content)

    def _remove(self, files: Iterable[Path]) -> None:
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)
