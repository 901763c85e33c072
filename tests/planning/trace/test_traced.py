"""Traces against real steps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.trace.real_step import batch_of, measured, planned, real_model, shape_of
from trainwright.planning.trace.request import Device, TracedModel, TraceRequest, rows_of
from trainwright.planning.trace.traced import sized

SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 352, "vocab_size": 512, "max_position_embeddings": 2048, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("family", "more", "dtype", "lengths", "packed"),
    [
        ("llama", {}, "fp32", (128, 320, 576), True),
        ("llama", {}, "bf16", (512, 512), False),
        ("gemma2", {"head_dim": 32}, "fp32", (256, 512), False),
        ("qwen3_moe", EXPERTS, "fp32", (128, 320, 576), True),
    ],
)
def test_a_step_allocates_and_computes_what_its_trace_says(
    family: str, more: dict[str, Any], dtype: Any, lengths: tuple[int, ...], packed: bool
) -> None:
    batch = batch_of(lengths, packed, SIZES["vocab_size"])
    shape = shape_of(batch)
    model = TracedModel.of({"model_type": family, **SIZES, **more})
    request = TraceRequest(model, Device("cpu"), dtype, rows_of(shape))
    plan, real = planned(sized(request, shape)), measured(real_model(request), batch)
    bound = 1e-4 if dtype == "fp32" else 1e-2
    assert plan["step"] == pytest.approx(real["step"], rel=bound)
    assert plan["evaluation"] == pytest.approx(real["evaluation"], rel=0.02)
    assert plan["flops"] == pytest.approx(real["flops"], rel=1e-9 if dtype == "fp32" else 1e-3)
