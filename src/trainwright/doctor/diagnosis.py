"""Explain the log of a rank or a run: which error is the cause, which ones followed from it, and their figures."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from trainwright.run.shutdown.known_errors import KnownError, Role, find_known_error
from trainwright.utils.paths import list_files_inside, open_inside
from trainwright.utils.text import format_ranks

# A line without any of these words reports no known error; most lines of a log are progress.
_WORDS = (
    *("error", "fail", "fatal", "kill", "except", "abort", "signal", "exit", "terminat", "cancel", "assert", "warn"),
    *("cannot", "can't", "couldn't", "could not", "unable", "not ", "n't ", "no ", "without", "missing", "must "),
    *("only ", "nan", "inf", "overflow", "minimum", "exceed", "limit", "timeout", "timed out", "denied", "refused"),
    *("reset", "closed", "broken", "lost", "bus", "invalid", "illegal", "mismatch", "different", "requir", "expect"),
    *("undefined", "xid", "ecc", "quota", "space", "out of", "memory", "port ", "interrupt", "fork", "fault"),
    *("prompt", "preempt", "insufficient", "busy", "duplicate", "inconsistent", "unexpected", "unsupported", "retry"),
    *("stale", "gated", "peer", "removed", "restricted", "share", "size", "no_", "status", "loss scale", "socket"),
    *("get", "->", "rank", "too "),
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
        return shorten_line(self.line.text)


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
        return () if self.cause is None else self.cause.error.list_fixes(own=self.is_own)

    @property
    def is_only_follow_up(self) -> bool:
        """Whether the log has only consequences of an error that is elsewhere."""
        return self.cause is not None and self.cause.error.role is Role.FOLLOW_UP


def explain(text: str) -> Diagnosis:
    """Find the error in a log that explains the others."""
    log = read_log(text)
    findings, explained_lines, skip_count = _find_errors(log.lines)
    errors = sorted(
        (finding for finding in findings if finding.error.role <= Role.FOLLOW_UP),
        key=lambda finding: (finding.error.role, finding.line.number),
    )
    unknown = _find_first_unknown(log, explained_lines)
    is_unknown_first = unknown is not None and _is_cause(unknown, errors)
    signs = [finding for finding in findings if finding.error.role > Role.FOLLOW_UP]
    later_errors = errors if is_unknown_first else errors[1:]
    cause = None if is_unknown_first or not errors else errors[0]
    if cause is None and not is_unknown_first:
        cause = next((sign for sign in signs if sign.error.role is Role.SIGN), None)
        signs = [sign for sign in signs if sign is not cause]
    find_details = None if cause is None else _DETAILS.get(cause.error.name)
    details = [] if find_details is None else find_details(log.lines)
    is_ours = _OWN.search(text) is not None
    return Diagnosis(cause, details, unknown, is_unknown_first, later_errors, signs, is_ours, skip_count)


def shorten_line(text: str) -> str:
    """Return a line of a log with at most 400 characters."""
    text = text.strip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


def _find_errors(lines: Sequence[Line]) -> tuple[list[LogError], set[int], int]:
    """Return the known errors in the order of their first lines, the numbers of all lines that have one, and how many
    lines were not compared.
    """
    errors: dict[str, LogError] = {}
    explained_lines: set[int] = set()
    known_errors: dict[tuple[str, bool], KnownError | None] = {}
    remaining, skip_count = _COMPARED, 0
    for line in lines:
        lower = line.text.lower()
        if line.kind is LineKind.SOURCE or not any(word in lower for word in _WORDS):
            continue
        key = line.text, line.kind is LineKind.NOTICE
        if key not in known_errors:
            remaining -= len(line.text) + _PER_LINE
            if remaining < 0:
                skip_count += 1
                continue
            known_errors[key] = find_known_error(line.text, is_notice=line.kind is LineKind.NOTICE)
        error = known_errors[key]
        if error is None:
            continue
        explained_lines.add(line.number)
        finding = errors.get(error.name)
        if finding is None:
            finding = errors[error.name] = LogError(error, line)
        else:
            finding.count += 1
        if line.rank is not None and line.rank not in finding.ranks:
            finding.ranks.append(line.rank)
    return list(errors.values()), explained_lines, skip_count


def _find_first_unknown(log: Log, explained: set[int]) -> Raised | None:
    """Return the first exception that, with those that led to it, has no line of a known error."""
    explained_chains = {exception.chain for exception in log.raised if exception.lines & explained}
    return next((exception for exception in log.raised if exception.chain not in explained_chains), None)


def _is_cause(unknown: Raised, errors: Sequence[LogError]) -> bool:
    """Return whether the unknown exception is the cause: no known cause, and no known error of a process before it."""
    if not errors or errors[0].error.role is Role.FOLLOW_UP:
        return True
    if errors[0].error.role is Role.CAUSE:
        return False
    numbers = [finding.line.number for finding in errors if finding.error.role in (Role.SYMPTOM, Role.REACTION)]
    return unknown.number < min(numbers)


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


def _describe_memory(lines: Sequence[Line]) -> list[str]:
    line = next((line for line in lines if _ASKED.search(line.text)), None)
    if line is None:
        return []
    amounts = {"requested": _ASKED, "free": _FREE, "total": _CAPACITY}
    parts = [f"{amount} {name}" for name, pattern in amounts.items() if (amount := _find_first(pattern, line.text))]
    statements = [f"{', '.join(parts)} on the GPU"]
    unused, requested_bytes = _parse_bytes(_UNUSED, line.text), _parse_bytes(_ASKED, line.text)
    if unused is not None and requested_bytes is not None and unused >= requested_bytes:
        statements.append(
            f"{_find_first(_UNUSED, line.text)} are reserved but unused, in blocks that are too small: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids this fragmentation"
        )
    users = set(re.findall(r"Process (\d+) has", line.text))
    other_memory = _find_first(_OTHERS, line.text)
    if other_memory and ("including non-PyTorch memory" not in line.text or len(users) > 1):
        statements.append(f"another process on the same GPU has {other_memory}: see nvidia-smi")
    return statements


def _find_first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return " ".join(group for group in match.groups() if group) if match else None


def _parse_bytes(pattern: re.Pattern[str], text: str) -> float | None:
    amount = _find_first(pattern, text)
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


def _describe_waiting(lines: Sequence[Line]) -> list[str]:
    waits: dict[int, _Waited] = {}
    enqueued_numbers: dict[int, int] = {}
    for line in lines:
        if match := _TIMEOUT.search(line.text):
            sizes = f", {match['into']} -> {match['out']} elements" if match["into"] else ""
            entry = _Waited(int(match["number"]), match["kind"], sizes)
            rank = int(match["rank"])
            if rank not in waits or entry.number < waits[rank].number:
                waits[rank] = entry
        if match := _PROGRESS.search(line.text):
            enqueued_numbers.setdefault(int(match["rank"]), int(match["enqueued"]))
    if not waits:
        return []
    return [_describe_calls(waits), *_list_ranks_behind(waits, enqueued_numbers), *_list_absent_ranks(waits, lines)]


def _describe_calls(waited: dict[int, _Waited]) -> str:
    ranks_by_call: dict[_Waited, list[int]] = {}
    for rank, call in sorted(waited.items()):
        ranks_by_call.setdefault(call, []).append(rank)
    parts = [
        f"{format_ranks(ranks)} in collective {call.number} ({call.kind}{call.sizes})"
        for call, ranks in sorted(ranks_by_call.items(), key=lambda item: item[0].number)
    ]
    same_number = len({call.number for call in ranks_by_call}) < len(ranks_by_call)
    disagree = "; ranks ran different operations as the same collective" if same_number else ""
    return f"waited: {'; '.join(parts)}{disagree}"


def _list_ranks_behind(waited: dict[int, _Waited], enqueued: dict[int, int]) -> list[str]:
    """Return which ranks had called fewer collectives than the others."""
    calls = enqueued if len(enqueued) > 1 else {rank: call.number for rank, call in waited.items()}
    highest, fewest = max(calls.values()), min(calls.values())
    if highest == fewest:
        return []
    last = sorted(rank for rank, number in calls.items() if number == fewest)
    return [f"{format_ranks(last)} had called {fewest} collectives, others up to {highest}: check what it did instead"]


def _list_absent_ranks(waited: dict[int, _Waited], lines: Sequence[Line]) -> list[str]:
    ranks = {line.rank for line in lines if line.rank is not None} | set(waited)
    absent = sorted(set(range(max(ranks) + 1)) - set(waited))
    if not absent or len(waited) < 2 or len(absent) > len(waited):
        return []
    return [f"no timeout was reported by {format_ranks(absent)}: check there first"]


def _describe_first_failure(lines: Sequence[Line]) -> list[str]:
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
    "gpu-out-of-memory": _describe_memory,
    "nccl-timeout": _describe_waiting,
    "launcher-report": _describe_first_failure,
    "killed": _describe_first_failure,
    "crashed": _describe_first_failure,
}


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What launchers and loggers put before a line: the rank, the process, the time and the level.
_PREFIXES = (
    re.compile(r"\[(?:rank|default)(?P<rank>\d{1,6})\]: ?"),
    re.compile(r"\[\d+,(?P<rank>\d{1,6})\]<std(?:out|err)>: ?"),  # of mpirun --tag-output
    re.compile(r"\[[a-z]\w*[|/]?\d*(?:\|\d+)?\]: ?"),
    re.compile(r"(?:[a-z][\w.-]*\d|\d+\.\d+\.\d+\.\d+): (?=\s|[\[(A-Z])"),  # of pdsh
    re.compile(r"(?:\S+ )?\[?std(?:out|err)\]?:? "),
    re.compile(r"\d\d:\d\d:\d\d[.,]\d+ "),
    re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+:\d+\] ?"),
    re.compile(r"\((?:\w+ )*?(?:pid|TP\d|PP\d|DP\d|ip)[^()]{0,80}\) ?"),
    re.compile(r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?:? "),
    re.compile(r"(?:ERROR|CRITICAL|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]|\S+\]) ?"),
    re.compile(r"(?:ERROR|CRITICAL)(?: -|:root:|:) ?"),
)
_LABEL = re.compile(r"\s*(?P<rank>\d{1,5}): ")  # of `srun --label`
_RANKS = (
    re.compile(r"\[(?:PG [^\]]{0,200})?Rank (\d{1,6})\]"),
    re.compile(r"\brank[ =:]\s?(\d{1,6})\b", re.IGNORECASE),
)
# torchrun's report: processes that it ended itself, then the one that failed first; a rank is for the lines after it.
_REPORTED_RANK = re.compile(r"\s+rank\s+: (\d{1,6}) \(local_rank")
_OTHER_FAILURES, _FIRST_FAILURE = "Failures:", "Root Cause (first observed failure):"
_NOTICE = re.compile(
    r"(?<!=)\b(?:WARN(?:ING)?|INFO|DEBUG)\b|\b\w*Warning: |\bwarnings\.warn\(|(?:^|[\]:] ?)\W{0,2}[WI]\d{3,4} \d\d:|"
    r"\[[WI]\d{0,4} [\w. ]*[:.]|\[W \w+\.\w+"
)
_NCCL = re.compile(r"\bNCCL WARN\b|(?<!\S)\S+:\d+:\d+ \[\d+\] \S+:\d+ WARN\b")  # NCCL reports errors at level WARN
_LONGEST = 4_000  # characters of a line; a longer one is shortened to its beginning and end
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "[^"]+", line \d+')
_CODE = re.compile(r"\s*(?:raise \w|\^+\s*$|~*\^+|[│╭╰┃┏┗❱]|assert \S+ |-+> ?\d+ |\d+ {2,}\S)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = "Exception ignored in"
_NAMED = (
    r"(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Expired|Killed|Failed|Unsupported|Violation|Conflict|Group)"
)
_EXCEPTION = re.compile(rf"(?:[A-Za-z_]\w*\.)*[A-Z]\w*{_NAMED}(?:: |:?$)")
_AFTER_TRACEBACK = re.compile(r"[A-Za-z_][\w.]*(?::(?=\s|$)|$)")


class LineKind(Enum):
    """What a line can say."""

    PLAIN = "output or an error"
    NOTICE = "a warning or below"
    SOURCE = "not an error: code in a traceback, or a process that a launcher ended"


@dataclass(frozen=True, slots=True)
class Line:
    """A line without the prefixes of launchers; `number` counts from 1."""

    number: int
    text: str
    rank: int | None
    kind: LineKind


@dataclass
class Raised:
    """An exception as Python prints it. Exceptions that led to each other have the same `chain`."""

    text: str
    number: int
    rank: int | None
    chain: int
    lines: set[int] = field(default_factory=set)


@dataclass
class Log:
    """A log that has been read."""

    lines: list[Line] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)


@dataclass
class _State:
    """The parser's state within the output of one rank."""

    in_traceback: bool = False
    is_ignored: bool = False  # the traceback is of an exception that Python ignored
    chain: int = 0
    is_chained: bool = False  # the next traceback follows from the previous one
    current: Raised | None = None  # the exception whose message continues
    is_after_blank: bool = False


