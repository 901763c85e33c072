"""Traces for GPUs, whose kernels have stand-ins."""

from __future__ import annotations

import pytest

from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import normalize_request, size_model
from trainwright.planning.trace.units import BatchShape

_SIZES = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 1024}
_SHAPE = BatchShape(1, 4096, ((1024, 4),), 4092, True, False)


@pytest.mark.slow
def test_dropout_of_attention_keeps_no_scores() -> None:
    kept = {}
    for dropout in (0.0, 0.1):
        configuration = {"model_type": "gpt2", **_SIZES, "attn_pdrop": dropout, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        request = TraceRequest(TracedModel.of(configuration), Device("cuda"), "bf16", "equal")
        kept[dropout] = size_model(request, _SHAPE).list_units()[2].forward.moments[-1].after
    tokens, hidden = 4096, 128
    assert 0.8 * kept[0.0] < kept[0.1] < kept[0.0] + 8 * tokens * hidden


def test_gpus_with_the_same_kernels_share_a_trace() -> None:
    model = TracedModel.of({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4})
    request = TraceRequest(model, Device("cuda"), "fp16", "equal", "compiled", hooked=True)
    assert normalize_request(request, Regime()) == TraceRequest(model, Device("cuda"), "bf16", "packed")


def test_fused_kernels_launch_and_move_less() -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model = TracedModel.of({"model_type": "llama", **sizes, **heads})
    launches, moved = {}, {}
    for fused in (False, True):
        request = TraceRequest(model, Device("cuda", fused=fused), "bf16")
        trace = size_model(request, BatchShape(1, 4096, ((4096, 1),), 4095, True, False))
        assert not trace.facts.failed
        passes = [part for unit in trace.list_units() for part in (unit.forward, unit.backward)]
        operations = [operation for part in passes for operation in part.operations]
        launches[fused] = sum(operation.launches for operation in operations)
        others = [operation for operation in operations if operation.kind not in ("product", "attention")]
        moved[fused] = sum(operation.read + operation.written for operation in others)
    assert launches[True] < 0.6 * launches[False]
    assert moved[True] < 0.5 * moved[False]


def test_one_chunk_of_the_fused_loss_is_traced_as_the_first_of_several() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    request = TraceRequest(TracedModel.of({"model_type": "llama", **sizes}), Device("cuda", fused=True), "bf16")
    head = size_model(request, BatchShape(1, 4096, ((4096, 1),), 4095, True, False)).list_units()[-1]
    products = [operation.launches for operation in head.forward.operations if operation.kind == "product"]
    assert sum(products) == 3  # logits, and the gradients of the hidden states and of the head


def test_what_the_fused_loss_writes_over_its_logits_is_counted() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    request = TraceRequest(TracedModel.of({"model_type": "llama", **sizes}), Device("cuda", fused=True), "bf16")
    trace = size_model(request, BatchShape(1, 4096, ((4096, 1),), 4095, True, False))
    logits = 2 * 4095 * trace.facts.vocabulary
    fused = [operation for operation in trace.list_units()[-1].forward.operations if operation.name == "fused"]
    assert logits <= sum(operation.written for operation in fused) < 1.1 * logits
