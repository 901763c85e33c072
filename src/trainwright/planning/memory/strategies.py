"""What a strategy's model of its memory has to say, and the model of each strategy. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainwright.errors import RequestError
from trainwright.extensions import load
from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.memory.walk import Flow
from trainwright.planning.operations import Setting
from trainwright.planning.workload import Choice, OptimizerName
from trainwright.recipe.strategy_spec import spec_of
from trainwright.registries import STRATEGIES


@dataclass(frozen=True)
class StrategyMemory(ABC):
    """What a strategy holds on the fullest rank, in bytes; the spec of the strategy names the class.

    ``held``: the model's parameters. ``setting``: how they compute.
    """

    held: Inventory
    setting: Setting
    choice: Choice
    optimizer: OptimizerName

    @abstractmethod
    def lasting(self) -> Mapping[str, int]:
        """Return what is held between steps, by what it is."""

    @abstractmethod
    def flow(self) -> Flow:
        """Return what is held beside that in the course of a pass, from its beginning."""

    @abstractmethod
    def step(self) -> int:
        """Most bytes of gradients, and of what is made of them, in an optimizer step."""

    def gradients_on_host(self) -> int:
        """Bytes of gradients that come to lie in the host's memory when the rest of ``lasting`` is there."""
        return 0

    @property
    def width(self) -> int:
        """Bytes of a number that computes."""
        return self.setting.width

    @property
    def on_cpu(self) -> bool:
        """Return whether the devices are CPUs."""
        return not self.setting.device.is_gpu


@cache
def memory_model(strategy: str) -> type[StrategyMemory]:
    """Return the class that the strategy's spec names.

    Raises:
        RequestError: it cannot be imported, or is none.
    """
    place = spec_of(strategy).memory
    described = f"{STRATEGIES.describe(strategy)}: its memory model {place}"
    found = load(place, described)
    if not (isinstance(found, type) and issubclass(found, StrategyMemory)):
        raise RequestError(f"{described} is no {StrategyMemory.__module__}.{StrategyMemory.__name__}")
    if missing := sorted(found.__abstractmethods__):
        raise RequestError(f"{described} lacks {', '.join(missing)}")
    return found
