"""Decide whether a run hangs, from what its ranks do and what that has taken so far; and agree on it among machines.

Each machine has a file in the run directory, which all of them see. It changes only while none of its ranks makes
progress: a run that trains costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainwright.errors import EXIT_FAULT, EXIT_TRAINING
from trainwright.utils.heartbeat import FINISHED, WAITING, Beat, EnteredCollective, Times
from trainwright.utils.paths import write_file
from trainwright.utils.text import format_ranks, format_seconds

# A rank is late when a phase takes longer than the most that it has taken, by a part and some seconds.
_PART, _PART_OF_FEW, _FEW = 0.25, 1.0, 3
_MARGIN = 10.0
# Reading, writing and gathering a model vary more.
STORAGE = dict.fromkeys(("checkpoint", "copies", "export", "loading", "profile writing", "resuming", "rewinding"), 12.0)
# A phase that has not ended once may include compilation, downloads or the first access to slow storage.
_FIRST = {
    **dict.fromkeys(("loading", "resuming", "rewinding", "copies", "export"), 7200.0),
    **dict.fromkeys(("start", "joining", "setup", "compilation", "checkpoint", "profile writing"), 3600.0),
    **dict.fromkeys(("evaluation", "generation"), 1800.0),
}
_FIRST_OTHERS = 900.0
# All ranks are inside the same collective: a network may be slow, but data moves.
_EXCHANGE = 120.0
# Nobody suspends a single rank on purpose.
_SUSPENDED = 10.0
# Modules compile again when shapes change.
_COMPILED, _COMPILED_MARGIN = ("compilation", "forward", "backward", "evaluation", "generation", "replay"), 300.0


@dataclass(frozen=True)
class RankState:
    """A rank as the watcher sees it.

    Attributes:
        quiet: seconds since its last mark, without those in which the machine or a disk made it wait.
        suspended: seconds for which its process has been stopped by a signal.
        busy: the share of one core that it has used since its last mark.
    """

    beat: Beat
    quiet: float
    suspended: float = 0.0
    busy: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the rank has no more work."""
        return self.beat.phase == FINISHED


@dataclass(frozen=True)
class Verdict:
    """Why a run hangs: the late ranks, the phase of the first, and an explanation.

    Attributes:
        conflict: whether ranks have entered different collectives: the run's own fault, which would occur again.
    """

    ranks: tuple[int, ...]
    phase: str
    step: int | None
    detail: str
    conflict: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends because of it."""
        return EXIT_TRAINING if self.conflict else EXIT_FAULT


def judge(ranks: Mapping[int, RankState], *, compiled: bool = False) -> Verdict | None:
    """Return which ranks are late; None if the run does not hang.

    Ranks that wait for others in a collective are never late themselves: the ranks they wait for are.
    """
    active = {rank: state for rank, state in ranks.items() if not state.finished}
    suspended_ranks = [rank for rank, state in active.items() if state.suspended >= _SUSPENDED]
    if suspended_ranks:
        return _build_verdict(active, suspended_ranks, None)
    beats = {rank: state.beat for rank, state in active.items()}
    conflict = find_conflict(beats)
    if conflict is not None and all(state.quiet > _MARGIN for state in active.values()):
        return _build_verdict(active, conflict.ranks, conflict, is_conflict=True)
    late = [r for r in _find_ranks_behind(active) if active[r].quiet > choose_limit(active[r].beat, compiled=compiled)]
    if not late:
        return None
    return _build_verdict(active, late, find_conflict(beats, lines=True), is_conflict=conflict is not None)


def choose_limit(beat: Beat, *, compiled: bool = False) -> float:
    """Return the seconds without a mark after which a rank that does not wait for others is late."""
    phase = WAITING if beat.waiting else beat.phase
    times = beat.times.get(phase, Times(0, 0.0))
    if phase == WAITING:
        return max(_EXCHANGE, 2 * times.longest)
    if not times.count:
        return _FIRST.get(phase, _FIRST_OTHERS)
    margin = _COMPILED_MARGIN if compiled and phase in _COMPILED else STORAGE.get(phase, _MARGIN)
    return times.longest * (1 + (_PART_OF_FEW if times.count < _FEW else _PART)) + margin


@dataclass(frozen=True)
class Conflict:
    """Different collectives that ranks have entered in the same place: which ranks differ, and an explanation."""

    ranks: tuple[int, ...]
    detail: str


def find_conflict(beats: Mapping[int, Beat], *, lines: bool = False) -> Conflict | None:
    """Return the first collective that ranks have entered with another function, type or shape; None if all agree.

    Args:
        lines: compare the newest that all have entered also by the lines of the calls, which may differ in a run that
            is right.
    """
    entered_numbers = [set(beat.collectives) for beat in beats.values()]
    common = sorted(set.intersection(*entered_numbers)) if entered_numbers else []
    for number in common:
        calls = {rank: beat.collectives[number] for rank, beat in beats.items()}
        with_lines = lines and number == common[-1]
        kinds = {rank: (_classify_collective(call), call.line if with_lines else "") for rank, call in calls.items()}
        if len(set(kinds.values())) > 1:
            return _build_conflict(beats, calls, kinds)
    return None


def _build_conflict(
    beats: Mapping[int, Beat], calls: Mapping[int, EnteredCollective], kinds: Mapping[int, object]
) -> Conflict:
    """Return which ranks differ from most others. If no kind has most ranks, it is those that have gone further: they
    have not entered what the others wait in.
    """
    counts = Counter(kinds.values()).most_common()
    if counts[0][1] > counts[1][1]:
        ranks = [rank for rank, kind in kinds.items() if kind != counts[0][0]]
    else:
        furthest = max((beat.step, beat.marks) for beat in beats.values())
        ahead = {kinds[rank] for rank, beat in beats.items() if (beat.step, beat.marks) == furthest}
        ranks = [rank for rank, kind in kinds.items() if kind in ahead]
    differing = min(ranks)
    peer = min(rank for rank, kind in kinds.items() if kind != kinds[differing])
    return Conflict(
        tuple(sorted(ranks)),
        f"the ranks have entered different collectives: as number {calls[peer].number}, rank {peer} has entered "
        f"{_describe_call(calls[peer])}, and rank {differing} {_describe_call(calls[differing])}",
    )


def _classify_collective(collective: EnteredCollective) -> tuple[str, str]:
    return collective.name, collective.tensor if collective.same_shape else ""


def _describe_call(collective: EnteredCollective) -> str:
    of = f" of {collective.tensor}" if collective.tensor else ""
    return f"{collective.name}{of} at {collective.line}"


def _find_ranks_behind(active: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that the others wait for; all of them if they wait for each other."""
    if not active:
        return []
    least = min(state.beat.entered for state in active.values())
    last = [rank for rank, state in active.items() if state.beat.entered == least]
    return [rank for rank in last if not active[rank].beat.waiting] or last


