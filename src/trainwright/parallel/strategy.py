"""The interface between the engine and strategies, which distribute a model over devices.

The engine does not depend on which strategy it has. For every optimizer step it calls:

    backward(loss, last=...)      once per micro-batch; `last` on the one after which gradients are exchanged
    gradient_norm()               over the full model and all ranks
    step(learning_rate, scale)    gradients times `scale`, then the optimizer

Losses are already divided by the weight of the global batch, so gradients are *summed* over ranks, never averaged.

Norms of large gradients, in full fp32 precision.

A CPU's norm kernel sums a tensor in fp32 one element after another: the error is 2e-3 at 28M elements, and depends on
how the tensor is sharded. The sum kernel is cascaded: the error is 1e-8, at the same speed. GPUs have a norm kernel for
many tensors at once, which sums pieces of fixed size too.

Either way a tensor's sum depends on its own elements only, in an order that is the same on any number of processes, and
the sums of tensors are added in fp64. Tensors that every process holds in full thus have the same norm, bit for bit, on
all of them; of sharded tensors the fp32 sums of pieces differ in their last digit with the number of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.errors import RequestError
from trainwright.parallel.constants import CACHED_ELEMENTS
from trainwright.parallel.layout import ModelLayout, Shard
from trainwright.parallel.matrix_exchange import MatrixExchange
from trainwright.parallel.world import World
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import OPTIMIZERS, STRATEGIES
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.recipe.strategy_spec import look_up_strategy

if TYPE_CHECKING:
    from trainwright.models.weights import Weights
    from trainwright.parallel.bf16_weights import Bf16Weights


# Creates an optimizer from parameters by name.
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


@runtime_checkable
class NeedsFullMatrices(Protocol):
    """An optimizer whose update of a matrix depends on all of its elements, and takes much computation.

    ``exchange``: set by strategies of several ranks.
    """

    exchange: MatrixExchange | None


@dataclass(frozen=True)
class StrategyConfig:
    """The arguments of a strategy.

    Attributes:
        parallel: the recipe's section; ``strategy`` is the name of this strategy.
        module: the model in fp32 on the CPU, with its trainable parameters marked; with ``weights``, on the meta device
            except for its buffers.
        dtype: dtype of the forward and backward passes. Masters, reduction and accumulation are fp32.
        rounding_seed: trained weights are kept in bf16 alone, and rounded with this seed (`Bf16Weights`), which the
            strategy has as ``bf16_weights``; None: they have masters.
        blocks: the repeated units of the model.
        weights: fills the parameters that are on the meta device.
    """

    parallel: ParallelSection
    world: World
    module: nn.Module
    make_optimizer: OptimizerFactory
    dtype: torch.dtype
    blocks: Sequence[nn.Module] = ()
    weights: Weights | None = None
    rounding_seed: int | None = None


class Strategy(Protocol):
    """A model distributed over the ranks of a world, with its optimizer.

    ``bf16_weights``: the weights, if they are kept in bf16 alone; may be left out by strategies that have masters.
    """

    name: str
    world: World
    module: nn.Module
    bf16_weights: Bf16Weights | None

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of ``loss``; after the ``last`` micro-batch of a step, exchange them."""

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm over all parameters of the exchanged gradients, the same on every rank.

        In float64, as a scalar on the device of the run: reading it makes the host wait, so the engine does it with all
        other numbers of the step.
        """

    def step(self, learning_rate: float, scale: float) -> None:
        """Set the rate of every group, multiply the gradients by ``scale``, update the weights, drop the gradients."""

    def discard_gradients(self) -> None:
        """Drop the gradients without changing the weights."""

    def state(self) -> dict[str, Shard]:
        """Return this rank's part of everything that training changes: parameters, buffers, optimizer state."""

    def load_state(self, read: Callable[[str, Shard], torch.Tensor], *, optimizer: bool = True) -> None:
        """Fill the state from ``read(name, shard)``, which returns the named part in the shard's shape and dtype.

        Args:
            optimizer: also fill the optimizer's state; otherwise it is that of a new run.
        """

    def parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full parameters and buffers in master precision, one by one. Every rank must iterate.

        Args:
            frozen: also yield untrained parameters, in the dtype they compute in. In bf16 they are less precise than
                the loaded weights, of which no copy is kept to save memory; read them from their source to write them.
        """

    def layout(self) -> ModelLayout:
        """Return how this rank holds the model, from live objects. Uses no collective: ranks may disagree."""

    def full_parameters(
        self, available_memory: int | None = None
    ) -> AbstractContextManager[tuple[nn.Module, str | None]]:
        """Provide the module with full parameters on every rank, for generation; every rank must enter.

        If they do not fit in ``available_memory`` bytes (None: most of the free memory) they are gathered in every
        forward pass instead: then all ranks must run the module equally often, and the second value gives the reason.
        """


@runtime_checkable
class Independent(Strategy, Protocol):
    """A strategy whose ranks run their passes independently and exchange gradients at the end of a step.

    If a pass fails on one rank, the others do not wait for it forever, and the step can be repeated.
    """

    def abandon_step(self) -> None:
        """Let the other ranks finish the step with gradients to be discarded; called where the passes failed."""


@runtime_checkable
class Averaging(Strategy, Protocol):
    """A strategy that can run the average of its weights, if its optimizer has one."""

    def exchange_averages(self) -> None:
        """Exchange weights and averages; every rank must call this, and once more before training goes on."""


def check_averages(strategy: Strategy, optimizer: OptimizerSection) -> None:
    """Raise RequestError if the optimizer has averages, and the strategy cannot run them."""
    has_averages = optimizer.ema_decay is not None or OPTIMIZERS.get(optimizer.name).averages
    if has_averages and not isinstance(strategy, Averaging):
        key = "optimizer.name" if optimizer.ema_decay is None else "optimizer.ema_decay"
        raise RequestError(
            f"{key}: {strategy.name} cannot exchange weights and their averages, as it has no exchange_averages; use "
            "another parallel.strategy"
        )


@contextmanager
def swap_in_averages(strategy: Strategy) -> Iterator[None]:
    """Provide the averages in place of the weights, if there are any; every rank must enter."""
    if not isinstance(strategy, Averaging):
        yield
        return
    strategy.exchange_averages()
    try:
        yield
    finally:
        strategy.exchange_averages()


_METHODS = tuple(name for name, member in vars(Strategy).items() if callable(member) and not name.startswith("_"))


def build_strategy(setup: StrategyConfig) -> Strategy:
    """Distribute the model over the ranks.

    Raises:
        RequestError: keys of the recipe's section do not fit the model or the world size, or a strategy of another
            package cannot be imported or lacks a method.
        MachineError: the strategy needs a library that is not installed.
    """
    on_meta = any(parameter.is_meta for parameter in setup.module.parameters())
    assert setup.weights is not None or not on_meta, "nothing would fill the weights"
    name = setup.parallel.strategy
    entry_point, description = look_up_strategy(name).implementation, STRATEGIES.describe(name)
    implementation = load(entry_point, f"{description}: its implementation {entry_point}")
    if missing := [method for method in _METHODS if not hasattr(implementation, method)]:
        raise RequestError(f"{description}: its implementation {entry_point} lacks {', '.join(missing)}")
    strategy: Strategy = implementation(setup)
    strategy.bf16_weights = getattr(strategy, "bf16_weights", None)
    if setup.rounding_seed is not None and strategy.bf16_weights is None:
        raise RequestError(f"optimizer.master_weights: {description} keeps fp32 master weights; set it to true")
    return strategy


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rate of every group: its part of ``learning_rate`` (engine/optimizer.py)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("rate", 1.0)


# Elements that are exchanged at a time.
_EXCHANGED = 2**22


@torch.no_grad()
def exchange_averages(optimizer: Optimizer) -> None:
    """Exchange every parameter with its average, if the optimizer has one."""
    for parameter, state in optimizer.state.items():
        if (average := state.get("average")) is not None:
            for parameter_piece, average_piece in zip(
                _split_into_pieces(parameter), _split_into_pieces(average), strict=True
            ):
                parameter_copy = parameter_piece.clone()
                parameter_piece.copy_(average_piece)
                average_piece.copy_(parameter_copy)


def _split_into_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().view(-1).split(_EXCHANGED)


def prepare_optimizer_state(optimizer: Optimizer, step: Callable[[float, float], None], *, filled: bool) -> None:
    """Make the state of every parameter to be ``filled``, if there is none yet: a strategy's ``step`` without gradients
    at a learning rate of 0. Otherwise remove it: the first step makes it, from the weights as they are then.
    """
    if not filled:
        optimizer.state.clear()
    elif not any(optimizer.state.values()):
        step(0.0, 1.0)


def add_gradient(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add a gradient in low precision to its sum in fp32."""
    if grad.is_cuda or grad.is_xpu:
        total.add_(grad)
        return
    # In pieces that fit a cache, as a CPU converts the second summand to a copy in fp32 first.
    contiguous = total.is_contiguous() and grad.is_contiguous()
    parts = [tensor.view(-1).split(CACHED_ELEMENTS) if contiguous else (tensor,) for tensor in (total, grad)]
    for part, summand in zip(*parts, strict=True):
        part.add_(summand)


