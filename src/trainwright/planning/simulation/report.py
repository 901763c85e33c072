"""The result of a simulation, beside what the plan predicts: among it the collectives of a step, by kind.

How many a rank calls, and with how many bytes, follows from the schedules of planning/step_time/update.py, counted
instead of timed; bytes are those of the full tensor. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from trainwright.errors import TrainingError
from trainwright.machine.describe import Cluster
from trainwright.parallel.matrix_owners import assign, rows_of
from trainwright.planning.memory.fsdp import units
from trainwright.planning.memory.inventory import Inventory, inventory
from trainwright.planning.memory.matrices import exchanged_width
from trainwright.planning.memory.micro_batch import computed
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.registries import OPTIMIZERS
from trainwright.utils.text import plural, size

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
        planned_collectives: those of parameters and gradients that the plan expects; None if it does not count them.
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
    planned_collectives: Mapping[str, tuple[int, int]] | None
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
            raise TrainingError(f"the simulated run needs {size(self.peak)} of the card's {size(self.card_bytes)}")
        if max_host_syncs is not None and self.host_waits > max_host_syncs:
            (cause, source_line), count = next(iter(self.waits.items()))
            raise TrainingError(
                f"--max-host-syncs {max_host_syncs}: the host waits {plural(self.host_waits, 'time')} for the device "
                f"in a step, {count} of them at {source_line} ({cause})"
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
            f"{plural(self.steps, 'step')} of {plural(self.micro_batches, 'micro-batch', 'micro-batches')}"
        )
        for note in self.notes:
            yield f"{'':<14} {note}"
        yield ""
        yield f"{'peak memory':<14} {'simulated':>12} {'plan':>12}"
        for phase in dict.fromkeys((*_PLANNED, *self.memory)):
            if phase in self.memory or self.planned_memory.get(phase):
                yield f"  {phase:<12} {_bytes(self.memory.get(phase)):>12} {_bytes(self.planned_memory.get(phase)):>12}"
        planned = max(self.planned_memory.values(), default=0)
        off = f"; the plan is {planned / self.peak - 1:+.1%}" if self.peak and planned else ""
        yield f"  {'most':<12} {_bytes(self.peak):>12} {_bytes(planned):>12}  of {size(self.card_bytes)}{off}"
        yield ""
        yield from self._collective_lines()
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

    def _collective_lines(self) -> Iterator[str]:
        yield f"{'collectives':<14} {'a step':>12} {'bytes':>12} {'plan':>12} {'bytes':>12}"
        planned = self.planned_collectives
        for kind in dict.fromkeys((*self.collectives, *(planned or ()))):
            count, total = self.collectives.get(kind, (0, 0))
            expected = ("-", "-") if planned is None else _pair(planned.get(kind, (0, 0)))
            yield f"  {kind:<12} {count:>12} {size(total):>12} {expected[0]:>12} {expected[1]:>12}"
        if not self.collectives and not planned:
            yield "  none"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _bytes(value: int | None) -> str:
    return "-" if value is None else size(value)


def _pair(counts_and_bytes: tuple[int, int]) -> tuple[str, str]:
    return str(counts_and_bytes[0]), size(counts_and_bytes[1])


_REDUCED = 4  # bytes of an element whose gradient is reduced


class Count(NamedTuple):
    """A number of collectives, and their bytes together."""

    number: int = 0
    bytes: int = 0


def collectives(workload: Workload, choice: Choice, cluster: Cluster) -> dict[str, Count] | None:
    """Return the collectives of parameters and gradients in a step, by kind; None for a strategy that is not counted.

    The few bytes that ranks exchange about a step, such as its loss, are left out.
    """
    if choice.num_processes == 1:
        return {}
    parameters = inventory(workload.trace(choice, cluster, computed(workload, choice, cluster)), choice.width)
    updates = _updates(parameters, choice) if OPTIMIZERS.get(workload.optimizer).whole_matrices else {}
    if choice.spec.gathers_blocks:
        return {**_sharded(parameters, choice), **updates}
    if any(one.when == "buckets" for one in choice.spec.collectives):
        return {"all_reduce": _buckets(parameters, choice.spec.bucket_bytes), **updates}
    return None


def _sharded(inventory: Inventory, choice: Choice) -> dict[str, Count]:
    """Count FSDP2's collectives: a unit is gathered as one, and its gradients are reduced as one."""
    everything, passes = units(inventory, choice.shards), choice.gradient_accumulation_steps
    trained = [unit for unit in everything if unit.trained]
    counts: dict[str, Count] = {}
    if choice.shards > 1:
        times = passes if choice.reshard_after_forward else 1
        # Blocks are gathered again for the backward pass.
        gathered = [*everything, *everything[1:]] if choice.reshard_after_forward else everything
        counts["all_gather"] = _sum([unit.padded for unit in gathered], inventory.width, times)
        counts["reduce_scatter"] = _sum([unit.trained for unit in trained], _REDUCED, times)
    if choice.replicate_size > 1:
        counts["all_reduce"] = _sum([unit.local_trained for unit in trained], _REDUCED, 1)
    return counts


def _sum(elements: Sequence[int], width: int, times: int) -> Count:
    return Count(times * len(elements), times * width * sum(elements))


def _updates(inventory: Inventory, choice: Choice) -> dict[str, Count]:
    """Count the exchange of matrices and their updates on rank 0 (parallel/matrix_exchange.py), on GPUs.

    An all-to-all has the bytes that the rank receives.
    """
    shapes, shards = inventory.matrices, choice.shards
    width = exchanged_width(on_gpu=True)
    numbers, sizes = Counter[str](), Counter[str]()
    for one in assign(shapes, choice.num_processes, on_gpu=True):
        for begin in range(0, len(one), shards):
            those = [shapes[index] for owned in one[begin : begin + shards] for index in owned]
            size = width * sum(rows_of(rows, shards, 0) * columns for rows, columns in those)
            if shards > 1 and begin == 0 and size:
                taken = width * sum(shapes[index][0] * shapes[index][1] for index in one[0])
                numbers["all_to_all"] += 2
                sizes["all_to_all"] += taken + size
            if shards < choice.num_processes and size:
                numbers["broadcast"] += 1
                sizes["broadcast"] += size
    return {kind: Count(number, sizes[kind]) for kind, number in numbers.items()}


def _buckets(inventory: Inventory, limit: int | None) -> Count:
    """Count the buckets of parallel/replicated/replicated.py."""
    sizes = [_REDUCED * weight.numel for weight in reversed(inventory.trainable)]
    number, remaining = 0, 0
    for needed in sizes:
        if limit is None or needed > remaining:
            number, remaining = number + 1, limit if limit is not None else sum(sizes)
        remaining -= needed
    return Count(number if limit is not None else 1, sum(sizes))
