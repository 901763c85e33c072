"""The events of a run: what a line of ``events.jsonl`` holds, by kind.

This is the one place for their fields. ``FORMAT`` counts up whenever a field changes its meaning or goes; a field that
is added leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

FORMAT = 1

# An event as it is written and read back: ``event`` (its kind), ``time``, and its fields.
Record = dict[str, Any]
# What is shown every event of a run while it runs.
Observer = Callable[[Record], None]

_LEFT_OUT: dict[str, Any] = {"left out": True}  # where it is None or empty


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all kinds of event."""

    kind_of_event: ClassVar[str]

    def record(self) -> Record:
        """Return the fields by name, without those that have nothing to say."""
        found: Record = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if not each.metadata or value not in (None, {}):
                found[each.name] = value
        return found


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A launch begins, or goes on from a checkpoint.

    Attributes:
        resumed_from: the step of the checkpoint; None: a fresh run.
        pending: what the launch before broke off after that step, `evaluation` or `generation`.
        details: fields that only the task has.
    """

    kind_of_event = "start"

    task: str
    world_size: int
    strategy: str
    mixed_precision: str
    device: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    parameters: int
    trainable_parameters: int
    resumed_from: int | None
    pending: str | None
    max_steps: int
    batch_varies: bool
    accumulation_asked: int | None
    evaluate_every: int | None
    checkpoint_every: int | None
    threads: int
    run_directory: str
    reasons: Sequence[str]
    predicted: Mapping[str, float]
    layout: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields by name, those of the task among them."""
        found = super().record()
        predicted, layout, details = (found.pop(name) for name in ("predicted", "layout", "details"))
        return {**found, **details, "predicted": dict(predicted), "layout": layout}


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One optimizer step. ``tokens`` and ``target_tokens`` count from the beginning of the run, without padding.

    Attributes:
        step_time: seconds.
        memory_bytes: the peak on the worst rank up to this step.
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
    metrics: Mapping[str, float] = field(default_factory=dict, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Event):
    """The validation split was measured, in ``seconds``."""

    kind_of_event = "evaluate"

    step: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Generate(Event):
    """A sample: what the model answers to one of the recipe's prompts."""

    kind_of_event = "generate"

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is whole on disk. ``blocked_seconds``: how long training waited for it."""

    kind_of_event = "checkpoint"

    step: int
    path: Path
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True, kw_only=True)
class Fault(Event):
    """Something went wrong; ``action`` says what the run does about it. ``rank``: the first that met it."""

    kind_of_event = "fault"

    kind: str
    rank: int
    detail: str
    action: str
    step: int | None = field(default=None, metadata=_LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A line for the user. The other fields are of a plan that proved wrong (observe/plan_watch.py)."""

    kind_of_event = "notice"

    message: str
    kind: str | None = field(default=None, metadata=_LEFT_OUT)
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields by name, the details among them."""
        found = super().record()
        return {**found, **found.pop("details")}


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """A launch ends. ``status``: `finished` or `stopped`; ``measured``: see ``engine.measured``."""

    kind_of_event = "finish"

    status: str
    step: int
    seconds: float
    path: Path | None
    measured: Mapping[str, float]


KINDS: dict[str, type[Event]] = {
    each.kind_of_event: each for each in (Start, Step, Evaluate, Generate, CheckpointWritten, Fault, Notice, Finish)
}
