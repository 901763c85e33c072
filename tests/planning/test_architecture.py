"""The closed form against the models that transformers builds, on the meta device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.errors import RequestError
from trainwright.planning.architectures.catalog import find_model
from trainwright.planning.architectures.configured import from_config
from trainwright.planning.architectures.families import FAMILIES

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LLAMA4 = {"model_type": "llama4_text", **SMALL, "intermediate_size_mlp": 70, "head_dim": 16, **LOCAL}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
FALCON = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}
OWN_NAMES = "gpt|moe|mixtral|deepseek|llama4|qwen3_next|falcon|mpt"

CASES: list[dict[str, Any]] = [
    *({"model_type": kind, **SMALL} for kind in sorted(FAMILIES) if not re.search(OWN_NAMES, kind)),
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    {"model_type": "llama", **SMALL, "num_key_value_heads": None, "tie_word_embeddings": True},
    {"model_type": "mistral", **SMALL, "attention_bias": True, "sliding_window": None},
    {"model_type": "mixtral", **SMALL, "num_local_experts": 5, "num_experts_per_tok": 3},
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"model_type": "qwen3", **SMALL, "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "qwen2_moe", **SMALL, **EXPERTS},
    {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "shared_expert_intermediate_size": 40, "qkv_bias": False},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "decoder_sparse_step": 2, "head_dim": 16},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "mlp_only_layers": [0], "num_hidden_layers": 4},
    {"model_type": "gemma2", **SMALL, "final_logit_softcapping": None},
    {"model_type": "gemma3_text", **SMALL, "sliding_window_pattern": 2, "tie_word_embeddings": False},
    {"model_type": "phi", **SMALL, "qk_layernorm": True},
    {"model_type": "phi3", **SMALL, "tie_word_embeddings": True},
    {"model_type": "gpt2", **GPT2},
    {"model_type": "gpt2", **GPT2, "n_inner": 70, "n_positions": 33, "tie_word_embeddings": False},
    {"model_type": "gpt_neox", **SMALL, "num_key_value_heads": None},
    {"model_type": "gpt_neox", **SMALL, "attention_bias": False, "use_parallel_residual": False},
    {"model_type": "smollm3", **SMALL, "attention_bias": True, "mlp_bias": True},
    {"model_type": "granite", **SMALL, "attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.2},
    {"model_type": "cohere", **SMALL, "use_qk_norm": True, "tie_word_embeddings": False},
    {"model_type": "starcoder2", **SMALL, "use_bias": False},
    {"model_type": "olmo2", **SMALL, "attention_bias": True},
    {"model_type": "olmo3", **SMALL, "num_hidden_layers": 5},
    {"model_type": "olmoe", **SMALL, "num_experts": 6, "num_experts_per_tok": 2},
    {"model_type": "phimoe", **SMALL, **LOCAL, "attention_bias": True, "lm_head_bias": True},
    {"model_type": "granitemoe", **SMALL, **LOCAL},
    {"model_type": "gpt_oss", **SMALL, **LOCAL, "head_dim": 20},
    {"model_type": "deepseek_v2", **SMALL, **LATENT},
    {"model_type": "deepseek_v3", **SMALL, **LATENT, "attention_bias": True},
    {"model_type": "deepseek_v3", **SMALL, **LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    {"model_type": "glm4_moe", **SMALL, **EXPERTS, "n_routed_experts": 6, "head_dim": 16, "use_qk_norm": True},
    LLAMA4,
    {**LLAMA4, "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    {"model_type": "qwen3_next", **SMALL, **EXPERTS, **LINEAR, "num_hidden_layers": 8, "head_dim": 16},
    {"model_type": "falcon", **FALCON},
    {"model_type": "falcon", **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    {"model_type": "falcon", **FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    {"model_type": "falcon", **FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    {"model_type": "mpt", "d_model": 48, "n_layers": 3, "n_heads": 4, "vocab_size": 101, "max_seq_len": 64},
]
REAL = [
    *("Llama-3.1-70B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B", "gemma-7b", "gemma-2-27b"),
    *("gemma-3-1b", "Mistral-Nemo-12B", "Mixtral-8x22B", "phi-2", "Phi-3-medium", "Phi-4-mini-instruct"),
    *("SmolLM3-3B", "gpt2-xl", "pythia-6.9b", "OLMo-2-1124-13B", "granite-3.1-8b-base", "aya-23-8B"),
    *("starcoder2-15b", "c4ai-command-r-v01", "Llama-3.2-1B"),
    *("OLMoE-1B-7B", "gpt-oss-20b", "gpt-oss-120b", "DeepSeek-V3", "DeepSeek-V2-Lite", "Qwen3-Next-80B-A3B"),
    *(
        "Phi-3.5-MoE",
        "GLM-4.5",
        "Olmo-3-7B",
        "falcon-7b",
        "falcon-40b",
        "falcon-rw-1b",
        "mpt-7b",
        "mpt-30b",
        "opt-1.3b",
    ),
]


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values, pad_token_id=None))


def count(model: torch.nn.Module, pattern: str) -> int:
    """Elements of the parameters whose name has ``pattern``."""
    return sum(value.numel() for name, value in model.named_parameters() if re.search(pattern, name))


def named(config: dict[str, Any]) -> str:
    shown = {key: value for key, value in config.items() if key not in SMALL or SMALL[key] != value}
    return "-".join(str(value) if key == "model_type" else f"{key}={value}" for key, value in shown.items())


@pytest.mark.parametrize("config", CASES, ids=named)
def test_every_part_is_counted_as_transformers_does(config: dict[str, Any]) -> None:
    model, architecture = model_of(config), from_config(config)
    assert architecture is not None
    parts = architecture.parameters()
    assert parts.total == sum(value.numel() for value in model.parameters())
    assert parts.embedding == count(model, r"embed_tokens|embed_in|wte|word_embeddings")
    assert parts.positions == count(model, r"wpe")
    assert parts.head == count(model, r"^lm_head")
    assert parts.final_norm == count(model, r"(model|transformer|gpt_neox)\.(norm|final_layer_?norm|ln_f|norm_f)\.")
    for block in range(architecture.layers):
        here = rf"\.(layers|h|blocks)\.{block}\."
        routed, linear = count(model, rf"{here}.*experts"), count(model, rf"{here}linear_attn\.")
        attention = parts.linear_attention if linear else parts.attention
        assert (linear or count(model, rf"{here}(self_attn|attn|attention|self_attention)\.")) == attention
        whole = parts.sparse_block if routed else parts.dense_block
        assert count(model, here) == whole - parts.attention + attention


@pytest.mark.parametrize("name", REAL)
def test_real_sizes_are_counted_as_transformers_does(name: str) -> None:
    known = find_model(name)
    model = model_of(dict(known.config))
    assert known.architecture().parameters().total == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("config", CASES, ids=named)
def test_what_transformers_writes_means_the_same_as_what_was_written(config: dict[str, Any]) -> None:
    written = AutoConfig.for_model(**config)
    architecture = from_config(config)
    assert architecture is not None
    assert from_config(written.to_dict()) == architecture
    kinds = getattr(written, "layer_types", None)
    if kinds is not None and "chunked_attention" in kinds:
        assert architecture.windowed_layers == kinds.count("chunked_attention")
    elif kinds is not None and architecture.window is not None:
        assert architecture.windowed_layers == kinds.count("sliding_attention")
    elif window := getattr(written, "sliding_window", None):
        assert (architecture.window, architecture.windowed_layers) == (window, architecture.layers)


def test_the_language_model_of_one_that_sees_images_is_described() -> None:
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    architecture = from_config({"model_type": "gemma3", "text_config": sizes, "vision_config": {}})
    assert architecture is not None
    assert architecture.parameters() == find_model("gemma-3-4b-it").architecture().parameters()
    assert architecture.windowed_layers == 29


def test_only_what_a_token_goes_through_is_active() -> None:
    parts = find_model("Mixtral-8x7B").architecture().parameters()
    assert parts.active == 12_879_925_248  # 13B active parameters: arXiv 2401.04088
    assert find_model("gpt2").architecture().parameters().active == 124_439_808


def test_an_unknown_family_is_left_to_the_caller() -> None:
    assert from_config({"model_type": "mamba", "hidden_size": 64}) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 64}, "model_type is missing"),
        (
            {"model_type": "llama", "hidden_size": 64},
            "num_hidden_layers, num_attention_heads, intermediate_size, vocab",
        ),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 9}, "n_layer is missing"),
        ({"model_type": "mixtral", **SMALL, "num_experts_per_tok": 2}, "num_local_experts is missing"),
        ({"model_type": "qwen3_moe", **SMALL}, "num_experts, num_experts_per_tok, moe_intermediate_size are missing"),
        (
            {"model_type": "llama", **SMALL, "hidden_size": "48"},
            "hidden_size: expected a whole number of at least 1, not '48'",
        ),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": 0}, "num_hidden_layers: expected a whole number"),
        ({"model_type": "llama", **SMALL, "num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"model_type": "llama", **SMALL, "hidden_size": 50}, "hidden_size 50 is not a multiple of 4 heads"),
    ],
)
def test_what_is_missing_or_wrong_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)) as raised:
        from_config(config, "models/mine/config.json")
    assert str(raised.value).startswith("models/mine/config.json: ")


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_sizes_that_no_machine_has_room_for_are_refused(key: str) -> None:
    """A plan of them would not come to an end."""
    for model_type in ("llama", "qwen3_moe"):
        with pytest.raises(RequestError, match=r"config\.json: these sizes give .* parameters"):
            from_config({"model_type": model_type, **SMALL, **EXPERTS, "vocab_size": 10**13, key: 10**13})
    found = from_config({"model_type": "llama", **SMALL, "hidden_size": 65536, "intermediate_size": 2**18})
    assert found is not None and found.parameters().total > 10**11
