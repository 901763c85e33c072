"""Strategies x architectures x precisions x capabilities x worlds, each from its first step to its export."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from tests.planning.simulation.cases import Case, Found, simulate_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # 200 simulations of a few seconds each

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
_USUAL = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096}
_MIXED = {**_USUAL, "num_experts_per_tok": 2}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": _USUAL,
    "mistral": {**_USUAL, "sliding_window": 128},
    "qwen2": _USUAL,
    "qwen3": {**_USUAL, "head_dim": 64},
    "phi3": {**_USUAL, "pad_token_id": 0},
    "gemma2": {**_USUAL, "head_dim": 64},
    "gemma3_text": {**_USUAL, "head_dim": 64, "sliding_window": 64},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 1024, "n_positions": 4096},
    "gpt": {**_SIZES, "vocab_size": 1024, "max_position_embeddings": 4096},
    "mixtral": {**_MIXED, "num_local_experts": 4},
    "qwen3_moe": {**_MIXED, "num_experts": 4, "moe_intermediate_size": 256},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "head_dim": 64},
    "deepseek_v3": {
        **{**_MIXED, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 256, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64},
        **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
    },
}
STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "resharded": ("parallel.strategy=fsdp", "parallel.reshard_after_forward=true"),
    "hybrid": ("parallel.strategy=fsdp", "parallel.replicate_size=2"),
    "offloaded": ("parallel.strategy=fsdp", "parallel.offload_parameters=true"),
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
}
CAPABILITIES = {"T4": ("no", "fp16"), "A100-80GB": ("no", "bf16", "fp16"), "H100": ("bf16",), "B200": ("bf16",)}
WORLDS = (1, 2, 8, 64, 512, 2048)
RECOMPUTE = ("full", "selective", "2")
SHORT = ("data.max_length=256", "data.pack_length=512", "data.limit=100", "train.micro_batch_size=1")


def model(name: str) -> str:
    return f"model.config={json.dumps({'model_type': name, **ARCHITECTURES[name]})}"


def on(world: int, card: str = "H100") -> tuple[str, str]:
    """The machine of so many GPUs, and the override for as many processes."""
    nodes, each = max(1, world // 8), min(8, world)
    return f"{nodes}x{each}x{card}" if nodes > 1 else f"{each}x{card}", f"parallel.num_processes={world}"


def case(world: int, *overrides: str, card: str = "H100", rows: int = 1) -> Case:
    machine, processes = on(world, card)
    return Case(machine, (*SHORT, processes, f"train.global_batch_size={2 * rows * world}", *overrides))


def cases() -> dict[str, Case]:
    """Each kind with all of one other kind, not all with all: a simulation takes seconds."""
    found: dict[str, Case] = {}
    for architecture in ARCHITECTURES:
        for strategy in ("ddp", "resharded"):
            found[f"{architecture} {strategy}"] = case(8, model(architecture), *STRATEGIES[strategy])
        found[f"{architecture} padded"] = case(2, model(architecture), "data.pack_length=null", *STRATEGIES["fsdp"])
    for strategy, how in STRATEGIES.items():
        for card, precisions in CAPABILITIES.items():
            for precision in precisions:
                more = (f"train.mixed_precision={precision}", "data.pack_length=null")
                found[f"{strategy} {card} {precision}"] = case(8, model("llama"), *how, *more, card=card)
        for recompute in RECOMPUTE:
            kept = f"train.activation_checkpointing={recompute}"
            found[f"{strategy} recomputing {recompute}"] = case(8, model("llama"), *how, kept)
    for world in WORLDS:
        for strategy in ("ddp", "fsdp", "resharded") if world > 1 else ():
            found[f"{strategy} on {world}"] = case(world, model("llama"), *STRATEGIES[strategy])
        if world > 2:
            hybrid = ("parallel.strategy=fsdp", f"parallel.replicate_size={max(2, world // 8)}")
            found[f"hybrid on {world}"] = case(world, model("llama"), *hybrid)
    found["single on 1"] = case(1, model("llama"), "parallel.strategy=single")
    for strategy in ("single", "ddp", "fsdp", "resharded"):
        how = STRATEGIES.get(strategy, ("parallel.strategy=single",))
        world = 1 if strategy == "single" else 8
        found[f"muon {strategy}"] = case(world, model("llama"), *how, "optimizer.name=muon")
        moved = ("train.activation_offload=true", "train.activation_checkpointing=full")
        found[f"activations offloaded {strategy}"] = case(world, model("llama"), *how, *moved)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    asked = cases()
    return dict(zip(asked, simulate_all(list(asked.values()), tmp_path_factory.mktemp("matrix")), strict=True))


@pytest.mark.parametrize("name", cases())
def test_it_runs_to_its_export(found: dict[str, Found], name: str) -> None:
    one = found[name]
    assert one.error == ""
    assert one.report["error"] is None
    assert one.report["steps"] == 2 and "export" in one.report["memory"]


# Sizes at which tensors take more than the rounding of their sizes.
LARGE = {
    "llama": {},
    "wide": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 32},
    "vocabulary": {"vocab_size": 151936, "tie_word_embeddings": True, "num_hidden_layers": 6},
}
SPREAD = {
    "single": (1, ("parallel.strategy=single",)),
    "ddp": (8, ("parallel.strategy=ddp",)),
    "fsdp": (8, ("parallel.strategy=fsdp",)),
    "resharded": (64, ("parallel.strategy=fsdp", "parallel.reshard_after_forward=true")),
    "hybrid": (32, ("parallel.strategy=fsdp", "parallel.replicate_size=4", "parallel.reshard_after_forward=true")),
}
KEPT = {
    "bf16": ("train.mixed_precision=bf16",),
    "fp32": ("train.mixed_precision=no", "data.pack_length=null", "train.micro_batch_size=4"),
    "recomputed": ("train.mixed_precision=bf16", "train.activation_checkpointing=full"),
    "selective": ("train.mixed_precision=bf16", "train.activation_checkpointing=selective"),
}


def memory_cases() -> dict[str, Case]:
    found = {}
    for size, config in LARGE.items():
        for spread, (world, how) in SPREAD.items():
            for kept, more in KEPT.items():
                machine, processes = on(world)
                sizes = (f"model.config.{key}={json.dumps(value)}" for key, value in config.items())
                batch = f"train.global_batch_size={max(1024, 16 * world)}"  # of few examples no pack is full
                found[f"{size} {spread} {kept}"] = Case(machine, (*sizes, processes, batch, *how, *more))
    return found


def test_peaks_are_the_plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over 60 cases: half of them within 2 %, and none planned with 5 % too little."""
    asked = memory_cases()
    assert len(asked) == 60
    done = simulate_all(list(asked.values()), tmp_path_factory.mktemp("memory"))
    assert {name: one.error or one.report["error"] for name, one in zip(asked, done, strict=True)} == dict.fromkeys(
        asked, None
    )
    off = {name: one.planned / one.peak - 1 for name, one in zip(asked, done, strict=True)}
    shown = "\n".join(f"{value:+.1%} {name}" for name, value in sorted(off.items(), key=lambda item: item[1]))
    assert statistics.median(map(abs, off.values())) <= 0.02, shown
    assert min(off.values()) >= -0.05, shown
