"""Every way of running a workload that is worth judging on a machine. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trainwright.errors import RequestError
from trainwright.machine.describe import Cluster
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.workload import Choice, MixedPrecision, Recompute, Workload
from trainwright.recipe.strategy_spec import all_specs, spec_of

# Into how many micro-batches a device's share is divided; the finest are single rows.
_DIVISIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, *(2**n for n in range(7, 40)))
# No device holds more at once, and none is faster for it.
_MOST_TOKENS = 2**24
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", 2, "full")


@dataclass(frozen=True)
class Layout:
    """Where the model's numbers are: a strategy with all that it can be told."""

    strategy: str
    replicate_size: int = 1
    reshard_after_forward: bool = True
    offload_parameters: bool = False
    offload_optimizer: bool = False

    @property
    def offloads(self) -> bool:
        """Return whether anything is offloaded."""
        return self.offload_parameters or self.offload_optimizer

    def describe(self, processes: int) -> str:
        """In a table: `fsdp 4x8` is four replicas, each over eight devices."""
        name = self.strategy
        if self.replicate_size > 1:
            name += f" {self.replicate_size}x{processes // self.replicate_size}"
        if not self.reshard_after_forward:
            name += " kept"
        return name + " offload" * self.offloads


@dataclass(frozen=True)
class Wishes:
    """What the user fixed, by names of Choice; whatever is not in it is free.

    ``allows_world``: whether the rest of what the user wrote, but for what is ``given_up``, goes with a number of
    processes. ``bound``: what other keys ask for too, so that it stays as it is when it is set to ``auto``.
    ``precision``: what has been found to be the fastest, where the user left it open.
    """

    fixed: Mapping[str, Any]
    allows_world: Callable[[int, frozenset[str]], bool] = lambda processes, given_up: True
    bound: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()
    precision: MixedPrecision | None = None

    def allows(self, name: str, value: object) -> bool:
        """Return whether the constraints allow this value."""
        return name not in self.fixed or self.fixed[name] == value

    def options(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """``values``, or the one that was asked for."""
        return (self.fixed[name],) if name in self.fixed else values


_LAYOUT_KEYS = tuple(field.name for field in fields(Layout) if field.name != "strategy")


def worlds(workload: Workload, cluster: Cluster, wishes: Wishes) -> tuple[int, ...]:
    """Numbers of processes worth trying, the largest first; none where the user's number cannot be had.

    On GPUs one for each, as long as each has a row; fewer are worth it only where communication eats the gain. On a
    CPU any number up to its cores.
    """
    if "num_processes" in wishes.fixed:
        return (wishes.fixed["num_processes"],)
    asked = wishes.fixed.get("strategy")
    if asked is not None and spec_of(asked).is_one_process:
        return (1,)
    rows = max(1, math.ceil(workload.global_batch_rows))
    usual = _usual_worlds(rows, cluster)
    most = cluster.devices if cluster.device == "cuda" else cluster.cpu_cores
    largest = next((n for n in range(min(most, usual[0]), 0, -1) if wishes.allows_world(n, wishes.given_up)), None)
    if largest is None:
        return ()
    return tuple(sorted({largest, *(n for n in usual if wishes.allows_world(n, wishes.given_up))}, reverse=True))


def _usual_worlds(rows: int, cluster: Cluster) -> tuple[int, ...]:
    if cluster.device == "cpu":
        most = min(cluster.cpu_cores, rows)
        return tuple(sorted({n for n in (1, 2, 4, 8, 16, 32, 64, most) if n <= most}, reverse=True))
    node = cluster.devices_per_node
    most = node * min(cluster.nodes, rows // node) if rows >= node else rows
    fewer = (node * (most // node // 2), node, 1)
    return tuple(sorted({most, *(n for n in fewer if 0 < n <= most)}, reverse=True))


def layouts(processes: int, cluster: Cluster, wishes: Wishes) -> Iterator[Layout]:
    """Yield the simpler ones first: where two are as fast, the first is taken."""
    asked = wishes.fixed.get("strategy")
    found = [
        layout
        for layout in _all_layouts(processes, cluster, asked)
        if wishes.allows("strategy", layout.strategy)
        and all(wishes.allows(key, getattr(layout, key)) for key in _LAYOUT_KEYS)
    ]
    if not found and asked is not None and wishes.fixed.get("replicate_size", 1) == 1:  # not worth choosing, but meant
        found.append(Layout(asked, **{key: wishes.fixed[key] for key in _LAYOUT_KEYS if key in wishes.fixed}))
    yield from found
    if "replicate_size" in wishes.fixed and wishes.fixed["replicate_size"] > 1:
        yield from _with_replicas(processes, wishes)


def _all_layouts(processes: int, cluster: Cluster, asked: str | None) -> Iterator[Layout]:
    offloading = []
    for name, spec in all_specs().items() if asked is None else ((asked, spec_of(asked)),):
        if processes < spec.least_processes or processes > (spec.most_processes or processes):
            continue
        found = [Layout(name, **values) for values in spec.layouts]
        kept = [layout for layout in found if not layout.offloads]
        offloading += [layout for layout in found if layout.offloads]
        # On one process those of several are worth it only to who asks for them.
        if processes > 1 or spec.is_one_process or asked is not None:
            yield from kept
            for replicas in _replica_counts(processes, cluster) if "replicate_size" in spec.keys else ():
                yield from (replace(layout, replicate_size=replicas) for layout in kept)
    if cluster.device == "cuda":
        yield from offloading


def _replica_counts(processes: int, cluster: Cluster) -> list[int]:
    """Replicas that keep their collectives inside a node, or inside a few nodes."""
    node = cluster.devices_per_node
    if cluster.device == "cpu" or processes <= node or processes % node:
        return []
    nodes = processes // node
    counts = [n for n in range(2, nodes + 1) if nodes % n == 0]
    return counts if len(counts) <= 4 else [counts[0], counts[len(counts) // 2], counts[-2], counts[-1]]


def _with_replicas(processes: int, wishes: Wishes) -> Iterator[Layout]:
    replicas = wishes.fixed["replicate_size"]
    if processes % replicas or processes == replicas:
        return
    for name, spec in all_specs().items():
        if "replicate_size" in spec.keys and wishes.allows("strategy", name):
            for reshard in wishes.options("reshard_after_forward", (False, True)):
                yield Layout(name, replicas, reshard, wishes.fixed.get("offload_parameters", False))


def micro_batches(workload: Workload, processes: int, wishes: Wishes) -> list[tuple[int, int]]:
    """(micro-batch in rows, accumulation) that make the global batch, the largest micro-batch first."""
    total = max(1, math.ceil(workload.global_batch_rows))
    share = math.ceil(total / processes)
    steps = wishes.fixed.get("gradient_accumulation_steps")
    if "micro_batch_size" in wishes.fixed:
        rows = wishes.fixed["micro_batch_size"]
        made = _passes(total, rows, processes)
        return [(rows, made)] if steps is None or steps == made else []
    if steps is not None:
        rows = max(1, math.ceil(share / steps))
        # A pack more or less makes no batch wrong: what has that many passes then is the batch that is there.
        return [(rows, steps)] if workload.packed or _passes(total, rows, processes) == steps else []
    most = max(1, _MOST_TOKENS // workload.row_tokens)
    sizes = sorted({rows for n in _DIVISIONS if (rows := math.ceil(share / n)) <= most} | {1}, reverse=True)
    return [(rows, math.ceil(share / rows)) for rows in sizes]


def _passes(rows: int, micro_batch: int, processes: int) -> int:
    """Micro-batches of the busiest process."""
    return math.ceil(math.ceil(rows / micro_batch) / processes)


def recomputations(workload: Workload, wishes: Wishes) -> tuple[Recompute, ...]:
    """Return what may be computed again in the backward pass, the least first.

    Raises RequestError for every n-th of fewer than n blocks.
    """
    options = wishes.options("activation_checkpointing", _RECOMPUTE)
    asked, layers = wishes.fixed.get("activation_checkpointing"), workload.architecture.layers
    if isinstance(asked, int) and asked > layers:
        raise RequestError(
            f"train.activation_checkpointing: the model has {layers} blocks, so there is no {asked}th one; "
            "lower it, or set it to none"
        )
    return tuple(o for o in options if not isinstance(o, int) or o <= workload.architecture.layers)


def precision_of(cluster: Cluster) -> tuple[MixedPrecision, str]:
    """Return what to compute in where the user left it open and nothing was measured, and why."""
    rates = cluster.card.rates
    if "bf16" in rates or cluster.card.capability >= (8, 0):
        return "bf16", "the hardware multiplies in it"
    if cluster.device == "cuda" and rates.get("fp16", 0.0) > 2 * rates.get("fp32", 1.0):
        return "fp16", "no bf16 units here; fp16 with loss scaling is several times as fast as fp32"
    return "no", "no bf16 units here, so fp32"


def precision_for(wishes: Wishes, cluster: Cluster) -> MixedPrecision:
    """Return the one that was asked for, else that which was found to be the fastest, else that of the hardware."""
    asked: MixedPrecision | None = wishes.fixed.get("mixed_precision")
    return asked or wishes.precision or precision_of(cluster)[0]


def precisions(wishes: Wishes, rates: Rates) -> tuple[MixedPrecision, ...]:
    """Return what to try where the user left it open: on a CPU that was measured both, the simpler one first."""
    if "mixed_precision" in wishes.fixed or rates.cluster.device != "cpu" or not rates.are_measured:
        return (precision_for(wishes, rates.cluster),)
    return ("no", "bf16")


def choice_of(
    layout: Layout,
    processes: int,
    micro: tuple[int, int],
    recompute: Recompute,
    wishes: Wishes,
    cluster: Cluster,
    threads: int | None = None,
) -> Choice:
    """``threads``: of each process on a CPU, all that there are if it is not said."""
    if cluster.device == "cpu" and threads is None:
        threads = max(1, cluster.cpu_cores // processes)
    return Choice(
        strategy=layout.strategy,
        num_processes=processes,
        micro_batch_size=micro[0],
        gradient_accumulation_steps=micro[1],
        mixed_precision=precision_for(wishes, cluster),
        activation_checkpointing=recompute,
        replicate_size=layout.replicate_size,
        reshard_after_forward=layout.reshard_after_forward,
        offload_parameters=layout.offload_parameters,
        offload_optimizer=layout.offload_optimizer,
        activation_offload=wishes.fixed.get("activation_offload", False),
        compile=wishes.fixed.get("compile", False),
        threads=threads,
    )


def layout_of(choice: Choice) -> Layout:
    """Return the layout that a choice has."""
    return Layout(choice.strategy, **{key: getattr(choice, key) for key in _LAYOUT_KEYS})
