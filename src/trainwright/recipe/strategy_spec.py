"""The description of a strategy without its code, to check, plan and launch recipes without torch.

A spec is in a module next to the strategy's code and registered in ``recipe/registries.py``, or by an entry point of
the group ``trainwright.strategies`` in another package. The module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.recipe.optimizer_spec import Library as Library
from trainwright.recipe.registries import STRATEGIES

Part = Literal["parameters", "gradients", "optimizer state"]


@dataclass(frozen=True)
class Collective:
    """What the processes exchange, and when.

    ``when``: "buckets": when a bucket of gradients is complete, in the last backward pass of a step; "passes": as the
    blocks run, in every pass over a micro-batch; "micro-batch", "step": after the backward pass of each micro-batch or
    of the last one; "update": after the optimizer's update.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    of: Literal["parameters", "gradients"]
    when: Literal["buckets", "passes", "micro-batch", "step", "update"]


@dataclass(frozen=True)
class Limit:
    """A recipe key of which a strategy supports only some values.

    ``why``: the message for another value, {value}, with the fix; ``short``: for a table. ``refused``: the only values
    that it does not support, in place of ``allowed``.
    """

    key: str
    allowed: tuple[object, ...]
    why: str
    short: str
    refused: tuple[object, ...] = ()

    def takes(self, value: object) -> bool:
        """Return whether a value is supported, or not decided yet."""
        return value == "auto" or (value not in self.refused if self.refused else value in self.allowed)


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """The description of a strategy without its code.

    Attributes:
        summary: what each process holds, in a few words, for tables.
        implementation: the class that implements it, as ``module:Class``: a ``parallel.strategy.Strategy``, constructed
            from a ``parallel.strategy.StrategyConfig``.
        memory: the class that models its memory, a ``planning.memory.strategies.StrategyMemory``.
        shards: what is sharded over the processes of a replica; the rest is replicated.
        parameters_by: how parameters are sharded: in rows, or flat, in ranges of their elements.
        separate_masters: whether the optimizer's fp32 master weights are separate from the weights that compute; if
            not, the parameters at rest are the master weights.
        collectives: what is exchanged, except for a few bytes after every step.
        hooks_modules: whether parameters are gathered by module instead of by block.
        bucket_bytes: of gradients exchanged in "buckets"; None: all of them are one bucket.
        reads: keys of the recipe's section ``parallel`` that it reads, except those of ``offloads``.
        offloads: for each key that offloads something to the host's memory, what it offloads.
        layouts: values of these keys that a plan tries, in this order; without any it runs only if asked for.
        least_processes, most_processes: the supported numbers of processes.
        limits: unsupported values of the recipe.
        library: a library that has to be installed.
        changes_in_run: whether a run may continue from its checkpoint under another such strategy, with the same
            losses.
        accelerate_type: the ``distributed_type`` in Accelerate's files, if not the default one.
    """

    summary: str
    implementation: str
    memory: str
    shards: frozenset[Part] = frozenset()
    parameters_by: Literal["rows", "flat"] = "rows"
    separate_masters: bool = True
    collectives: tuple[Collective, ...] = ()
    hooks_modules: bool = False
    bucket_bytes: int | None = None
    reads: tuple[str, ...] = ()
    offloads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    layouts: tuple[Mapping[str, Any], ...] = ({},)
    least_processes: int = 1
    most_processes: int | None = None
    limits: tuple[Limit, ...] = ()
    library: Library | None = None
    changes_in_run: bool = True
    accelerate_type: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all keys of the recipe's section ``parallel`` that it reads."""
        return (*self.reads, *self.offloads)

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters are sharded."""
        return "parameters" in self.shards

    @property
    def gathers_blocks(self) -> bool:
        """Return whether parameters are gathered by block."""
        return self.shards_parameters and not self.hooks_modules

    @property
    def is_one_process(self) -> bool:
        """Return whether the strategy runs one process."""
        return self.most_processes == 1

    def offloaded(self, values: object) -> frozenset[str]:
        """Return what ``values``, such as a recipe's section, offload to the host's memory."""
        return frozenset().union(*(parts for key, parts in self.offloads.items() if getattr(values, key)))

    def refuses(self, values: Mapping[str, object]) -> Limit | None:
        """Return the first limit that ``values``, by recipe key, violate."""
        return next((limit for limit in self.limits if not limit.takes(values.get(limit.key, "auto"))), None)


def look_up_strategy(name: str) -> StrategySpec:
    """Return the spec of a strategy by its name in a recipe. Raises RequestError like ``Registry.get``."""
    return STRATEGIES.get(name)


def check_library(name: str) -> None:
    """Raise MachineError if a library that a strategy needs is not installed, or in a version that does not work."""
    if (library := look_up_strategy(name).library) is not None:
        library.check()


def load_strategies() -> dict[str, StrategySpec]:
    """Return all built-in or registered strategies, by name. Raises RequestError if one cannot be loaded."""
    return {name: look_up_strategy(name) for name in STRATEGIES.names()}
