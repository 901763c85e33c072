"""The block of the quick measurement computes what transformers' block computes."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from trainwright.doctor import block
from trainwright.doctor.block import Sizes, blocks_of

SIZES = Sizes(hidden=32, intermediate=48, heads=4, key_value_heads=2, head_dim=8, documents=3, length=16)


def test_it_is_the_block_of_a_llama_on_each_document() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5
    )
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).eval()
    attention, mlp = layer.self_attn, layer.mlp
    modules = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    matrices = [module.weight for module in (*modules, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    norms = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    torch.manual_seed(0)
    hidden, angles = torch.randn(1, 48, 32), torch.randn(48, 8)
    found = block._forward(hidden, matrices, norms, (angles.cos(), angles.sin()), SIZES)
    for begin in range(0, 48, 16):
        own = slice(begin, begin + 16)
        rotation = angles[own].cos()[None], angles[own].sin()[None]
        expected = layer(hidden[:, own], position_embeddings=rotation)
        torch.testing.assert_close(found[:, own], expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_directions_are_cases_that_run(precision: str) -> None:
    cases = list(blocks_of(SIZES, precision))
    assert [case.curve for case in cases] == [f"block/{precision}/{way}" for way in ("forward", "backward")]
    assert all(case.cold and case.sizes == tuple(map(float, SIZES)) for case in cases)
    for case in cases:
        run = case.build()
        run()
        run()  # the graph is kept