def _build_verdict(
    active: Mapping[int, RankState], late: Sequence[int], conflict: Conflict | None, *, is_conflict: bool = False
) -> Verdict:
    first = active[late[0]]
    parts = [
        f"{format_ranks(late)} {'has' if len(late) == 1 else 'have'} {_describe_state(first)} "
        f"{_describe_position(first.beat)}"
    ]
    beats = {rank: state.beat for rank, state in active.items() if rank not in late}
    ahead = [rank for rank, beat in beats.items() if beat.entered > first.beat.entered]
    waiting = [rank for rank, beat in beats.items() if beat.waiting]
    if ahead:
        verb, none = ("has" if len(ahead) == 1 else "have"), ("has" if len(late) == 1 else "have")
        parts.append(
            f"{format_ranks(ahead)} {verb} entered {_describe_last_collective(beats[ahead[0]])}, which "
            f"{format_ranks(late)} {none} not"
        )
    elif waiting:
        parts.append(
            f"{format_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in "
            f"{_describe_last_collective(beats[waiting[0]])}"
        )
    if conflict is not None:
        parts.append(conflict.detail)
    step = None if first.beat.step < 0 else first.beat.step
    return Verdict(tuple(late), first.beat.phase, step, "; ".join(parts), is_conflict)


def _describe_state(state: RankState) -> str:
    if state.suspended:
        return f"been suspended by a signal (SIGSTOP) for {format_seconds(state.suspended)}"
    usual = state.beat.times.get(state.beat.phase)
    took = f", and that has taken at most {usual.longest:.1f} s before" if usual and not state.beat.waiting else ""
    using = ", using the processor" if state.busy > 0.5 else ""
    return f"made no progress for {format_seconds(state.quiet)}{took}{using}:"


def _describe_position(beat: Beat) -> str:
    step = f" of step {beat.step}" if beat.step >= 0 else ""
    micro = f", micro-batch {beat.micro_batch}" if beat.micro_batch >= 0 else ""
    inside = f", inside {_describe_last_collective(beat)}" if beat.waiting else ""
    return f"in phase {beat.phase}{step}{micro}{inside}"


def _describe_last_collective(beat: Beat) -> str:
    if beat.collective is None:
        return "joining the process group"
    return f"{_describe_call(beat.collective)} (number {beat.entered})"


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

    def exchange_reports(self, here: Mapping[int, RankState]) -> dict[int, RankState] | None:
        """Report what the ranks here do; return what all ranks do, or None if any of them may make progress."""
        quiet = here and all(state.quiet >= _QUIET or state.suspended or state.finished for state in here.values())
        now = time.monotonic()
        if now - self._published >= _PUBLISH_SECONDS and (quiet or self._report.ranks):
            self._published = now
            self._publish(dict(here) if quiet else {}, self._stacks if quiet else {})
        if not quiet or not self.decides:
            return None
        ranks = dict(here)
        for report in self._read_fresh_reports(now):
            ranks |= report.ranks
        return ranks if len(ranks) == self._size else None

    def decide(self, verdict: Verdict | None, everyone: Mapping[int, RankState]) -> None:
        """Tell the other watchers what was found, or that the run goes on."""
        decision = _Decision(verdict, {rank: state.beat.pid for rank, state in everyone.items()})
        self._write(self._directory / _DECISION_FILE, _DECISION.dump_json(decision))

    def read_decision(self, pids: Mapping[int, int]) -> Verdict | None:
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
            for report in self._read_fresh_reports(time.monotonic()):
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

    def _read_fresh_reports(self, now: float) -> list[_Report]:
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
