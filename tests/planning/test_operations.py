"""Programs of decoder blocks against the blocks of transformers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainwright.data.stream.batch import Batch
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.models.causal_lm import CausalLM
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.architectures.configured import from_config
from trainwright.planning.operations import (
    BatchShape,
    BlockKind,
    Device,
    Pass,
    PassSettings,
    block_kinds,
    block_pass,
    block_weights,
    embedding_pass,
    end_weights,
    head_pass,
)
from trainwright.planning.operations.ends import chunk_rows
from trainwright.planning.operations.tape import Parameter

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
HEADS = {"head_dim": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, **HEADS},
    "gemma": {**SIZES, **HEADS},
    "gemma2": {**SIZES, **HEADS},
    "gemma3_text": {**SIZES, **HEADS},
    "phi": {**SIZES, "num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": SIZES,
    "smollm3": SIZES,
    "olmo2": SIZES,
    "granite": SIZES,
    "cohere": SIZES,
    "starcoder2": {**SIZES, "residual_dropout": 0.1},
    "gpt_neox": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 512},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 112},
    "qwen3_moe": {**SIZES, **EXPERTS, **HEADS},
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
}
FAMILIES |= {
    "olmo3": SIZES,
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**SIZES, **LOCAL},
    "granitemoe": {**SIZES, **LOCAL},
    "gpt_oss": {**SIZES, **LOCAL, **HEADS},
    "deepseek_v3": {**SIZES, **LATENT},
    "deepseek_v2": {**SIZES, **LATENT, "n_group": 1},
    "glm4_moe": {
        **SIZES,
        **HEADS,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 0,
    },
    "llama4_text": {**SIZES, **HEADS, "num_local_experts": 4, "intermediate_size_mlp": 144},
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        **HEADS,
        "shared_expert_intermediate_size": 112,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon": {**{k: v for k, v in SIZES.items() if "key_value" not in k}, "ffn_hidden_size": 176},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "max_seq_len": 512},
}
SPARSE = tuple(f for f in FAMILIES if (found := from_config({"model_type": f, **FAMILIES[f]})) and found.experts)
NOT_PACKED = ("qwen3_next", "falcon", "mpt")
# Routing and scans in many small operations, of which not every one is written down: within this part of what is kept.
ABOUT = {
    "phimoe": 0.01,
    "gpt_oss": 0.035,
    "deepseek_v3": 0.01,
    "deepseek_v2": 0.02,
    "glm4_moe": 0.01,
    "qwen3_next": 0.1,
}
# Scalars, the sequences' boundaries; the few numbers that a router makes of every token.
SMALL, ROUTED = 160, 4096


@dataclass(frozen=True)
class Shape:
    """``lengths``: of the sequences of a pack, or of padded rows."""

    lengths: tuple[int, ...]
    packed: bool

    @property
    def planned(self) -> BatchShape:
        longest, total = max(self.lengths), sum(self.lengths)
        if self.packed:
            return BatchShape(1, total, tuple((n, 1) for n in self.lengths), total - len(self.lengths), True, False)
        masked = len(set(self.lengths)) > 1
        return BatchShape(len(self.lengths), longest, ((longest, len(self.lengths)),), total, False, masked)


# Of sizes that half-precision products on a CPU need no padding for.
PACK = Shape((60, 40, 28), packed=True)
ROWS = Shape((64, 50), packed=False)
ROW = Shape((80,), packed=False)


def model_of(family: str, dtype: torch.dtype, packed: bool) -> CausalLM:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return CausalLM(model.to(dtype), packed=packed).train()


def architecture_of(family: str) -> Architecture:
    found = from_config({"model_type": family, **FAMILIES[family]})
    assert found is not None
    return found


def batch_of(shape: Shape) -> Batch:
    from trainwright.data.stream.batch import collate
    from trainwright.data.stream.stream import Stream, StreamSettings

    dataset = TokenDataset.from_examples([(list(range(1, n + 1)), [True] * n) for n in shape.lengths], "probe")
    pack = sum(shape.lengths) if shape.packed else None
    stream = Stream(
        dataset,
        StreamSettings(global_batch_size=len(dataset), seed=0, rows=len(dataset), pack_length=pack, shuffle=False),
    )
    return collate(dataset, stream.global_batch(0).micro_batches[0], packed=shape.packed, pad_token_id=0)


def call_of(lm: CausalLM, block: nn.Module, shape: Shape) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """What a block is called with: its input, and the rest."""
    seen: dict[str, Any] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.update(arguments=arguments, named=named)

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        lm(batch_of(shape))
    handle.remove()
    named = dict(seen["named"])
    hidden = seen["arguments"][0] if seen["arguments"] else named.pop("hidden_states")
    return hidden, seen["arguments"][1:], named


def saved_bytes(lm: CausalLM, block: nn.Module, shape: Shape) -> int:
    """Bytes that autograd keeps of a block's forward pass: every storage once, none that was there before."""
    hidden, arguments, named = call_of(lm, block, shape)
    before = {tensor.untyped_storage().data_ptr() for tensor in [*lm.parameters(), *_tensors([arguments, named])]}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used again
        return tensor

    given = hidden.detach().clone().requires_grad_() * 1
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(given, *arguments, **named)
    return sum(storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def planned(family: str, shape: Shape, width: int, kind: BlockKind | None = None, recompute: Any = "none") -> Pass:
    a = architecture_of(family)
    setting = PassSettings(a, shape.planned, Device("cpu", 1), width)
    return block_pass(setting, kind or block_kinds(a)[0], recompute)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_parameters_that_its_blocks_and_ends_have(family: str) -> None:
    a = architecture_of(family)
    blocks = sum(p.numel for kind in block_kinds(a) for p in block_weights(a, kind, 4, True).parameters.values())
    ends = sum(p.numel for p in end_weights(a, 4, True).parameters.values())
    assert blocks + ends == a.parameters().total
    assert blocks + ends == sum(p.numel() for p in model_of(family, torch.float32, False).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [PACK, ROWS, ROW], ids=["pack", "masked rows", "a row"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_autograd_saves(family: str, shape: Shape, dtype: torch.dtype) -> None:
    if shape.packed and family in NOT_PACKED:
        pytest.skip("is not trained on packs")
    lm = model_of(family, dtype, shape.packed)
    real = saved_bytes(lm, lm.blocks()[0], shape)
    small = SMALL + (ROUTED if family in SPARSE else 0)
    assert planned(family, shape, dtype.itemsize).kept == pytest.approx(real, rel=ABOUT.get(family, 0.0), abs=small)


def test_windows_and_dropout_are_kept_as_they_are() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    window = {"sliding_window": 32}
    for family, more in (("gemma2", window), ("gpt2", {"attn_pdrop": 0.1}), ("mistral", window)):
        changed = {**FAMILIES[family], **more}
        a = from_config({"model_type": family, **changed})
        assert a is not None
        for shape in (PACK, ROWS):
            config = AutoConfig.for_model(family, **changed)
            lm = CausalLM(AutoModelForCausalLM.from_config(config), packed=shape.packed).train()
            setting = PassSettings(a, shape.planned, Device("cpu", 1), 4)
            kept = block_pass(setting, block_kinds(a)[0], "none").kept
            assert kept == pytest.approx(saved_bytes(lm, lm.blocks()[0], shape), abs=4096), (family, shape)


def test_recomputation_keeps_the_input_or_the_products() -> None:
    none, full, selective = (planned("llama", PACK, 4, recompute=how) for how in ("none", "full", "selective"))
    tokens, hidden = PACK.planned.tokens, 64
    assert full.kept == 4 * tokens * hidden and full.keeps_input
    products = 4 * tokens * (3 * hidden + 2 * 32 + 2 * 176 + hidden) + 4 * tokens * 4
    assert selective.kept == full.kept + products
    assert full.kept < selective.kept < none.kept
    # What is computed again is computed in full but for the last product, whose result nothing needs.
    flops = {name: sum(k.flops for k in how.backward) for name, how in (("none", none), ("full", full))}
    forward = sum(k.flops for k in none.forward)
    assert flops["full"] - flops["none"] == forward - 2 * tokens * hidden * 176


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_of_the_matrices(family: str) -> None:
    a = architecture_of(family)
    part = planned(family, PACK, 4)
    matrices = block_weights(a, block_kinds(a)[0], 4, True).parameters
    active = a.experts_per_token / a.experts if a.experts and not a.every_expert else 1
    inside = ("attention", "delta")
    linear = {n: p for n, p in matrices.items() if p.k > 1 and n != "delta.convolution" and not n.endswith(".bias")}
    weights = sum(p.numel * (active if n.startswith("experts.") else 1) for n, p in linear.items())
    tokens = PACK.planned.tokens
    of_matrices = [k for k in part.forward if k.kind == "product" and k.operation not in inside]
    assert sum(k.flops for k in of_matrices) == pytest.approx(2 * tokens * weights, rel=0.01)
    backward = [k for k in part.backward if k.kind == "product" and k.operation not in inside]
    assert sum(k.flops for k in backward) == pytest.approx(4 * tokens * weights, rel=0.01)


def test_gradients_come_once_for_every_trained_weight() -> None:
    for family in FAMILIES:
        a = architecture_of(family)
        names = [moment.name for moment in planned(family, PACK, 2).moments]
        assert sorted(names) == sorted(block_weights(a, block_kinds(a)[0], 2, True).parameters)
    a = architecture_of("llama")
    setting = PassSettings(a, PACK.planned, Device("cpu"), 2)
    outside = [m.name for m in (*head_pass(setting).moments, *embedding_pass(setting).moments)]
    assert sorted(outside) == ["embedding", "final_norm", "head"]


@pytest.mark.parametrize("targets", [1_000, 8_192, 65_536, 500_000])
def test_chunks_of_logits_on_a_gpu_are_as_large_as_the_hidden_states(targets: int) -> None:
    head = Parameter("head", 128_256, 4_096, 2, True)
    rows, chunks = chunk_rows(head, 2, targets, grows=True)
    assert rows * chunks >= targets
    assert rows * head.n * 2 <= max(128 * 2**20, targets * head.k * 2)
    assert chunks <= max(-(-head.n // head.k) + 1, targets // 500)
    assert chunks <= chunk_rows(head, 2, targets, grows=False)[1]


def test_the_loss_never_holds_the_logits_of_more_than_two_chunks() -> None:
    a = from_config({"model_type": "llama", **SIZES, "vocab_size": 100_000})
    assert a is not None
    few, many = (
        head_pass(PassSettings(a, BatchShape(1, n, ((n, 1),), n, True, False), Device("cpu"), 4)).forward_peak
        for n in (2_000, 20_000)
    )
    rows, chunks = chunk_rows(Parameter("head", 100_000, 64, 4, True), 4, 20_000, grows=False)
    assert chunks > 50 and rows * 100_000 * 4 <= 128 * 2**20
    assert many - few < 4 * 18_000 * 64 * 8
