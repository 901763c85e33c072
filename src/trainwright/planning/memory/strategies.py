"""The interface of a strategy's memory model, and the lookup of each strategy's model. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from trainwright.errors import RequestError
from trainwright.extensions import load
from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.memory.walk import Flow
from trainwright.planning.operations import PassSettings
from trainwright.planning.workload import Choice, OptimizerName
from trainwright.recipe.strategy_spec import spec_of
from trainwright.registries import STRATEGIES


@dataclass(frozen=True)
class StrategyMemory(ABC):
    """The memory of a strategy on the fullest rank, in bytes; the strategy's spec names the class.

    ``held``: the model's parameters. ``setting``: the settings of its passes.
    """

    held: Inventory
    setting: PassSettings
    choice: Choice
    optimizer: OptimizerName

    @abstractmethod
    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""

    @abstractmethod
    def flow(self) -> Flow:
        """Return the memory flow of a pass, in addition to ``lasting``."""

    @abstractmethod
    def step(self) -> int:
        """Return the most bytes of gradients, and of tensors made from them, in an optimizer step."""

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory if the rest of ``lasting`` is there."""
        return 0

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of every tensor that stays in pinned memory on the host."""
        yield from ()

    @property
    def width(self) -> int:
        """Bytes per element in computation."""
        return self.setting.width

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return not self.setting.device.is_gpu


@cache
def memory_model(strategy: str) -> type[StrategyMemory]:
    """Return the class that the strategy's spec names.

    Raises:
        RequestError: it cannot be imported, or is not such a class.
    """
    place = spec_of(strategy).memory
    described = f"{STRATEGIES.describe(strategy)}: its memory model {place}"
    found = load(place, described)
    if not (isinstance(found, type) and issubclass(found, StrategyMemory)):
        raise RequestError(f"{described} is no {StrategyMemory.__module__}.{StrategyMemory.__name__}")
    if missing := sorted(found.__abstractmethods__):
        raise RequestError(f"{described} lacks {', '.join(missing)}")
    return found
