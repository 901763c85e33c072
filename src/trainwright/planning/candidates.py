"""Enumerate the candidates for a workload on a machine. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trainwright.errors import RequestError
from trainwright.machine.describe import Cluster
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.workload import Choice, MixedPrecision, Recompute, Workload
from trainwright.recipe.strategy_spec import load_strategies, look_up_strategy

# Numbers of micro-batches that a device's share is divided into, down to single rows.
_DIVISIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, *(2**n for n in range(7, 40)))
# Upper limit of tokens in a micro-batch: no device holds more, and more would be no faster.
_MOST_TOKENS = 2**24
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", 2, "full")


@dataclass(frozen=True)
class ParallelLayout:
    """How the model is distributed: a strategy and its options."""

    strategy: str
    replicate_size: int = 1
    reshard_after_forward: bool = True
    offload_parameters: bool = False
    offload_optimizer: bool = False

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.offload_parameters or self.offload_optimizer

    def describe(self, processes: int) -> str:
        """Return the name shown in tables: `fsdp 4x8` is four replicas, each over eight devices, and `fsdp whole` keeps
        the gathered weights between forward and backward.
        """
        name = self.strategy
        if self.replicate_size > 1:
            name += f" {self.replicate_size}x{processes // self.replicate_size}"
        if not self.reshard_after_forward:
            name += " whole"
        return name + " offload" * self.offloads

    def in_words(self, processes: int) -> str:
        """Return the name shown in sentences, with the recipe's keys."""
        settings = []
        if not self.reshard_after_forward:
            settings.append("parallel.reshard_after_forward=false")
        if self.offload_parameters:
            settings.append("parallel.offload_parameters=true")
        if self.offload_optimizer:
            settings.append("parallel.offload_optimizer=true")
        replicas = f" {self.replicate_size}x{processes // self.replicate_size}" * (self.replicate_size > 1)
        return f"{self.strategy}{replicas}{' with ' * bool(settings)}{' and '.join(settings)}"


