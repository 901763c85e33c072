"""What an optimizer has to know if every rank has some rows of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True)
class RowShards:
    """How the rows of parameters are divided over ranks.

    Attributes:
        ranks: that share each parameter.
        shape: returns the shape of a whole parameter.
        sum: adds the tensors of these ranks, in place.
    """

    ranks: int
    shape: Callable[[nn.Parameter], tuple[int, ...]]
    sum: Callable[[torch.Tensor], None]

    def rows(self, shape: tuple[int, ...]) -> int:
        """Return the rows of every rank but the last ones, which have fewer or none."""
        return -(-shape[0] // self.ranks) if shape else 1


@runtime_checkable
class DividedByRows(Protocol):
    """An optimizer whose update of an element depends on others, or whose state has other shapes than its parameters.

    A strategy that shards parameters by rows calls ``divide`` before the first step.
    """

    def divide(self, shards: RowShards) -> None:
        """Set, or refuse with a RequestError, how the rows of parameters are divided."""

    def state_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the state ``slot`` of a whole parameter of this shape, whose first dimension is divided
        as the parameter's rows are; None: every rank has all of it.
        """
