"""The result of a simulation, its memory beside what the plan predicts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.errors import TrainingError
from trainwright.utils.text import format_bytes, format_plural

# What a simulation of one rank on fake tensors does not show.
UNSEEN = (
    "values: losses, overflow, NaN; whether a step converges",
    "races between streams, and collectives that hang because ranks differ: the others are taken to be like rank 0",
    "limits and errors inside kernels and NCCL, fragmentation of the allocator, memory of the driver and the libraries",
    "time",
)
_PLANNED = ("load", "forward", "backward", "optimizer", "evaluation", "generation", "checkpoint", "export")


@dataclass(frozen=True)
class Simulation:
    """What rank 0 of a simulated run did; ``str()`` gives what ``trainwright train --simulate`` prints.

    Attributes:
        world: the number of ranks.
        steps: the optimizer steps that were taken.
        memory: peak bytes of tensors on the device by phase, rounded as CUDA's allocator does.
        planned_memory: the same as the plan predicts.
        collectives: number and bytes of the full tensors by kind, in the last step.
        waits: how often the host waits for the device in the last step, by cause and line.
        error: the error that ended the run; None if it reached its export.
        notes: what was replaced because it is not here or cannot be simulated.
    """

    machine: str
    card_bytes: int
    task: str
    strategy: str
    world: int
    mixed_precision: str
    micro_batches: int
    steps: int
    memory: Mapping[str, int]
    planned_memory: Mapping[str, int]
    collectives: Mapping[str, tuple[int, int]]
    waits: Mapping[tuple[str, str], int]
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The peak bytes of tensors on the device."""
        return max(self.memory.values(), default=0)

    @property
    def host_waits(self) -> int:
        """How often the host waits for the device in a step."""
        return sum(self.waits.values())

    def refuse(self, max_host_syncs: int | None = None) -> None:
        """Raise TrainingError if the run failed, needs more memory than the card has, or waits too often.

        Args:
            max_host_syncs: the most waits of the host for the device in a step; None: any number.
        """
        if self.error is not None:
            raise TrainingError(f"the simulated run failed: {self.error}")
        if self.peak > self.card_bytes:
            raise TrainingError(
                f"the simulated run needs {format_bytes(self.peak)} of the card's {format_bytes(self.card_bytes)}"
            )
        if max_host_syncs is not None and self.host_waits > max_host_syncs:
            (cause, source_line), count = next(iter(self.waits.items()))
            raise TrainingError(
                f"--max-host-syncs {max_host_syncs}: the host waits {format_plural(self.host_waits, 'time')} for the "
                f"device in a step, {count} of them at {source_line} ({cause})"
            )

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        waits = [
            {"cause": cause, "place": source_line, "number": count}
            for (cause, source_line), count in self.waits.items()
        ]
        return {**asdict(self), "waits": waits, "peak": self.peak, "host_waits": self.host_waits, "unseen": UNSEEN}

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield f"{'machine':<14} {self.machine}, simulated"
        ranks = f"rank 0 of {self.world:,}" if self.world > 1 else "one process"
        yield (
            f"{'run':<14} {self.task}, {self.strategy}, {ranks}, {self.mixed_precision}: "
            f"{format_plural(self.steps, 'step')} of "
            f"{format_plural(self.micro_batches, 'micro-batch', 'micro-batches')}"
        )
        for note in self.notes:
            yield f"{'':<14} {note}"
        yield ""
        yield f"{'peak memory':<14} {'simulated':>12} {'plan':>12}"
        for phase in dict.fromkeys((*_PLANNED, *self.memory)):
            if phase in self.memory or self.planned_memory.get(phase):
                yield (
                    f"  {phase:<12} {_format_bytes(self.memory.get(phase)):>12} "
                    f"{_format_bytes(self.planned_memory.get(phase)):>12}"
                )
        planned_bytes = max(self.planned_memory.values(), default=0)
        off = f"; the plan is {planned_bytes / self.peak - 1:+.1%}" if self.peak and planned_bytes else ""
        yield (
            f"  {'most':<12} {_format_bytes(self.peak):>12} {_format_bytes(planned_bytes):>12}  of "
            f"{format_bytes(self.card_bytes)}{off}"
        )
        yield ""
        yield f"{'collectives':<14} {'a step':>12} {'bytes':>12}"
        for kind, (count, total) in self.collectives.items():
            yield f"  {kind:<12} {count:>12} {format_bytes(total):>12}"
        if not self.collectives:
            yield "  none"
        yield ""
        yield f"{'host waits':<14} {self.host_waits} a step"
        for (cause, source_line), count in self.waits.items():
            yield f"  {count:>5}  {cause}: {source_line}"
        yield ""
        yield f"{'not seen':<14} {UNSEEN[0]}"
        for line in UNSEEN[1:]:
            yield f"{'':<14} {line}"
        if self.error is not None:
            yield ""
            yield f"{'error':<14} {self.error}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _format_bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
