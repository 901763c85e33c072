"""The parameters of a model one by one, as strategies spread them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainwright.planning.architecture import Architecture
from trainwright.planning.operations import block_kinds, block_weights, end_weights

OUTSIDE = -1  # the unit of what is in no block


class Weight(NamedTuple):
    """A parameter [rows, columns] of a unit: a block by its number, or OUTSIDE."""

    unit: int
    name: str
    rows: int
    columns: int
    trainable: bool

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, eq=False)
class Inventory:
    """``weights``: in the order in which the model has them."""

    weights: tuple[Weight, ...]

    @cached_property
    def numel(self) -> int:
        return sum(w.numel for w in self.weights)

    @cached_property
    def trained(self) -> int:
        """How many numbers of it are trained."""
        return sum(w.numel for w in self.weights if w.trainable)

    @cached_property
    def trained_count(self) -> int:
        return sum(w.trainable for w in self.weights)

    @cached_property
    def largest_trained(self) -> int:
        return max((w.numel for w in self.weights if w.trainable), default=0)


@lru_cache(maxsize=32)
def inventory(a: Architecture, width: int, trainable: bool) -> Inventory:
    """Of a model whose weights compute in numbers of ``width`` bytes."""
    ends = [
        Weight(OUTSIDE, name, p.n, p.k, p.trainable) for name, p in end_weights(a, width, trainable).parameters.items()
    ]
    first = [w for w in ends if w.name in ("embedding", "positions")]
    last = [w for w in ends if w not in first]
    blocks = [
        Weight(unit, name, p.n, p.k, p.trainable)
        for unit, kind in enumerate(block_kinds(a))
        for name, p in block_weights(a, kind, width, trainable).parameters.items()
    ]
    return Inventory((*first, *blocks, *last))
