"""What each of several real processes does to show how matrices are updated together."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel.odd_models import RATE, strategy_over
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.parallel import matrix_exchange
from trainwright.parallel.matrix_owners import assign_matrices, count_operations, group_into_stacks
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import join, leave
from trainwright.recipe.schema import OptimizerSection

STEPS = 3
# Rows that do not divide evenly, fewer rows than ranks, one row, wide and tall.
SHAPES = ((50, 70), (2, 30), (64, 32), (33, 64), (1, 9), (40, 40), (40, 40), (30, 20))


class Block(nn.Module):
    """Matrices of all shapes, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """A number whose gradients are ``gradients``."""
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


class Blocks(nn.Module):
    """Two blocks, and a matrix that is an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(6, 4))
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        first, *rest = gradients
        half = len(rest) // 2
        total = (self.embed * first).sum() + self.layers[0](rest[:half])
        return total + self.layers[1](rest[half:])


def gradients_of(step: int, model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def alone() -> tuple[nn.Module, dict[str, torch.Tensor], int]:
    """The parameters and momenta after all steps of the optimizer without a strategy, and its FLOPs in a step."""
    model = Blocks()
    section = OptimizerSection(name="muon", learning_rate=RATE)
    optimizer = build_optimizer_factory(section)(model.named_parameters())
    counted = 0
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients_of(step, model), strict=True):
            parameter.grad = gradient
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        counted = counter.get_total_flops()
    momenta = {
        name: optimizer.state[p]["momentum_buffer"]
        for name, p in model.named_parameters()
        if p in optimizer.state and "momentum_buffer" in optimizer.state[p]
    }
    return model, momenta, counted


def update_as_one(cases: list[tuple[str, dict[str, Any]]], as_on_gpus: bool = False) -> None:
    """Under each strategy, with its settings, updates are to the bit those of one process, and divided.

    ``as_on_gpus``: those of one shape are computed together, up to rounding.
    """
    world = join("cpu")
    if as_on_gpus:
        matrix_exchange.assign_matrices = partial(_as_on_gpus, assign_matrices)  # type: ignore[attr-defined]
        matrix_exchange.group_into_stacks = partial(_as_on_gpus, group_into_stacks)  # type: ignore[attr-defined]
    expected, momenta, whole = alone()
    assert whole == 2 * sum(count_operations(*shape) for shape in SHAPES)
    for name, settings in cases:
        print(name, settings, file=sys.stderr)
        model = Blocks()
        fresh = copy.deepcopy(model)
        strategy = strategy_over(world, model, name, muon=True, **settings)
        counted = 0
        for step in range(STEPS):
            # One rank has all of the gradient, so that no sum is rounded.
            loss = strategy.module(gradients_of(step, fresh)) * float(world.rank == world.size - 1)
            strategy.backward(loss, last=True)
            with FlopCounterMode(display=False) as counter:
                strategy.step(RATE, 1.0)
            counted = counter.get_total_flops()
        _check(strategy, expected, momenta, 1e-6 if as_on_gpus else 0.0)
        shares = [share for (share,) in world.gather_floats([float(counted)])]
        assert sum(shares) == whole
        assert shares == _planned(world.size, as_on_gpus)
    leave()


def _as_on_gpus(function: Any, *arguments: Any, on_gpu: bool) -> Any:
    return function(*arguments, on_gpu=True)


def _check(strategy: Strategy, expected: nn.Module, momenta: dict[str, torch.Tensor], difference: float) -> None:
    found = dict(strategy.parameters())
    for name, parameter in expected.named_parameters():
        assert torch.allclose(found[name], parameter, rtol=0, atol=difference), name
    state = strategy.state()
    assert {name for name in state if "momentum" in name} == {f"optimizer.momentum_buffer.{name}" for name in momenta}
    for name, momentum in momenta.items():
        shard = state[f"optimizer.momentum_buffer.{name}"]
        begin = shard.offset[0]
        assert torch.equal(shard.local, momentum[begin : begin + len(shard.local)]), name


def _planned(ranks: int, as_on_gpus: bool) -> list[float]:
    shapes = (*SHAPES, *SHAPES)
    shares = [0.0] * ranks
    for one in assign_matrices(shapes, ranks, on_gpu=as_on_gpus):
        for rank, owned in enumerate(one):
            shares[rank] += sum(count_operations(*shapes[index]) for index in owned)
    return shares
