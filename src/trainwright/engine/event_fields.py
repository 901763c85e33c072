"""Check the lines of ``events.jsonl``, which may be anybody's, against the fields of their kinds of event."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from trainwright.engine.events import (
    CheckpointWritten,
    Evaluate,
    Event,
    Fault,
    Finish,
    Generate,
    Notice,
    Profile,
    Record,
    Restart,
    Rewind,
    Start,
    Step,
)
from trainwright.recipe.files import DEEPEST, is_deeper

LONGEST_LINE = 2**22  # bytes; answers and lists of operators stay far below

_REQUIRED = {"step": ("step", "loss", "step_time"), "evaluate": ("step", "metrics"), "generate": ("step",)}
_LATEST = 1e11  # seconds since the epoch, in the year 5138
_LARGEST_STEP = 2**53
_LARGEST = 1e300  # of counts: their sums and means are finite
_MOST_SECONDS = 1e9
_LONG_INTEGER = re.compile(r"\d{19}")
_NOT_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_Check = Callable[[Any], bool]


def parse_event(line: str) -> Record | None:
    """Return the event of a line, with NaN and infinity, which JSON does not have, as numbers.

    Returns:
        None if the line is damaged: not JSON, nested too deep, without kind or time, with a number that is too large or
        a field that does not have the type that the event's kind gives it.
    """
    try:
        # Both need a look at every value, and are rare.
        event = json.loads(line, parse_int=_integer) if _LONG_INTEGER.search(line) else json.loads(line)
        if line.count("{") + line.count("[") > DEEPEST and is_deeper(event, DEEPEST):
            return None
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(event, dict)
        or not isinstance(kind := event.get("event"), str)
        or not _is_time(event.get("time"))
    ):
        return None
    checks = _CHECKS.get(kind, _ANY_KIND)
    if 'nan"' in line or 'inf"' in line:
        event = _restored(event, None if kind in _MEASURES else checks)
    for name in _REQUIRED.get(kind, ()):
        if name not in event:
            return None
    for name, value in event.items():
        check = checks.get(name)
        if check is not None and not check(value):
            return None
    return event


def _integer(digits: str) -> int:
    value = int(digits)  # Python itself refuses thousands of digits
    if abs(value) > 2**63:
        raise ValueError("too large")
    return value


def _restored(event: Record, checks: Mapping[str, _Check] | None) -> Record:
    """Convert the names of NaN and infinity back, in every field or in those that have numbers by ``checks``."""
    return {
        name: _NOT_JSON.get(value, value)
        if isinstance(value, str) and (checks is None or checks.get(name) is _is_number)
        else _restored(value, None)
        if isinstance(value, dict)
        else value
        for name, value in event.items()
    }


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # integers are bounded, and a float of any size is one that a run may have


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LATEST


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST_SECONDS < value < _MOST_SECONDS


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_STEP


def _is_optional_step(value: Any) -> bool:
    return value is None or _is_step(value)


def _is_resumed_from(value: Any) -> bool:
    return isinstance(value, str) or _is_optional_step(value)  # earlier versions wrote the checkpoint's path


# Of fields with the same meaning in every kind of event.
_BY_NAME: dict[str, _Check] = {
    **{
        "step": _is_optional_step,
        "after_step": _is_optional_step,
        "first": _is_step,
        "max_steps": _is_step,
        "resumed_from": _is_resumed_from,
    },
    **dict.fromkeys(("step_time", "seconds", "blocked_seconds", "slowed_seconds"), _is_seconds),
}


def _check_of(hint: Any) -> _Check:
    """Return the check of a type of ``engine/events.py``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        checks = [_check_of(each) for each in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        checks = [_check_of(each) for each in arguments]
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    if origin in (Mapping, Sequence):
        kind, check = dict if origin is Mapping else list, _check_of(arguments[-1])
        return lambda value: (
            isinstance(value, kind) and all(map(check, value.values() if isinstance(value, dict) else value))
        )
    if hint is Any:
        return lambda value: True
    return {float: _is_number, int: _is_finite, NoneType: lambda value: value is None}.get(
        hint, lambda value: isinstance(value, str if hint is Path else hint)
    )


def _checks_of(kind: type[Event]) -> dict[str, _Check]:
    hints = get_type_hints(kind)
    names = [name for name in hints if name != "kind_of_event"]
    return {name: _BY_NAME.get(name) or _check_of(hints[name]) for name in names}


_ANY_KIND: dict[str, _Check] = {"step": _is_optional_step}
_KINDS = (Start, Step, Evaluate, Generate, CheckpointWritten, Fault, Rewind, Restart, Notice, Profile, Finish)
_CHECKS = {kind.kind_of_event: _ANY_KIND | _checks_of(kind) for kind in _KINDS}
_CHECKS["step"]["step"] = _CHECKS["evaluate"]["step"] = _CHECKS["generate"]["step"] = _is_step
_MEASURES = (Step.kind_of_event, Evaluate.kind_of_event)  # whose fields, also those of extensions, are numbers
