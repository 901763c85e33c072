"""The events of a run: the fields of each kind of line in ``events.jsonl``.

This is the one place for their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

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
        found: Record = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if not each.metadata or value not in (None, {}):
                found[each.name] = value
        return found


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
    """

    kind_of_event = "start"

    task: str
    world_size: int
    strategy: str
    mixed_precision: str
    tf32: bool
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

    def record(self) -> Record:
        """Return the fields by name, including those of the task."""
        found = super().record()
        predicted, layout, details = (found.pop(name) for name in ("predicted", "layout", "details"))
        if not self.attention:
            del found["attention"]
        return {**found, **details, "predicted": dict(predicted), "layout": layout}


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
    """A line for the user. The other fields belong to a plan that proved wrong (observe/plan_watch.py)."""

    kind_of_event = "notice"

    message: str
    kind: str | None = field(default=None, metadata=_LEFT_OUT)
    details: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> Record:
        """Return the fields by name, including the details."""
        found = super().record()
        return {**found, **found.pop("details")}


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