@dataclass(frozen=True)
class Constraints:
    """Constraints: values that the recipe fixes, by field of Choice; all others are free.

    ``why_not``: why the rest of the recipe, without the keys in ``given_up``, is not valid with a number of processes,
    or an empty text. ``worlds``: the only numbers of processes to try, where some are required. ``bound``: keys that
    other keys imply, so that setting them to ``auto`` changes nothing. ``precision``: the fastest precision found, if
    the recipe leaves it open.
    """

    fixed: Mapping[str, Any]
    bound: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()
    precision: MixedPrecision | None = None
    why_not: Callable[[int, frozenset[str]], str] = lambda processes, given_up: ""
    worlds: tuple[int, ...] = ()

    def allows(self, name: str, value: object) -> bool:
        """Return whether the constraints allow this value."""
        return name not in self.fixed or self.fixed[name] == value

    def options(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``values``, or only the one that the recipe fixes."""
        return (self.fixed[name],) if name in self.fixed else values


LAYOUT_KEYS = tuple(field.name for field in fields(ParallelLayout) if field.name != "strategy")


def list_worlds(workload: Workload, cluster: Cluster, constraints: Constraints) -> tuple[int, ...]:
    """Return the numbers of processes to try; empty if none is valid.

    On GPUs one per device, as long as each has a row; fewer are worthwhile only where communication costs more than it
    gains. Last come all devices of a node, and of all nodes, where some have no row: they can still hold shards. On a
    CPU any number up to its cores.
    """
    if "num_processes" in constraints.fixed:
        return (constraints.fixed["num_processes"],)
    if constraints.worlds:
        return constraints.worlds
    strategy = constraints.fixed.get("strategy")
    if strategy is not None and look_up_strategy(strategy).is_one_process:
        return (1,)
    rows = max(1, math.ceil(workload.global_batch_rows))
    usual = _list_usual_worlds(rows, cluster)
    limit = cluster.devices if cluster.has_gpus else cluster.cpu_cores
    possible = (n for n in range(min(limit, usual[0]), 0, -1) if not constraints.why_not(n, constraints.given_up))
    largest = next(possible, None)
    node = cluster.devices_per_node
    idle = {n for n in (node, cluster.devices) if n > usual[0]} if cluster.has_gpus else set()
    counts = [*sorted({*usual, *([] if largest is None else [largest])}, reverse=True), *sorted(idle)]
    return tuple(n for n in counts if not constraints.why_not(n, constraints.given_up))


def _list_usual_worlds(rows: int, cluster: Cluster) -> tuple[int, ...]:
    if cluster.device == "cpu":
        limit = min(cluster.cpu_cores, rows)
        return tuple(sorted({n for n in (1, 2, 4, 8, 16, 32, 64, limit) if n <= limit}, reverse=True))
    node = cluster.devices_per_node
    limit = node * min(cluster.nodes, rows // node) if rows >= node else rows
    fewer = (node * (limit // node // 2), node, 1)
    return tuple(sorted({limit, *(n for n in fewer if 0 < n <= limit)}, reverse=True))


def iterate_layouts(
    processes: int, cluster: Cluster, constraints: Constraints, rows: float = math.inf
) -> Iterator[ParallelLayout]:
    """Yield the layouts to try, the simpler ones first, which are preferred where two are equally fast.

    ``rows``: of a step. Processes beyond their number are of use only to strategies that shard something.
    """
    strategy = constraints.fixed.get("strategy")
    candidates = [
        layout
        for layout in _iterate_all_layouts(processes, cluster, strategy)
        if constraints.allows("strategy", layout.strategy)
        and (processes <= rows or look_up_strategy(layout.strategy).shards)
        and all(constraints.allows(key, getattr(layout, key)) for key in LAYOUT_KEYS)
    ]
    is_unreplicated = constraints.fixed.get("replicate_size", 1) == 1
    if not candidates and strategy is not None and processes <= rows and is_unreplicated:  # requested explicitly
        fixed_values = {key: constraints.fixed[key] for key in LAYOUT_KEYS if key in constraints.fixed}
        candidates.append(ParallelLayout(strategy, **fixed_values))
    yield from candidates
    if "replicate_size" in constraints.fixed and constraints.fixed["replicate_size"] > 1:
        yield from _iterate_replica_layouts(processes, constraints)


def _iterate_all_layouts(processes: int, cluster: Cluster, strategy: str | None) -> Iterator[ParallelLayout]:
    offloading = []
    for name, spec in load_strategies().items() if strategy is None else ((strategy, look_up_strategy(strategy)),):
        if processes < spec.least_processes or processes > (spec.most_processes or processes):
            continue
        all_of_strategy = [ParallelLayout(name, **values) for values in spec.layouts]
        on_device = [layout for layout in all_of_strategy if not layout.offloads]
        offloading += [layout for layout in all_of_strategy if layout.offloads]
        # On one process the strategies for several are tried only if requested.
        if processes > 1 or spec.is_one_process or strategy is not None:
            yield from on_device
            for replicas in _list_replica_counts(processes, cluster) if "replicate_size" in spec.keys else ():
                yield from (replace(layout, replicate_size=replicas) for layout in on_device)
    if cluster.has_gpus:
        yield from offloading


def _list_replica_counts(processes: int, cluster: Cluster) -> list[int]:
    """Return the numbers of replicas that keep collectives within one node or a few nodes."""
    node = cluster.devices_per_node
    if cluster.device == "cpu" or processes <= node or processes % node:
        return []
    nodes = processes // node
    counts = [n for n in range(2, nodes + 1) if nodes % n == 0]
    return counts if len(counts) <= 4 else [counts[0], counts[len(counts) // 2], counts[-2], counts[-1]]


def _iterate_replica_layouts(processes: int, constraints: Constraints) -> Iterator[ParallelLayout]:
    replicas = constraints.fixed["replicate_size"]
    if processes % replicas or processes == replicas:
        return
    for name, spec in load_strategies().items():
        if "replicate_size" in spec.keys and constraints.allows("strategy", name):
            for reshard in constraints.options("reshard_after_forward", (False, True)):
                yield ParallelLayout(name, replicas, reshard, constraints.fixed.get("offload_parameters", False))


def list_micro_batches(workload: Workload, processes: int, constraints: Constraints) -> list[tuple[int, int]]:
    """Return pairs of rows per micro-batch and accumulation steps that make the global batch, the largest first."""
    total = max(1, math.ceil(workload.global_batch_rows))
    share = math.ceil(total / processes)
    steps = constraints.fixed.get("gradient_accumulation_steps")
    if "micro_batch_size" in constraints.fixed:
        rows = constraints.fixed["micro_batch_size"]
        passes = _count_passes(total, rows, processes)
        return [(rows, passes)] if steps is None or steps == passes else []
    if steps is not None:
        rows = max(1, math.ceil(share / steps))
        # A pack more or less does not change the result: the batch is what this number of passes holds.
        return [(rows, steps)] if workload.packed or _count_passes(total, rows, processes) == steps else []
    limit = max(1, _MOST_TOKENS // workload.row_tokens)
    sizes = sorted({rows for n in _DIVISIONS if (rows := math.ceil(share / n)) <= limit} | {1}, reverse=True)
    return [(rows, math.ceil(share / rows)) for rows in sizes]


def _count_passes(rows: int, micro_batch: int, processes: int) -> int:
    """Return the number of micro-batches of the busiest process."""
    return math.ceil(math.ceil(rows / micro_batch) / processes)


def list_recomputations(workload: Workload, constraints: Constraints) -> tuple[Recompute, ...]:
    """Return the recomputation options, the least recomputation first.

    Raises:
        RequestError: every n-th block is requested of fewer than n blocks.
    """
    options = constraints.options("activation_checkpointing", _RECOMPUTE)
    checkpointing, layers = constraints.fixed.get("activation_checkpointing"), workload.facts.layers
    if isinstance(checkpointing, int) and checkpointing > layers:
        raise RequestError(
            f"train.activation_checkpointing: the model has {layers} blocks, so there is no {checkpointing}th one; "
            "lower it, or set it to none"
        )
    return tuple(o for o in options if not isinstance(o, int) or o <= workload.facts.layers)


def choose_hardware_precision(cluster: Cluster) -> tuple[MixedPrecision, str]:
    """Return the precision for this hardware if the recipe leaves it open and nothing was measured, and the reason."""
    rates = cluster.card.rates
    if "bf16" in rates or cluster.card.capability >= (8, 0):
        return "bf16", "supported by the hardware"
    if cluster.has_gpus and rates.get("fp16", 0.0) > 2 * rates.get("fp32", 1.0):
        return "fp16", "no hardware support for bf16; fp16 with loss scaling is several times as fast as fp32"
    return "no", "no hardware support for bf16, so fp32"


def choose_precision(constraints: Constraints, cluster: Cluster) -> MixedPrecision:
    """Return the precision of the recipe, or else the fastest one found, or else that of the hardware."""
    fixed_precision: MixedPrecision | None = constraints.fixed.get("mixed_precision")
    return fixed_precision or constraints.precision or choose_hardware_precision(cluster)[0]


def list_precisions(constraints: Constraints, rates: Rates) -> tuple[MixedPrecision, ...]:
    """Return the precisions to try; on a CPU with measured rates both, the simpler one first."""
    if "mixed_precision" in constraints.fixed or rates.cluster.device != "cpu" or not rates.are_measured:
        return (choose_precision(constraints, rates.cluster),)
    return ("no", "bf16")


def build_choice(
    layout: ParallelLayout,
    processes: int,
    micro: tuple[int, int],
    recompute: Recompute,
    constraints: Constraints,
    cluster: Cluster,
    threads: int | None = None,
) -> Choice:
    """Return the choice of these values; ``threads``: threads per process on a CPU, by default all available."""
    if cluster.device == "cpu" and threads is None:
        threads = max(1, cluster.cpu_cores // processes)
    return Choice(
        **vars(layout),
        num_processes=processes,
        micro_batch_size=micro[0],
        gradient_accumulation_steps=micro[1],
        mixed_precision=choose_precision(constraints, cluster),
        activation_checkpointing=recompute,
        activation_offload=constraints.fixed.get("activation_offload", False),
        compile=constraints.fixed.get("compile", False),
        threads=threads,
    )


def build_layout(choice: Choice) -> ParallelLayout:
    """Return the layout of a choice."""
    return ParallelLayout(choice.strategy, **{key: getattr(choice, key) for key in LAYOUT_KEYS})