def compute_squared_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors of any floating dtypes on one device, as an fp64 scalar on that device."""
    on_host: list[torch.Tensor] = []
    on_device: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        part = tensor.detach()
        if part.device.type == "cpu":
            on_host.append(part.reshape(-1))
        elif part.numel():
            on_device.setdefault(part.dtype, []).append(part)
    if not on_device:
        return _sum_squares_on_cpu(on_host)
    # The kernel takes one dtype at a time, and is slow for several.
    norms = [norm for alike in on_device.values() for norm in torch._foreach_norm(alike, dtype=torch.float32)]
    return torch.stack(norms).double().square().sum()


def _sum_squares_on_cpu(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the same for flat tensors on a CPU; small ones are concatenated."""
    sums: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    elements = 0
    for flat in tensors:
        if flat.numel() >= CACHED_ELEMENTS:
            sums.append(_sum_of_squares(flat))
            continue
        if elements + flat.numel() > CACHED_ELEMENTS:
            sums.append(_sum_of_squares(torch.cat(small)))
            small, elements = [], 0
        small.append(flat)
        elements += flat.numel()
    if small:
        sums.append(_sum_of_squares(torch.cat(small)))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    parts = [part.to(torch.float32).square().sum() for part in flat.split(CACHED_ELEMENTS)]
    return torch.stack(parts).double().sum()


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
