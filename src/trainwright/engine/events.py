"""The events of a run: the fields of each kind of line in ``events.jsonl``, and the check of a line that is read.

This is the one place for their fields.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from trainwright.errors import TrainingError, build_write_error
from trainwright.recipe.files import DEEPEST, is_deeper

# An event as written and read back: ``event`` (its kind), ``time``, and its fields.
Record = dict[str, Any]
# A function that receives every event of a run as it happens.
Observer = Callable[[Record], None]

_LEFT_OUT: dict[str, Any] = {"left out": True}  # left out if None or empty


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all kinds of event."""

    kind_of_event: ClassVar[str]

    def record(self) -> Record:
        """Return the fields by name, without empty ones."""
        record: Record = {}
        for member in fields(self):
            value = getattr(self, member.name)
            if not member.metadata or value not in (None, {}):
                record[member.name] = value
        return record


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A launch starts or resumes.

    Attributes:
        resumed_from: the step of the checkpoint; None: a fresh run.
        launcher: what started the processes: `trainwright`, `torchrun`, `srun` and so on.
        job: the number of the scheduler's job, with the index in an array; None outside of one.
        nodes: the host names of the ranks, each once.
        gpus: how many the run uses.
        pending: what the previous launch interrupted after that step, `evaluation` or `generation`.
        attention: the kernels that compute the model's attention, and why not faster ones.
        fingerprints: of the tokens, ``train`` and ``validation``, by which runs on the same data are recognized.
        versions: of Python and the libraries that compute, by name.
        details: fields specific to the task.
        parent: the checkpoint of another run that the run started from: ``run``, ``step``, the ``sha256`` of its
            manifest, and whether its ``optimizer_state`` was taken.
    """

    kind_of_event = "start"

    task: str
    world_size: int
    strategy: str
    mixed_precision: str
    tf32: bool
    float8: str
    device: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    batch_unit: str
    parameters: int
    trainable_parameters: int
    resumed_from: int | None
    pending: str | None
    max_steps: int
    batch_varies: bool
    packed: bool
    accumulation_asked: int | None
    evaluate_every: int | None
    checkpoint_every: int | None
    threads: int
    run_directory: str
    reasons: Sequence[str]
    predicted: Mapping[str, float]
    layout: str
    launcher: str
    job: str | None
    nodes: Sequence[str]
    gpus: int
    attention: Sequence[str] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None

    def record(self) -> Record:
        """Return the fields by name, including those of the task."""
        record = super().record()
        predictions, layout, details = (record.pop(name) for name in ("predicted", "layout", "details"))
        if not self.attention:
            del record["attention"]
        return {**record, **details, "predicted": dict(predictions), "layout": layout}


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step. ``tokens`` and ``target_tokens`` count from the start of the run, without padding.

    Attributes:
        step_time: seconds.
        memory_bytes: the largest peak of any rank up to this step.
        resident_bytes: memory of the host that the largest process of a rank has now, after the passes.
        metrics: of the task and of step policies.
    """

    kind_of_event = "step"

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    target_tokens: int
    tokens_per_second: float
    step_time: float
    memory_bytes: int
    resident_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Event):
    """An evaluation on the validation split finished, in ``seconds``.

    Attributes:
        intervals: 95 % intervals of the metrics of answers that are proportions.
        answers: the file of the answers.
    """

    kind_of_event = "evaluate"

    step: int
    metrics: Mapping[str, float]
    seconds: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict, metadata=_LEFT_OUT)
    answers: Path | None = field(default=None, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Generate(Event):
    """A sample: the model's answer to one of the recipe's prompts."""

    kind_of_event = "generate"

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint was written. ``blocked_seconds``: how long training waited for it; ``slowed_seconds``: how much
    longer the steps beside it took than those before; ``copy_seconds``: how long the newest complete one of
    ``checkpoint.copies`` has taken.
    """

    kind_of_event = "checkpoint"

    step: int
    path: Path
    seconds: float
    blocked_seconds: float
    slowed_seconds: float
    copy_seconds: float | None = field(default=None, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """Something went wrong; ``action`` says what the run does about it. ``rank``: the first rank that reported it."""

    kind_of_event = "fault"

    kind: str
    rank: int
    detail: str
    action: str
    step: int | None = field(default=None, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Rewind(Event):
    """The run went back to the checkpoint of step ``resumed_from``, and repeats the steps after it.

    Attributes:
        left_out: the steps whose global batches are not trained on.
        pending: what is done again after that step, `evaluation` or `generation`.
    """

    kind_of_event = "rewind"

    resumed_from: int
    left_out: Sequence[int]
    pending: str | None


@dataclass(frozen=True, kw_only=True)
class Restart(Event):
    """The launcher restarts the run from its newest checkpoint after the failure ``detail``.

    Attributes:
        cause: `process`, `crash`, `connection`, `hang`, `node` or `error`.
        number: counts the restarts of the run, from 1.
        allowed: ``faults.restarts``.
        after_step: the last step before the failure; None: before the first one.
    """

    kind_of_event = "restart"

    cause: str
    detail: str
    number: int
    allowed: str
    after_step: int | None = field(default=None, metadata=_LEFT_OUT)

    def line(self) -> str:
        """Return the event for the console."""
        at = "before the first step" if self.after_step is None else f"after step {self.after_step}"
        return f"restart {self.number} from the newest checkpoint (faults.restarts: {self.allowed}) {at}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A line for the user. The other fields belong to a plan that proved wrong (planning/plan_watch.py)."""

    kind_of_event = "notice"

    message: str
    kind: str | None = field(default=None, metadata=_LEFT_OUT)
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields by name, including the details."""
        record = super().record()
        return {**record, **record.pop("details")}


@dataclass(frozen=True, kw_only=True)
class Profile(Event):
    """Steps that were recorded with torch.profiler (train.profile).

    Attributes:
        first, step: the first and the last of them.
        path: the trace of all ranks.
        operators: the operators, on a GPU the kernels, that took most time, in order: ``name``, ``calls``, ``seconds``
            without those of the operators that they call, and their ``share``; sums over ranks and steps.
        memory: snapshots of the memory of GPUs.
    """

    kind_of_event = "profile"

    first: int
    step: int
    path: Path
    operators: Sequence[Mapping[str, Any]]
    memory: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """A launch ends. ``status``: `finished` or `stopped`; ``measured``: see ``engine.measured``."""

    kind_of_event = "finish"

    status: str
    step: int
    seconds: float
    path: Path | None
    measured: Mapping[str, float]


LONGEST_LINE = 2**22  # bytes; answers and lists of operators stay far below

_REQUIRED = {"step": ("step", "loss", "step_time"), "evaluate": ("step", "metrics"), "generate": ("step",)}
_LATEST = 1e11  # seconds since the epoch, in the year 5138
_LARGEST_STEP = 2**53
_LARGEST = 1e300  # of counts: their sums and means are finite
_MAX_SECONDS = 1e9
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
        event = json.loads(line, parse_int=_parse_integer) if _LONG_INTEGER.search(line) else json.loads(line)
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
        event = _restore_numbers(event, None if kind in _MEASURES else checks)
    for name in _REQUIRED.get(kind, ()):
        if name not in event:
            return None
    for name, value in event.items():
        check = checks.get(name)
        if check is not None and not check(value):
            return None
    return event


def _parse_integer(digits: str) -> int:
    value = int(digits)  # Python itself refuses thousands of digits
    if abs(value) > 2**63:
        raise ValueError("too large")
    return value


def _restore_numbers(event: Record, checks: Mapping[str, _Check] | None) -> Record:
    """Convert the names of NaN and infinity back, in every field or in those that have numbers by ``checks``."""
    return {
        name: _NOT_JSON.get(value, value)
        if isinstance(value, str) and (checks is None or checks.get(name) is _is_number)
        else _restore_numbers(value, None)
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
    return type(value) in (int, float) and -_MAX_SECONDS < value < _MAX_SECONDS


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_STEP


def _is_optional_step(value: Any) -> bool:
    return value is None or _is_step(value)


# Of fields with the same meaning in every kind of event.
_BY_NAME: dict[str, _Check] = {
    "step": _is_optional_step,
    "after_step": _is_optional_step,
    "first": _is_step,
    "max_steps": _is_step,
    # Earlier versions wrote the checkpoint's path.
    "resumed_from": lambda value: isinstance(value, str) or _is_optional_step(value),
    **dict.fromkeys(("step_time", "seconds", "blocked_seconds", "slowed_seconds"), _is_seconds),
}


def _build_check(hint: Any) -> _Check:
    """Return the check of a type of ``engine/events.py``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        checks = list(map(_build_check, arguments))
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        checks = list(map(_build_check, arguments))
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(item) for check, item in zip(checks, value, strict=True))
        )
    if origin in (Mapping, Sequence):
        kind, check = dict if origin is Mapping else list, _build_check(arguments[-1])
        return lambda value: (
            isinstance(value, kind) and all(map(check, value.values() if isinstance(value, dict) else value))
        )
    if hint is Any:
        return lambda value: True
    return {float: _is_number, int: _is_finite, NoneType: lambda value: value is None}.get(
        hint, lambda value: isinstance(value, str if hint is Path else hint)
    )


