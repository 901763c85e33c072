"""Muon against its update written out by hand, and what goes by AdamW beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.operations import Operations
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.engine.optimizers.muon import Muon, orthogonalize
from trainwright.recipe.schema import OptimizerSection

STEPS = 3
NAMES = {
    "blocks.0.mlp.up.weight": (6, 4),
    "blocks.0.attention.output.weight": (3, 8),
    "blocks.0.norm.weight": (4,),
    "blocks.0.mlp.up.bias": (6,),
    "decoder.embedding.weight": (16, 4),
    "embed_tokens.weight": (16, 4),
    "wte.weight": (16, 4),
    "lm_head.weight": (16, 4),
}
MATRICES = ("blocks.0.mlp.up.weight", "blocks.0.attention.output.weight")
VECTORS = ("blocks.0.norm.weight", "blocks.0.mlp.up.bias")


def section(name: Any = "muon", **settings: Any) -> OptimizerSection:
    fixed = {"learning_rate": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.7), "eps": 1e-3, "momentum": 0.9}
    return OptimizerSection(name=name, **{**fixed, **settings})


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in NAMES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def trained(name: str, rate: float = 0.02) -> dict[str, torch.Tensor]:
    made = parameters()
    optimizer = build_optimizer_factory(section(name))(made.items())
    for group in optimizer.param_groups:
        group["lr"] = rate
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            made[key].grad = gradient
        optimizer.step()
    return {key: parameter.detach() for key, parameter in made.items()}


@pytest.mark.parametrize("rate", [0.02, 0.005])
def test_matrices_of_blocks_move_by_their_momentum_made_orthogonal(rate: float) -> None:
    found, start = trained("muon", rate), parameters()
    for name in MATRICES:
        weight, momentum = start[name].detach().clone(), torch.zeros(NAMES[name])
        for step in range(STEPS):
            gradient = gradients(step)[name]
            momentum = 0.9 * momentum + 0.1 * gradient
            ahead = 0.1 * gradient + 0.9 * momentum  # Nesterov
            update = 0.2 * math.sqrt(max(NAMES[name])) * orthogonalize(ahead)
            weight = weight * (1 - rate * 0.3) - rate * update
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def by_adamw(decay: float, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    made = {name: parameter for name, parameter in parameters().items() if name in names}
    optimizer = torch.optim.AdamW(made.values(), lr=0.02, betas=(0.8, 0.7), eps=1e-3, weight_decay=decay)
    for step in range(STEPS):
        for key, parameter in made.items():
            parameter.grad = gradients(step)[key]
        optimizer.step()
    return {key: parameter.detach() for key, parameter in made.items()}


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_all_else_goes_by_adamw_as_asked_and_vectors_are_not_decayed(name: str) -> None:
    found = trained(name)
    plain = tuple(key for key in NAMES if key not in VECTORS and (name == "adamw" or key not in MATRICES))
    for key, expected in {**by_adamw(0.3, plain), **by_adamw(0.0, VECTORS)}.items():
        torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6, msg=key)


def test_muon_takes_no_embedding_and_no_head() -> None:
    made = parameters()
    optimizer = Muon(made.items(), section())
    orthogonal = {id(p) for group in optimizer.param_groups if group["kind"] for p in group["params"]}
    assert {name for name, parameter in made.items() if id(parameter) in orthogonal} == set(MATRICES)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_matrices_of_a_stack_are_made_orthogonal_one_by_one(shape: tuple[int, int]) -> None:
    stack = torch.randn((3, *shape), generator=torch.Generator().manual_seed(7)) * torch.tensor([1.0, 30.0, 0.1]).view(
        3, 1, 1
    )
    for matrix, result in zip(stack, orthogonalize(stack), strict=True):
        torch.testing.assert_close(result, orthogonalize(matrix), rtol=1e-6, atol=1e-6)


def test_equal_matrices_on_a_gpu_are_one_stack() -> None:
    """Counted on tensors that say they are on a GPU: products of three matrices are those of one."""
    products = []
    for layers in (1, 3):
        with FakeTensorMode():
            named = [(f"blocks.{n}.up.weight", nn.Parameter(torch.empty(6, 4, device="cuda:0"))) for n in range(layers)]
            optimizer = Muon(named, section())
            for _, parameter in named:
                parameter.grad = torch.empty_like(parameter)
            with Operations() as operations:
                optimizer.step()
        products.append(operations.names.count("baddbmm"))
        assert operations.names.count("_foreach_lerp") == 1
    assert products == [10, 10]  # two in each of five iterations
