"""Explain a log: which error is the cause, which ones followed from it, and the figures in their messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from trainwright.doctor.diagnosis.log import Line, LineKind, Log, Raised, read_log
from trainwright.run.shutdown.failure import KnownError, Role, known_error

# A line without any of these words reports no known error; most lines of a log are progress.
_WORDS = (
    *("error", "fail", "fatal", "kill", "except", "abort", "signal", "exit", "terminat", "cancel", "assert", "warn"),
    *(
        "cannot",
        "can't",
        "couldn't",
        "could not",
        "unable",
        "not ",
        "n't ",
        "no ",
        "without",
        "missing",
        "must ",
        "only ",
    ),
    *("nan", "inf", "overflow", "minimum", "exceed", "limit", "timeout", "timed out", "denied", "refused", "reset"),
    *(
        "closed",
        "broken",
        "lost",
        "bus",
        "invalid",
        "illegal",
        "mismatch",
        "different",
        "requir",
        "expect",
        "undefined",
    ),
    *("xid", "ecc", "quota", "space", "out of", "memory", "port ", "interrupt", "fork", "fault", "prompt", "preempt"),
    *(
        "insufficient",
        "busy",
        "duplicate",
        "inconsistent",
        "unexpected",
        "unsupported",
        "retry",
        "stale",
        "gated",
        "peer",
    ),
    *("removed", "restricted", "share", "size", "no_", "status", "loss scale", "socket", "get", "->", "rank", "too "),
)
# How much of different lines is compared with the known errors, which takes seconds: characters, and more per line.
_COMPARED, _PER_LINE = 500_000, 50
# Of an excerpt.
_WIDTH = 400
# In a traceback, or as the command that was started.
_OWN = re.compile(r"/trainwright/[\w/]{1,300}\.py\b|\btrainwright (?:train|launch|under)\b")


@dataclass
class LogError:
    """A known error in a log: its first line, and the ranks that report it."""

    error: KnownError
    line: Line
    ranks: list[int] = field(default_factory=list)
    count: int = 1

    @property
    def excerpt(self) -> str:
        """The first line, shortened."""
        return shortened(self.line.text)


@dataclass(frozen=True)
class Diagnosis:
    """The explanation of a log.

    Attributes:
        cause: the error that explains the others; None if it is not known, or if there is none.
        details: facts of this log about the cause.
        unknown: the first exception that no known error describes.
        is_unknown_first: whether `unknown` is the cause.
        followed: known errors that follow from the cause.
        signs: lines that may be related, and lines that only look like errors.
        is_own: whether the log is of a run of Trainwright.
        skipped: the number of lines that were not compared with the known errors, because there are too many.
    """

    cause: LogError | None
    details: list[str]
    unknown: Raised | None
    is_unknown_first: bool
    followed: list[LogError]
    signs: list[LogError]
    is_own: bool = False
    skipped: int = 0

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to do about the cause."""
        return () if self.cause is None else self.cause.error.fixes_of(own=self.is_own)

    @property
    def is_only_follow_up(self) -> bool:
        """Whether the log has only consequences of an error that is elsewhere."""
        return self.cause is not None and self.cause.error.role is Role.FOLLOW_UP


def explain(text: str) -> Diagnosis:
    """Find the error in a log that explains the others."""
    log = read_log(text)
    findings, explained, skipped = _findings(log.lines)
    errors = sorted(
        (finding for finding in findings if finding.error.role <= Role.FOLLOW_UP),
        key=lambda finding: (finding.error.role, finding.line.number),
    )
    unknown = _first_unknown(log, explained)
    is_unknown_first = unknown is not None and _comes_before(unknown, errors)
    signs = [finding for finding in findings if finding.error.role > Role.FOLLOW_UP]
    followed = errors if is_unknown_first else errors[1:]
    cause = None if is_unknown_first or not errors else errors[0]
    if cause is None and not is_unknown_first:
        cause = next((sign for sign in signs if sign.error.role is Role.SIGN), None)
        signs = [sign for sign in signs if sign is not cause]
    details = details_of(cause.error.name, log.lines) if cause is not None else []
    is_ours = _OWN.search(text) is not None
    return Diagnosis(cause, details, unknown, is_unknown_first, followed, signs, is_ours, skipped)