def read_log(text: str) -> Log:
    """Return the lines and exceptions of a log."""
    log = Log()
    states: dict[int | None, _State] = {}
    reported_rank: int | None = None
    is_other_failure = False
    for number, raw in _split(text):
        line, label, prefix = _remove_prefixes(raw)
        state = states.setdefault(label, _State())
        is_other_failure = line == _OTHER_FAILURES or (is_other_failure and line != _FIRST_FAILURE)
        if match := _REPORTED_RANK.match(line):
            reported_rank = int(match[1])
        elif not line[:1].isspace():
            reported_rank = None
        rank = next((r for r in (label, reported_rank, _rank_in(line)) if r is not None), None)
        kind = LineKind.SOURCE if is_other_failure else _classify_line(line, prefix, state, log, number, rank)
        log.lines.append(Line(number, line, rank, kind))
    return log


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; the updates of a progress bar are separate lines with the same number."""
    lines = [_ESCAPES.sub("", line) for line in text.split("\n")]
    nonempty_lines = [line for line in lines if line.strip()]
    is_labelled = len(nonempty_lines) > 1 and sum(bool(_LABEL.match(line)) for line in nonempty_lines) >= 0.8 * len(
        nonempty_lines
    )
    for number, line in enumerate(lines, 1):
        for part in line.rstrip("\r").split("\r"):
            if len(part) > _LONGEST:
                part = f"{part[: _LONGEST // 2]} ... {part[-_LONGEST // 2 :]}"
            match = _LABEL.match(part) if is_labelled else None
            yield number, f"[rank{match['rank']}]: {part[match.end() :]}" if match else part


def _remove_prefixes(line: str) -> tuple[str, int | None, str]:
    """Return the line without its prefixes, the rank in them, and the prefixes."""
    rank, start = None, 0
    while match := next((m for p in _PREFIXES if (m := p.match(line, start)) and m.end() > start), None):
        if "rank" in match.re.groupindex:
            rank = int(match["rank"])
        start = match.end()
    return line[start:].rstrip(), rank, line[:start]


def _rank_in(text: str) -> int | None:
    return next((int(match[1]) for pattern in _RANKS if (match := pattern.search(text))), None)


def _classify_line(shown: str, prefix: str, state: _State, log: Log, number: int, rank: int | None) -> LineKind:
    """Return the kind of a line; record exceptions and update the state of this rank's output."""
    if _IGNORED in shown:
        state.is_ignored = True
        return LineKind.NOTICE
    if _TRACEBACK in shown or _FRAME.match(shown):
        if not state.in_traceback:
            state.in_traceback, state.current = True, None
            state.chain = state.chain if state.is_chained else len(log.lines) + 1
            state.is_chained = False
        return LineKind.SOURCE
    if any(words in shown for words in _CHAINED):
        state.is_chained, state.current = True, None
        return LineKind.SOURCE
    if state.in_traceback and (not shown or shown[0].isspace()):
        return LineKind.SOURCE
    if _CODE.match(shown):
        return LineKind.SOURCE
    if _EXCEPTION.match(shown) or (state.in_traceback and _AFTER_TRACEBACK.match(shown)):
        return _begin(shown, state, log, number, rank)
    if _is_continuation(shown, prefix, state):
        assert state.current is not None
        state.current.lines.add(number)
        return LineKind.PLAIN
    return LineKind.NOTICE if _is_notice(prefix + shown) else LineKind.PLAIN


