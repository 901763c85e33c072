"""Read the log of one or more ranks, or of a run: which line is of which rank, and which lines are errors."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from trainwright.utils.paths import files_inside, open_inside

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
    reported: int | None = None
    is_other_failure = False
    for number, raw in _split(text):
        shown, label, prefix = _without_prefixes(raw)
        state = states.setdefault(label, _State())
        is_other_failure = shown == _OTHER_FAILURES or (is_other_failure and shown != _FIRST_FAILURE)
        if match := _REPORTED_RANK.match(shown):
            reported = int(match[1])
        elif not shown[:1].isspace():
            reported = None
        rank = next((r for r in (label, reported, _rank_in(shown)) if r is not None), None)
        kind = LineKind.SOURCE if is_other_failure else _kind(shown, prefix, state, log, number, rank)
        log.lines.append(Line(number, shown, rank, kind))
    return log


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; the updates of a progress bar are separate lines with the same number."""
    lines = [_ESCAPES.sub("", line) for line in text.split("\n")]
    written = [line for line in lines if line.strip()]
    is_labelled = len(written) > 1 and sum(bool(_LABEL.match(line)) for line in written) >= 0.8 * len(written)
    for number, line in enumerate(lines, 1):
        for part in line.rstrip("\r").split("\r"):
            if len(part) > _LONGEST:
                part = f"{part[: _LONGEST // 2]} ... {part[-_LONGEST // 2 :]}"
            match = _LABEL.match(part) if is_labelled else None
            yield number, f"[rank{match['rank']}]: {part[match.end() :]}" if match else part


def _without_prefixes(line: str) -> tuple[str, int | None, str]:
    """Return the line without its prefixes, the rank in them, and the prefixes."""
    rank, start = None, 0
    while match := next((m for p in _PREFIXES if (m := p.match(line, start)) and m.end() > start), None):
        if "rank" in match.re.groupindex:
            rank = int(match["rank"])
        start = match.end()
    return line[start:].rstrip(), rank, line[:start]


def _rank_in(text: str) -> int | None:
    return next((int(match[1]) for pattern in _RANKS if (match := pattern.search(text))), None)


def _kind(shown: str, prefix: str, state: _State, log: Log, number: int, rank: int | None) -> LineKind:
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
    if _continues(shown, prefix, state):
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


def _continues(shown: str, prefix: str, state: _State) -> bool:
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
    names = sorted((name for name in files_inside(run, "logs") if name.endswith(".log")), key=_order)
    if not names:
        raise FileNotFoundError(f"there are no logs in {run / 'logs'}")
    return _joined(run, names)


def _order(name: str) -> tuple[int, int, str]:
    rank = _RANK.fullmatch(name)
    kind = 0 if _FIRST.fullmatch(name) else 2 if _LAST.fullmatch(name) else 1
    return kind, int(rank[1]) if rank else -1, name


def _joined(run: Path, names: Iterable[str]) -> LogText:
    lines: list[str] = []
    places = []
    for name in names:
        places.append((len(lines) + 1, run / "logs" / name))
        rank = _RANK.fullmatch(name)
        prefix = f"[rank{rank[1]}]: " if rank else ""
        with open_inside(run, "logs", name) as file:
            content = file.read().decode("utf-8", errors="replace")
        lines += [f"{prefix}{line}" for line in content.removesuffix("\n").split("\n")]
    return LogText("\n".join(lines) + "\n", tuple(places))
