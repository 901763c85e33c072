"""LoRA layers as one function of autograd, against PEFT's own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.models.low_rank import join_adapters, separate_adapters
from trainwright.models.quantization import DoubleNF4, Int8, QuantizedLinear
from trainwright.models.recompute import save_activation_memory


class Block(nn.Module):
    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(32, 48, bias=bias), nn.Linear(48, 32, bias=bias)]
        quantized = {"nf4": DoubleNF4, "int8": Int8}
        if kind in quantized:
            layers = [QuantizedLinear(layer.weight, layer.bias, quantized[kind]) for layer in layers]
        self.up, self.down = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def adapted(kind: str = "dense", *, bias: bool = False, names: tuple[str, ...] = ("default",), **more: Any) -> Block:
    from peft import LoraConfig, inject_adapter_in_model

    block = Block(kind, bias)
    for name in names:
        settings: dict[str, Any] = {"r": 4, "lora_alpha": 10, "target_modules": ["up", "down"], **more}
        inject_adapter_in_model(LoraConfig(**settings), block, name)
    for layer in (block.up, block.down):
        layer.set_adapter(list(names))
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.3)
    return block


def passed(block: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 32, generator=generator).to(dtype).requires_grad_()
    out = block(x)
    (out.float() * torch.randn(2, 5, 32, generator=generator)).sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"out": out.detach(), "input": x.grad, **gradients}


@pytest.mark.parametrize(
    ("kind", "bias", "names"),
    [
        ("dense", False, ("default",)),
        ("dense", True, ("beneath", "default")),
        ("nf4", True, ("default",)),
        ("int8", False, ("default",)),
    ],
)
def test_a_joined_layer_computes_what_pefts_does(kind: str, bias: bool, names: tuple[str, ...]) -> None:
    block = adapted(kind, bias=bias, names=names)
    expected = passed(copy.deepcopy(block))
    assert join_adapters(block) == 2
    results = passed(block)
    assert results.keys() == expected.keys()
    for name, value in results.items():
        assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_in_bf16_it_is_no_less_precise_than_pefts() -> None:
    block = adapted()
    exact = passed(copy.deepcopy(block))
    errors = []
    for joined in (False, True):
        low = copy.deepcopy(block).bfloat16()
        assert not joined or join_adapters(low) == 2
        errors.append({name: (v.float() - exact[name]).norm() for name, v in passed(low, torch.bfloat16).items()})
    for name, error in errors[1].items():
        assert error <= 1.1 * errors[0][name] + 2e-3 * exact[name].norm(), name


@pytest.mark.parametrize("setting", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_layers_with_more_than_two_matrices_keep_pefts_code(setting: dict[str, Any]) -> None:
    assert join_adapters(adapted(bias=True, **setting)) == 0


def test_a_disabled_adapter_adds_nothing_and_passes_without_gradients_are_pefts() -> None:
    block = adapted()
    x = torch.randn(3, 32)
    with torch.no_grad():
        enabled = block(x)
    join_adapters(block)
    with torch.no_grad():
        assert torch.equal(block(x), enabled)
    for layer in (block.up, block.down):
        layer.enable_adapters(False)
    torch.testing.assert_close(block(x), Block("dense", False)(x))


def test_results_that_selective_recomputation_keeps_are_not_changed_in_place() -> None:
    block = adapted()
    expected = passed(copy.deepcopy(block))
    join_adapters(block)
    save_activation_memory([block], "selective")
    for name, value in passed(block).items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_recomputed_blocks_use_it_too() -> None:
    block = adapted()
    expected = passed(copy.deepcopy(block))
    join_adapters(block)
    save_activation_memory([block], "full")
    for name, value in passed(block).items():
        assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def test_separated_layers_are_pefts_again() -> None:
    block = adapted()
    expected = passed(copy.deepcopy(block))
    join_adapters(block)
    separate_adapters(block)
    for name, value in passed(block).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_it_is_compiled_without_a_break(kind: str) -> None:
    block = adapted(kind, bias=True)
    expected = passed(copy.deepcopy(block))
    join_adapters(block)
    block.compile(dynamic=True, backend="aot_eager", fullgraph=True)
    for name, value in passed(block).items():
        assert (value - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