def _is_notice(line: str) -> bool:
    return bool(_NOTICE.search(line)) and not _NCCL.search(line)


def _begin(shown: str, state: _State, log: Log, number: int, rank: int | None) -> LineKind:
    """Record the beginning of an exception's message."""
    if not state.in_traceback and not state.is_chained:
        state.chain = len(log.lines) + 1
    ignored, state.in_traceback, state.is_chained, state.is_ignored = state.is_ignored, False, False, False
    state.is_after_blank, state.current = False, None
    if ignored or re.match(r"\w*Warning\b", shown):
        return LineKind.NOTICE
    state.current = Raised(shown, number, rank, state.chain, {number})
    log.raised.append(state.current)
    return LineKind.PLAIN


def _is_continuation(shown: str, prefix: str, state: _State) -> bool:
    """Return whether the line belongs to the message of the exception before it."""
    if state.current is None:
        return False
    if not shown:
        state.is_after_blank = True
        return True
    ends = (state.is_after_blank and not shown[0].isspace()) or _is_notice(prefix + shown)
    if ends or len(state.current.lines) > 60:
        state.current = None
        return False
    return True


_RANK = re.compile(r"rank-(\d{1,9})\.log")
# Logs of preparation come before those of the workers, and the launcher's report after them.
_FIRST, _LAST = re.compile(r"prepare.*\.log"), re.compile(r"launcher.*\.log")


