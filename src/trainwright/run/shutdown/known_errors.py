"""The errors that logs and exceptions of training report, why each happens and what to do: ``known_errors.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any


class Role(IntEnum):
    """How an error relates to others in the same log; the lowest value explains the others."""

    CAUSE = 0  # explains other errors
    SYMPTOM = 1  # what failed in a process, whose reason another line may have
    REACTION = 2  # how a process notices that something else failed, in it or on another rank
    FOLLOW_UP = 3  # always caused by an error elsewhere, which this log may not have
    SIGN = 4  # not an error of the program; the possible cause if there is no error
    HARMLESS = 5  # looks like an error and is not one


@dataclass(frozen=True)
class KnownError:
    """One kind of error.

    Attributes:
        name: the identifier in output, for programs and links.
        title: what happened, in a few words.
        patterns: regular expressions; any of them in a line recognizes the error.
        cause: why it happens.
        fixes: what to do, the most likely first.
        recipe_fixes: the same for a run of Trainwright, where its keys and options are others; () if they are not.
        role: whether it explains other errors or follows from them.
        unless: regular expressions; a line with any of them is another error.
        in_notices: whether lines with the level of a warning or below count too.
    """

    name: str
    title: str
    patterns: tuple[str, ...]
    cause: str
    fixes: tuple[str, ...]
    role: Role = Role.CAUSE
    unless: tuple[str, ...] = field(default=())
    in_notices: bool = False
    recipe_fixes: tuple[str, ...] = field(default=())

    def list_fixes(self, *, own: bool) -> tuple[str, ...]:
        """Return the fixes for a run of Trainwright (``own``) or of another program."""
        return self.recipe_fixes if own and self.recipe_fixes else self.fixes

    def matches(self, line: str) -> bool:
        """Return whether a line of a log reports this error."""
        line = line.lower()
        return any(pattern.search(line) for pattern in self._recognized) and not any(
            pattern.search(line) for pattern in self._excluded
        )

    @cached_property
    def _recognized(self) -> list[re.Pattern[str]]:
        return [_compile_pattern(pattern) for pattern in self.patterns]

    @cached_property
    def _excluded(self) -> list[re.Pattern[str]]:
        return [_compile_pattern(pattern) for pattern in self.unless]


_MAX_LINES = 200  # of a traceback
_LETTERS = re.compile(r"\\.|[A-Z]+")
# A run of characters that nothing ends would be scanned again from every place where a pattern begins.
_RUN, _LONGEST_RUN = re.compile(r"(\\[SsWwd])([*+])"), 300


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern for lines in lower case: three times as fast as one that ignores the case."""
    pattern = _LETTERS.sub(lambda match: match[0] if match[0][0] == "\\" else match[0].lower(), pattern)
    return re.compile(_RUN.sub(lambda run: f"{run[1]}{{{int(run[2] == '+')},{_LONGEST_RUN}}}", pattern))


@cache
def load_known_errors() -> tuple[KnownError, ...]:
    """Return all known errors. The order matters where one line matches several: the first one counts."""
    records = tomllib.loads(Path(__file__).with_name("known_errors.toml").read_text(encoding="utf-8"))["error"]
    return tuple(_read_record(record) for record in records)


def _read_record(record: dict[str, Any]) -> KnownError:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    return KnownError(**{**values, "role": Role[record.get("role", "cause").upper()]})


def find_known_error(line: str, *, is_notice: bool = False) -> KnownError | None:
    """Return the known error that a line of a log reports: a cause before a symptom, a symptom before a follow-up.

    Args:
        line: one line, without the prefix of a launcher.
        is_notice: whether the line has the level of a warning or below.
    """
    matching = (error for error in load_known_errors() if (error.in_notices or not is_notice) and error.matches(line))
    return min(matching, key=lambda error: error.role, default=None)


def format_advice(trace: str) -> str:
    """Return lines with the reason and the fixes for the traceback of one process; '' if the error is not known."""
    lines = [line for line in trace.splitlines() if not line.startswith("  ")][-_MAX_LINES:]  # without frames
    errors = [error for line in lines if (error := find_known_error(line)) is not None]
    error = min(errors, key=lambda error: error.role, default=None)
    if error is None or error.role > Role.REACTION:
        return ""
    return "".join((f"\n{error.title}: {error.cause}", *(f"\n- {fix}" for fix in error.list_fixes(own=True))))


def is_machine_fault(message: str) -> bool:
    """Return whether the message of an exception says that hardware, or the connection to another rank, failed."""
    error = find_known_error(" ".join(message.split()))
    return is_lost_connection(message) or (error is not None and error.name == "gpu-hardware")


def is_lost_connection(message: str) -> bool:
    """Return whether the message of an exception only says that another rank cannot be reached any more."""
    error = find_known_error(" ".join(message.split()))
    return error is not None and error.name in ("rank-lost", "rendezvous", "gloo-connect", "nccl-timeout")
