"""Every setting of an adapter reaches its layers, and it can be switched off and on again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainwright.models.adapters.attaching import attach_adapter, disable_adapters, iterate_adapted_layers
from trainwright.models.load import load_model
from trainwright.models.quantization import quantize
from trainwright.recipe.sections.model import ModelSection

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
IDS = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))


def adapted(dtype: torch.dtype = torch.float32, **adapter: Any) -> Any:
    settings = {"config": CONFIG, "tokenizer": "bytes", "adapter": {"type": "lora", "rank": 4, **adapter}}
    section = ModelSection.model_validate(settings)
    model = load_model(section, dtype)
    attach_adapter(model, section, 0)
    return model


def layers(model: Any) -> dict[str, Any]:
    return dict(iterate_adapted_layers(model))


@pytest.mark.parametrize(("stabilised", "scale"), [(False, 24 / 4), (True, 24 / math.sqrt(4))])
def test_alpha_over_the_rank_scales_what_is_added(stabilised: bool, scale: float) -> None:
    found = layers(adapted(alpha=24, rank_stabilized=stabilised))
    assert found
    assert all(layer.scaling == {"default": scale} and layer.r == {"default": 4} for layer in found.values())


def test_dropout_is_the_adapters_own() -> None:
    for layer in layers(adapted(dropout=0.25)).values():
        assert layer.lora_dropout["default"].p == 0.25
    assert all(isinstance(layer.lora_dropout["default"], torch.nn.Identity) for layer in layers(adapted()).values())


def test_all_targets_get_matrices_and_nothing_else_does() -> None:
    kinds = {name.rpartition(".")[2] for name in layers(adapted(targets=["q_proj", "v_proj", "up_proj"]))}
    assert kinds == {"q_proj", "v_proj", "up_proj"}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in layers(adapted())} == every


def test_only_the_blocks_that_are_named_get_matrices() -> None:
    some = set(layers(adapted(layers=[1], targets=r".*\.(q_proj|up_proj)")))
    assert some == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    every = {name for name in layers(adapted()) if ".layers.1." in name}
    assert set(layers(adapted(layers="1-1"))) == every


def test_rotations_have_blocks_of_the_size_that_is_set() -> None:
    for size in (4, 8):
        for layer in layers(adapted(type="oft", rank=None, block_size=size)).values():
            assert layer.oft_R["default"].weight.shape == (layer.in_features // size, size * (size - 1) // 2)


def test_matrices_are_fp32_on_a_bf16_base_which_is_frozen() -> None:
    model = adapted(torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".lora_" in name), name
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name


@torch.no_grad()
def test_switched_off_it_is_the_base_and_afterwards_itself_again() -> None:
    model = adapted()
    base = model(IDS).logits
    for layer in layers(model).values():
        layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1))
    learned = model(IDS).logits
    with disable_adapters(model):
        assert torch.equal(model(IDS).logits, base)
    assert torch.equal(model(IDS).logits, learned)
    assert not torch.allclose(learned, base, atol=0.1)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@torch.no_grad()
def test_quantized_layers_keep_their_biases(kind: Any) -> None:
    settings = {"config": {**CONFIG, "attention_bias": True, "mlp_bias": True}, "tokenizer": "bytes"}
    model: Any = load_model(ModelSection.model_validate(settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(2))
        elif "proj" in name:
            parameter.zero_()  # so that the biases are all that is left of a layer
    before = model(IDS).logits
    quantize(model, kind, double=False)
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