def shortened(text: str) -> str:
    """Return a line of a log with at most 400 characters."""
    text = text.strip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


def _findings(lines: Sequence[Line]) -> tuple[list[LogError], set[int], int]:
    """Return the known errors in the order of their first lines, the numbers of all lines that have one, and how many
    lines were not compared.
    """
    errors: dict[str, LogError] = {}
    explained: set[int] = set()
    compared: dict[tuple[str, bool], KnownError | None] = {}
    remaining, skipped = _COMPARED, 0
    for line in lines:
        lower = line.text.lower()
        if line.kind is LineKind.SOURCE or not any(word in lower for word in _WORDS):
            continue
        key = line.text, line.kind is LineKind.NOTICE
        if key not in compared:
            remaining -= len(line.text) + _PER_LINE
            if remaining < 0:
                skipped += 1
                continue
            compared[key] = known_error(line.text, is_notice=line.kind is LineKind.NOTICE)
        error = compared[key]
        if error is None:
            continue
        explained.add(line.number)
        finding = errors.get(error.name)
        if finding is None:
            finding = errors[error.name] = LogError(error, line)
        else:
            finding.count += 1
        if line.rank is not None and line.rank not in finding.ranks:
            finding.ranks.append(line.rank)
    return list(errors.values()), explained, skipped


def _first_unknown(log: Log, explained: set[int]) -> Raised | None:
    """Return the first exception that, with those that led to it, has no line of a known error."""
    explained_chains = {raised.chain for raised in log.raised if raised.lines & explained}
    return next((raised for raised in log.raised if raised.chain not in explained_chains), None)


def _comes_before(unknown: Raised, errors: Sequence[LogError]) -> bool:
    """Return whether the unknown exception is the cause: no known cause, and no known error of a process before it."""
    if not errors or errors[0].error.role is Role.FOLLOW_UP:
        return True
    if errors[0].error.role is Role.CAUSE:
        return False
    own = [finding.line.number for finding in errors if finding.error.role in (Role.SYMPTOM, Role.REACTION)]
    return unknown.number < min(own)


_SIZE = r"([\d.]{1,20}) ?([KMGT]i?B)"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}", re.IGNORECASE)
_CAPACITY = re.compile(rf"{_SIZE} total capacity|total capacity of {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"{_SIZE} (?:free|is free)\b|of which {_SIZE} is free", re.IGNORECASE)
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE)
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use", re.IGNORECASE)
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

_TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] Watchdog caught collective operation timeout: Work\w+\(SeqNum=(?P<number>\d{1,18}), "
    r"OpType=(?P<kind>\w+)(?:, NumelIn=(?P<into>\d+), NumelOut=(?P<out>\d+))?"
)
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
_PROGRESS = re.compile(
    r"Rank (?P<rank>\d{1,6})\].{0,200}last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), "
    r"last completed (?:NCCL )?work: -?\d"
)


def details_of(name: str, lines: Sequence[Line]) -> list[str]:
    """Return what the log says about the cause with this name."""
    find = _DETAILS.get(name)
    return find(lines) if find is not None else []


def _memory(lines: Sequence[Line]) -> list[str]:
    line = next((line for line in lines if _ASKED.search(line.text)), None)
    if line is None:
        return []
    statements = []
    amounts = {"requested": _ASKED, "free": _FREE, "total": _CAPACITY}
    listed = [f"{amount} {name}" for name, pattern in amounts.items() if (amount := _first(pattern, line.text))]
    statements.append(f"{', '.join(listed)} on the GPU")
    unused, requested = _bytes(_UNUSED, line.text), _bytes(_ASKED, line.text)
    if unused is not None and requested is not None and unused >= requested:
        statements.append(
            f"{_first(_UNUSED, line.text)} are reserved but unused, in blocks that are too small: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids this fragmentation"
        )
    users = {statements[0] for statements in re.findall(r"Process (\d+) has", line.text)}
    others = _first(_OTHERS, line.text)
    if others and ("including non-PyTorch memory" not in line.text or len(users) > 1):
        statements.append(f"another process on the same GPU has {others}: see nvidia-smi")
    return statements


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return " ".join(group for group in match.groups() if group) if match else None


