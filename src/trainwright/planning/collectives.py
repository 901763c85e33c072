"""The collectives of a step by kind: how many a rank calls, and with how many bytes. Imports no torch.

The schedules are those of planning/step_time/update.py, counted instead of timed; bytes are those of the full tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from trainwright.machine.describe import Cluster
from trainwright.parallel.matrix_owners import assign, rows_of
from trainwright.planning.memory.fsdp import units
from trainwright.planning.memory.inventory import Inventory, inventory
from trainwright.planning.memory.matrices import exchanged_width
from trainwright.planning.memory.micro_batch import computed
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.registries import OPTIMIZERS

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
    for one in assign(shapes, choice.num_processes):
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
    for size in sizes:
        if limit is None or size > remaining:
            number, remaining = number + 1, limit if limit is not None else sum(sizes)
        remaining -= size
    return Count(number if limit is not None else 1, sum(sizes))
