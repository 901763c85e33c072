"""Explain a log: which error is the cause, and which ones followed from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.diagnosis.details import details_of
from trainwright.diagnosis.known_error import KnownError, Role
from trainwright.diagnosis.log import Kind, Line, Log, Raised, read_log
from trainwright.diagnosis.table import known_error

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
    own = _OWN.search(text) is not None
    return Diagnosis(cause, details, unknown, is_unknown_first, followed, signs, own, skipped)


def advice(trace: str) -> str:
    """Return lines with the reason and the fixes for the traceback of one process; '' if the error is not known."""
    cause = explain(trace).cause
    if cause is None or cause.error.role > Role.REACTION:
        return ""
    error = cause.error
    return "".join((f"\n{error.title}: {error.cause}", *(f"\n- {fix}" for fix in error.fixes_of(own=True))))


def shortened(text: str) -> str:
    """Return a line of a log with at most 400 characters."""
    text = text.strip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


def _findings(lines: Sequence[Line]) -> tuple[list[LogError], set[int], int]:
    """Return the known errors in the order of their first lines, the numbers of all lines that have one, and how many
    lines were not compared.
    """
    found: dict[str, LogError] = {}
    explained: set[int] = set()
    compared: dict[tuple[str, bool], KnownError | None] = {}
    remaining, skipped = _COMPARED, 0
    for line in lines:
        lower = line.text.lower()
        if line.kind is Kind.SOURCE or not any(word in lower for word in _WORDS):
            continue
        key = line.text, line.kind is Kind.NOTICE
        if key not in compared:
            remaining -= len(line.text) + _PER_LINE
            if remaining < 0:
                skipped += 1
                continue
            compared[key] = known_error(line.text, is_notice=line.kind is Kind.NOTICE)
        error = compared[key]
        if error is None:
            continue
        explained.add(line.number)
        finding = found.get(error.name)
        if finding is None:
            finding = found[error.name] = LogError(error, line)
        else:
            finding.count += 1
        if line.rank is not None and line.rank not in finding.ranks:
            finding.ranks.append(line.rank)
    return list(found.values()), explained, skipped


def _first_unknown(log: Log, explained: set[int]) -> Raised | None:
    """Return the first exception that, with those that led to it, has no line of a known error."""
    known = {raised.chain for raised in log.raised if raised.lines & explained}
    return next((raised for raised in log.raised if raised.chain not in known), None)


def _comes_before(unknown: Raised, errors: Sequence[LogError]) -> bool:
    """Return whether the unknown exception is the cause: no known cause, and no known error of a process before it."""
    if not errors or errors[0].error.role is Role.FOLLOW_UP:
        return True
    if errors[0].error.role is Role.CAUSE:
        return False
    own = [finding.line.number for finding in errors if finding.error.role in (Role.SYMPTOM, Role.REACTION)]
    return unknown.number < min(own)
