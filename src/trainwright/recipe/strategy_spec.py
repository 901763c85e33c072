"""What is known of a strategy without its code, so that recipes are checked, planned and launched without torch.

A spec stands beside the strategy's code and is registered in ``registries.py``, or by an entry point of the group
``trainwright.strategies`` in another package. Its module imports no torch.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from trainwright.errors import MachineError
from trainwright.registries import STRATEGIES

Part = Literal["parameters", "gradients", "optimizer state"]


@dataclass(frozen=True)
class Collective:
    """What the processes exchange, and when.

    ``when``: "buckets": as soon as a bucket of gradients is there, in the last backward pass of a step; "passes": as
    the blocks run, in every pass over a micro-batch; "micro-batch", "step": after the backward pass of each micro-batch
    or of the last one; "update": after the optimizer's update.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    of: Literal["parameters", "gradients"]
    when: Literal["buckets", "passes", "micro-batch", "step", "update"]


@dataclass(frozen=True)
class Limit:
    """A key of the recipe of which a strategy takes only some values.

    ``why``: for a recipe that asks for another, {value}, with what to do; ``short``: for a table.
    """

    key: str
    allowed: tuple[object, ...]
    why: str
    short: str


@dataclass(frozen=True)
class Library:
    """A library that a strategy needs.

    ``versions``: how a version that works begins. ``users``: the strategies that need it. ``process_bytes``: what it
    adds to the resident memory of a process.
    """

    module: str
    title: str
    versions: tuple[str, ...]
    install: str
    users: str
    process_bytes: int = 0

    @property
    def is_missing(self) -> bool:
        """Return whether the library is not installed."""
        return find_spec(self.module) is None

    def check(self) -> None:
        """Raise MachineError if it is not installed, or in a version that is not known to work."""
        try:
            version = importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            raise MachineError(
                f"parallel.strategy: {self.users} need {self.title}, which is not installed; {self.install}"
            ) from None
        if not f"{version}.".startswith(self.versions):
            raise MachineError(f"parallel.strategy: {self.title} {version} is not known to work here; {self.install}")


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """What is known of a strategy without running it.

    Attributes:
        summary: who holds what, in a few words, for tables.
        implementation: place of the class that does it, ``module:Class``: a ``parallel.strategy.Strategy`` that is made
            from a ``parallel.strategy.Setup``.
        memory: place of the class that models what it holds, a ``planning.memory_strategy.StrategyMemory``.
        shards: what is divided among the processes of a replica; each has all of the rest.
        parameters_by: how parameters are divided: in rows, or flat, in ranges of their elements.
        separate_masters: whether the optimizer's fp32 masters are copies beside the weights that compute; if not, the
            parameters at rest are the masters.
        collectives: what is exchanged, but for a few bytes that processes tell each other after every step.
        hooks_modules: whether parameters are gathered module by module, not a block at a time.
        bucket_bytes: of gradients that are exchanged "buckets"; None: all of them are one bucket.
        reads: keys of the recipe's section ``parallel`` that it reads, but for those of ``offloads``.
        offloads: for keys that move numbers to the host's memory, what they move.
        layouts: values of these keys that a plan tries, in this order; with none it runs where it is asked for only.
        least_processes, most_processes: how many it runs on.
        limits: what of a recipe it does not take.
        library: what has to be installed.
        changes_in_run: whether a run may go on from its checkpoint under another strategy of which that is true too,
            to the same losses.
        accelerate_type: the ``distributed_type`` of Accelerate's files that ask for it, where it is not a plain one.
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
        """All keys of the recipe's section ``parallel`` that it reads."""
        return (*self.reads, *self.offloads)

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters are sharded."""
        return "parameters" in self.shards

    @property
    def gathers_blocks(self) -> bool:
        """Whether parameters are gathered a block at a time."""
        return self.shards_parameters and not self.hooks_modules

    @property
    def is_one_process(self) -> bool:
        """Return whether the strategy runs one process."""
        return self.most_processes == 1

    def offloaded(self, values: object) -> frozenset[str]:
        """Return what is in the host's memory by the keys that ``values`` has set, such as a recipe's section."""
        return frozenset().union(*(moved for key, moved in self.offloads.items() if getattr(values, key)))

    def refuses(self, values: Mapping[str, object]) -> Limit | None:
        """Return the first limit that ``values``, by key of a recipe, go beyond."""
        return next((one for one in self.limits if values.get(one.key, "auto") not in (*one.allowed, "auto")), None)


def spec_of(name: str) -> StrategySpec:
    """Return the spec of a strategy that is named in a recipe. Raises RequestError as ``Registry.get`` does."""
    spec: StrategySpec = STRATEGIES.get(name)
    return spec


def check_library(name: str) -> None:
    """Raise MachineError if a strategy needs a library that is not installed, or not in a version that works."""
    if (library := spec_of(name).library) is not None:
        library.check()


def all_specs() -> dict[str, StrategySpec]:
    """All that are built in or registered, by name. Raises RequestError where one of them cannot be had."""
    return {name: spec_of(name) for name in STRATEGIES.names()}
