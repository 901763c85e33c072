"""Traces for GPUs, whose kernels have stand-ins."""

from __future__ import annotations

from trainwright.planning.trace.batch import BatchShape
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import sized, traced_as

_SIZES = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 1024}
_SHAPE = BatchShape(1, 4096, ((1024, 4),), 4092, True, False)


def test_dropout_of_attention_keeps_no_scores() -> None:
    kept = {}
    for dropout in (0.0, 0.1):
        configuration = {"model_type": "gpt2", **_SIZES, "attn_pdrop": dropout, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        request = TraceRequest(TracedModel.of(configuration), Device("cuda"), "bf16", "equal")
        kept[dropout] = sized(request, _SHAPE).in_order()[2].forward.moments[-1].after
    tokens, hidden = 4096, 128
    assert 0.8 * kept[0.0] < kept[0.1] < kept[0.0] + 8 * tokens * hidden


def test_gpus_with_the_same_kernels_share_a_trace() -> None:
    model = TracedModel.of({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4})
    request = TraceRequest(model, Device("cuda"), "fp16", "equal", "compiled", hooked=True)
    assert traced_as(request, Regime()) == TraceRequest(model, Device("cuda"), "bf16", "packed")
