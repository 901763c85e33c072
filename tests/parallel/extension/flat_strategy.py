"""The code of the strategy `flat`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.parallel.replicated.replicated import GradientAccumulator, Replicated


class FlatGradients(GradientAccumulator):
    """Sums the gradients of a step over the ranks in one all-reduce."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, exchange: bool, **_: Any) -> None:
        super().__init__(parameters, exchange=False)
        assert exchange

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last:
            self._sum()

    def abandon(self) -> None:
        self.clear()
        self._sum()

    def _sum(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None])
        dist.all_reduce(flat)
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


class Flat(Replicated):
    """The whole model on every rank."""

    gradients = FlatGradients
