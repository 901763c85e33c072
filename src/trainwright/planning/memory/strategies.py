"""The interface of a strategy's memory model, and the lookup of each strategy's model. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from trainwright.errors import RequestError
from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.memory.walk import Flow
from trainwright.planning.workload import Choice, OptimizerState
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.strategy_spec import spec_of

FP32 = 4  # bytes of an element of master weights, optimizer state, and gradients that are summed


@dataclass(frozen=True)
class StrategyMemory(ABC):
    """The memory of a strategy on the fullest rank, in bytes; the strategy's spec names the class.

    ``inventory``: the model's parameters. ``on_gpu``: whether the devices are GPUs.
    """

    inventory: Inventory
    choice: Choice
    optimizer: OptimizerState
    on_gpu: bool

    @abstractmethod
    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""

    @abstractmethod
    def flow(self) -> Flow:
        """Return the memory flow of a pass, in addition to ``lasting``.

        It serves micro-batches of every size, and depends on their number only as one, two or more.
        """

    @abstractmethod
    def step(self) -> int:
        """Return the most bytes of gradients, and of tensors made from them, in an optimizer step."""

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory if the rest of ``lasting`` is there."""
        return 0

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of every tensor that stays in pinned memory on the host."""
        yield from ()


@cache
def memory_model(strategy: str) -> type[StrategyMemory]:
    """Return the class that the strategy's spec names.

    Raises:
        RequestError: it cannot be imported, or is not such a class.
    """
    entry_point = spec_of(strategy).memory
    described = f"{STRATEGIES.describe(strategy)}: its memory model {entry_point}"
    model = load(entry_point, described)
    if not (isinstance(model, type) and issubclass(model, StrategyMemory)):
        raise RequestError(f"{described} is no {StrategyMemory.__module__}.{StrategyMemory.__name__}")
    if missing := sorted(model.__abstractmethods__):
        raise RequestError(f"{described} lacks {', '.join(missing)}")
    return model