def _build_checks(kind: type[Event]) -> dict[str, _Check]:
    hints = get_type_hints(kind)
    names = [name for name in hints if name != "kind_of_event"]
    return {name: _BY_NAME.get(name) or _build_check(hints[name]) for name in names}


_ANY_KIND: dict[str, _Check] = {"step": _is_optional_step}
_KINDS = (Start, Step, Evaluate, Generate, CheckpointWritten, Fault, Rewind, Restart, Notice, Profile, Finish)
_CHECKS = {kind.kind_of_event: _ANY_KIND | _build_checks(kind) for kind in _KINDS}
_CHECKS["step"]["step"] = _CHECKS["evaluate"]["step"] = _CHECKS["generate"]["step"] = _is_step
_MEASURES = (Step.kind_of_event, Evaluate.kind_of_event)  # whose fields, also those of extensions, are numbers


_PROGRESS_SECONDS = 0.2


class EventLog:
    """Append events to a file and pass each to the observers. Only rank 0 has a path; other ranks write nothing.

    A line is written in one call and flushed, so a killed run leaves at most one incomplete line, which is removed on
    resume. Floats are written with full precision; numbers that JSON cannot represent are written by name.

    Raises:
        RequestError: something else is in the place of the file or its directory.
        MachineError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self._path = path
        self._file = None
        self._progress_sent_at = float("-inf")  # when `progress` was last passed on
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _drop_cut_line(path)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise build_write_error(path, error) from error

    def follow(self, observer: Observer) -> None:
        """Add an observer, which may emit events itself."""
        self._observers.append(observer)

    def emit(self, event: Event) -> None:
        """Record an event, with the time in seconds since the epoch.

        Raises:
            TrainingError: the file no longer exists, usually because the run directory was removed.
        """
        if self._file is None or self._path is None:
            return
        if _is_gone(self._path):
            raise TrainingError(
                f"{self._path} is gone: the run's directory was deleted or moved, or its file system is no longer "
                "mounted; restore it, or --resume the run at its new path"
            )
        record = _record(event)
        try:
            self._file.write(_format_line(record))
            self._file.flush()
        except OSError as error:
            # A full disk must not end a run that can still train; the observers report it on the console.
            record = {**record, "write_error": str(error)}
        self._show(record)

    def announce(self, doing: str, step: int | None = None) -> None:
        """Tell the observers what the run does until the next event; nothing is recorded."""
        if self._file is not None:
            self._show({"event": "phase", "time": time.time(), "doing": doing, "step": step})

    def progress(self, done: int, total: int) -> None:
        """Tell the observers how much of what was announced is done, at most five times a second; not recorded."""
        if self._file is not None and total and (now := time.monotonic()) - self._progress_sent_at >= _PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._show({"event": "progress", "time": time.time(), "done": done, "total": total})

    def _show(self, event: Record) -> None:
        for observer in self._observers:
            with suppress(OSError):  # observers may write to a full disk, too
                observer(event)

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def append_event(path: Path, event: Event) -> None:
    """Add an event to the log of a run from another process than its rank 0. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_format_line(_record(event)))


def _record(event: Event) -> Record:
    return {"event": event.kind_of_event, "time": time.time(), **event.record()}


def _format_line(record: Record) -> str:
    return json.dumps(_convert_to_plain(record), allow_nan=False) + "\n"


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:  # a file system that does not respond now may respond later
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _convert_to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert_to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return str(value) if isinstance(value, os.PathLike) else value


def _drop_cut_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
