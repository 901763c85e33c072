"""The block of the quick measurement computes what transformers' block computes."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from trainwright.doctor import block
from trainwright.doctor.block import Sizes, blocks_of
from trainwright.doctor.calibrate_cases import unequal_lengths

SIZES = Sizes(hidden=32, intermediate=48, heads=4, key_value_heads=2, head_dim=8, sequences=3, length=16)


def test_it_is_the_block_of_a_llama_on_each_sequence() -> None:
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
    inputs = (hidden.requires_grad_(), *matrices, *norms)
    found = block._forward(hidden, matrices, norms, (angles.cos(), angles.sin()), SIZES)
    gradients = block.backward(found, inputs)
    lengths = unequal_lengths(SIZES.sequences, SIZES.length)
    assert len(set(lengths)) == 3 and sum(lengths) == 48
    ends = list(itertools.accumulate(lengths))
    rows = []
    for begin, end in zip([0, *ends], ends, strict=False):
        own = slice(begin, end)
        rotation = angles[own].cos()[None], angles[own].sin()[None]
        expected = layer(hidden[:, own], position_embeddings=rotation)
        rows.append(expected[0] if isinstance(expected, tuple) else expected)
    expected = torch.cat(rows, dim=1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), inputs))


def test_it_does_without_the_compiler_whose_import_takes_longer_than_the_measurement() -> None:
    run = f"""
import sys
from trainwright.doctor.block import Sizes, blocks_of
for case in blocks_of(Sizes(*{tuple(SIZES)}), "fp32"):
    case.build()()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", run], check=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_directions_are_cases_that_run(precision: str) -> None:
    cases = list(blocks_of(SIZES, precision))
    assert [case.curve for case in cases] == [f"block/{precision}/{way}" for way in ("forward", "backward")]
    assert all(case.cold and case.sizes == tuple(map(float, SIZES)) for case in cases)
    for case in cases:
        run = case.build()
        run()
        run()  # the graph is kept
