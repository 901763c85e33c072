"""What the engine asks of a way to spread a model over devices.

The engine never asks which strategy it has. It calls, for every optimizer step:

    backward(loss, last=...)      once a micro-batch; `last` on the one after which gradients are exchanged
    gradient_norm()               over the whole model and all ranks
    step(learning_rate, scale)    gradients times `scale`, then the optimizer

Losses arrive divided by the weight of the whole global batch, so gradients are *summed* over ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.parallel.layout import Layout
from trainwright.parallel.shards import Shard
from trainwright.parallel.world import World
from trainwright.recipe.schema import ParallelSection

if TYPE_CHECKING:
    from trainwright.models.files.weights import Weights

# From parameters by name to an optimizer over them.
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


@runtime_checkable
class WantsWholes(Protocol):
    """An optimizer whose update of a parameter depends on all of it.

    ``gather``: set by a strategy that gives it rows of parameters only. From a parameter and the part of a tensor of
    its shape that belongs to it, to the whole tensor and the row at which the part begins. Every rank calls it, in one
    order.
    """

    gather: Callable[[nn.Parameter, torch.Tensor], tuple[torch.Tensor, int]] | None


@dataclass(frozen=True)
class Setup:
    """What a strategy is made from.

    Attributes:
        parallel: the recipe's section; ``strategy`` is the name of the one that is made.
        module: the model in fp32, on the CPU, its trainable parameters marked; where there are ``weights``, on the meta
            device but for its buffers.
        dtype: what the forward and backward passes compute in. Masters, reduction and accumulation are fp32.
        blocks: the repeated units of the model.
        weights: what fills the parameters that are on the meta device.
    """

    parallel: ParallelSection
    world: World
    module: nn.Module
    make_optimizer: OptimizerFactory
    dtype: torch.dtype
    blocks: Sequence[nn.Module] = ()
    weights: Weights | None = None


class Strategy(Protocol):
    """A model spread over the ranks of a world, with its optimizer."""

    name: str
    world: World
    module: nn.Module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; after the ``last`` micro-batch of a step, exchange them."""

    def gradient_norm(self) -> float:
        """L2 norm over all parameters of the exchanged gradients; the same number on every rank."""

    def step(self, learning_rate: float, scale: float) -> None:
        """Multiply the gradients by ``scale``, update the weights, and forget the gradients."""

    def discard_gradients(self) -> None:
        """Forget the gradients without touching the weights."""

    def state(self) -> dict[str, Shard]:
        """Return this rank's part of everything that training changes: parameters, buffers, optimizer state."""

    def load_state(self, read: Callable[[str, Shard], torch.Tensor]) -> None:
        """Fill the state from ``read(name, shard)``, which gives the named part in the shard's shape and dtype."""

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Full parameters and buffers in master precision, one after another. Every rank must iterate.

        Args:
            frozen: those that are not trained too, in the dtype they are computed in. In bf16 they are not what was
                loaded to the last digit: kept beside for nobody they would take a model's memory, so whoever writes
                them reads them from where they came.
        """

    def layout(self) -> Layout:
        """How this rank holds the model, read from the live objects. No collective: ranks may disagree on what runs."""

    def whole(self, room: int | None = None) -> AbstractContextManager[tuple[nn.Module, str | None]]:
        """Return the module with all its parameters at hand on every rank, for generation; every rank enters.

        Where they do not fit in ``room`` bytes (None: most of what is free) they are gathered in every forward pass
        instead: then the ranks have to run the module equally often, and the second value says why.
        """


@runtime_checkable
class Independent(Strategy, Protocol):
    """A strategy whose ranks run their passes alone and meet in an exchange at the end of a step.

    So where a pass fails on one rank, the others need not wait for it for ever, and the step can be done again.
    """

    def abandon_step(self) -> None:
        """On the rank whose passes failed: let the others finish the step, with gradients to be discarded."""