@dataclass(frozen=True)
class LogText:
    """A log.

    Attributes:
        text: its lines; those of ranks begin with ``[rankN]:``, as torchrun writes them.
        files: the first line number of each file, and its path; empty for a log that is one file.
    """

    text: str
    files: tuple[tuple[int, Path], ...] = ()

    def place(self, number: int) -> tuple[Path | None, int]:
        """Return the file of a line of the text, None without files, and the line's number in it."""
        if not self.files:
            return None, number
        first, file = self.files[bisect.bisect_right([begin for begin, _ in self.files], number) - 1]
        return file, number - first + 1


def read_file(file: Path) -> str:
    """Return the text of a log, with invalid UTF-8 replaced. Raises OSError."""
    return file.read_bytes().decode("utf-8", errors="replace")


def read_run(run: Path) -> LogText:
    """Return the logs of a run. Raises OSError if one cannot be read, or if there is none."""
    names = sorted((name for name in list_files_inside(run, "logs") if name.endswith(".log")), key=_compute_sort_key)
    if not names:
        raise FileNotFoundError(f"there are no logs in {run / 'logs'}")
    return _join_logs(run, names)


def _compute_sort_key(name: str) -> tuple[int, int, str]:
    rank = _RANK.fullmatch(name)
    kind = 0 if _FIRST.fullmatch(name) else 2 if _LAST.fullmatch(name) else 1
    return kind, int(rank[1]) if rank else -1, name


def _join_logs(run: Path, names: Iterable[str]) -> LogText:
    lines: list[str] = []
    starts = []
    for name in names:
        starts.append((len(lines) + 1, run / "logs" / name))
        rank = _RANK.fullmatch(name)
        prefix = f"[rank{rank[1]}]: " if rank else ""
        with open_inside(run, "logs", name) as file:
            content = file.read().decode("utf-8", errors="replace")
        lines += [f"{prefix}{line}" for line in content.removesuffix("\n").split("\n")]
    return LogText("\n".join(lines) + "\n", tuple(starts))