def _bytes(pattern: re.Pattern[str], text: str) -> float | None:
    amount = _first(pattern, text)
    if amount is None:
        return None
    number, unit = amount.split()
    return float(number) * _UNITS[unit[0].lower()]


@dataclass(frozen=True)
class _Waited:
    """The collective in which a rank waited."""

    number: int
    kind: str
    sizes: str


def _waiting(lines: Sequence[Line]) -> list[str]:
    waited: dict[int, _Waited] = {}
    enqueued: dict[int, int] = {}
    for line in lines:
        if match := _TIMEOUT.search(line.text):
            sizes = f", {match['into']} -> {match['out']} elements" if match["into"] else ""
            entry = _Waited(int(match["number"]), match["kind"], sizes)
            rank = int(match["rank"])
            if rank not in waited or entry.number < waited[rank].number:
                waited[rank] = entry
        if match := _PROGRESS.search(line.text):
            enqueued.setdefault(int(match["rank"]), int(match["enqueued"]))
    if not waited:
        return []
    return [_where(waited), *_behind(waited, enqueued), *_absent(waited, lines)]


def _where(waited: dict[int, _Waited]) -> str:
    places: dict[_Waited, list[int]] = {}
    for rank, call in sorted(waited.items()):
        places.setdefault(call, []).append(rank)
    listed = [
        f"{ranks_in_words(ranks)} in collective {call.number} ({call.kind}{call.sizes})"
        for call, ranks in sorted(places.items(), key=lambda item: item[0].number)
    ]
    same_number = len({call.number for call in places}) < len(places)
    disagree = "; ranks ran different operations as the same collective" if same_number else ""
    return f"waited: {'; '.join(listed)}{disagree}"


def _behind(waited: dict[int, _Waited], enqueued: dict[int, int]) -> list[str]:
    """Return which ranks had called fewer collectives than the others."""
    calls = enqueued if len(enqueued) > 1 else {rank: call.number for rank, call in waited.items()}
    highest, fewest = max(calls.values()), min(calls.values())
    if highest == fewest:
        return []
    last = sorted(rank for rank, number in calls.items() if number == fewest)
    return [
        f"{ranks_in_words(last)} had called {fewest} collectives, others up to {highest}: check what it did instead"
    ]


def _absent(waited: dict[int, _Waited], lines: Sequence[Line]) -> list[str]:
    ranks = {line.rank for line in lines if line.rank is not None} | set(waited)
    absent = sorted(set(range(max(ranks) + 1)) - set(waited))
    if not absent or len(waited) < 2 or len(absent) > len(waited):
        return []
    return [f"no timeout was reported by {ranks_in_words(absent)}: check there first"]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Format ranks: 'rank 3', 'ranks 0-2, 5'."""
    ranks = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    listed = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _reported(lines: Sequence[Line]) -> list[str]:
    """Return which process the launcher reports as the first to fail."""
    in_root_cause = False
    rank = None
    for line in lines:
        in_root_cause = in_root_cause or line.text.startswith("Root Cause")
        if match := _FAILED.search(line.text):
            return [f"failed first: local rank {match['rank']}, exit code {match['code']}"]
        if in_root_cause and (match := re.match(r"\s+rank\s+: (\d+)", line.text)):
            rank = match[1]
        if in_root_cause and rank is not None and (match := re.match(r"\s+exitcode\s*: ?(-?\d+)", line.text)):
            return [f"failed first: rank {rank}, exit code {match[1]}"]
    return []


_DETAILS: dict[str, Callable[[Sequence[Line]], list[str]]] = {
    "gpu-out-of-memory": _memory,
    "nccl-timeout": _waiting,
    "launcher-report": _reported,
    "killed": _reported,
    "crashed": _reported,
}
