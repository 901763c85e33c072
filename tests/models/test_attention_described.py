"""What a run says about its attention is what its layers ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.runs import ON_ROWS, Runs, difference, events
from tests.support.training import Case, train
from trainwright.data.stream.batch import collate
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.models.attention import packs
from trainwright.models.attention.described import describe_attention, needs_of
from trainwright.models.attention.kernels import CPU, Platform
from trainwright.models.causal_lm import CausalLM
from trainwright.models.gpt.model import register

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": {**SIZES, "head_dim": 24, "attention_dropout": 0.1},
    "mistral": {**SIZES, "sliding_window": 24},
    "gemma2": {**SIZES, "head_dim": 16, "sliding_window": 24},
    "gemma4_unified_text": {**SIZES, "head_dim": 16, "sliding_window": 24},  # layers with other head sizes
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "gpt": {**SIZES, "num_key_value_heads": 4, "dropout": 0.1},
    "gpt_oss": {**SIZES, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{**SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    },
}


def model(kind: str) -> CausalLM:
    register()
    return CausalLM(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])), packed=True).train()


@pytest.mark.parametrize("kind", MODELS)
def test_layers_need_what_the_start_of_a_run_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Any, str] = {}
    monkeypatch.setattr(packs, "_chosen", seen)
    lm, lengths = model(kind), (70, 30)  # longer than the windows
    dataset = TokenDataset.from_examples([([3] * n, [True] * n) for n in lengths], "described")
    micro = MicroBatch(index=0, rows=((0, 1),), tokens=100, targets=98, weight=1.0)
    lm(collate(dataset, micro, packed=True, pad_token_id=0)).backward()
    asked = {(size, value_size, flags) for _, _, _, size, value_size, flags, *_ in seen}
    said = {
        (needs.size, needs.value_size, (needs.softcap, needs.sinks, needs.dropout, needs.window))
        for needs in needs_of(lm, torch.float32, max(lengths))
    }
    assert asked == said


def test_it_names_the_kernel_the_reasons_and_what_repeats() -> None:
    gpu = Platform("NVIDIA", (9, 0), (("flash_attn_3", "is not installed"), ("flash_attn", "is not installed")))
    (line,) = describe_attention(model("llama"), torch.bfloat16, 512, gpu)
    assert line.startswith("torch's varlen flash attention (FlashAttention-4: needs compute capability 10.0 to 10.3")
    assert "; FlashAttention-3: is not installed)" in line
    assert "equal up to rounding; train.deterministic: true makes them bit-identical" in line
    (line,) = describe_attention(model("gemma2"), torch.bfloat16, 512, gpu)
    assert line.startswith("torch's flex_attention (") and "bit-identical" not in line
    torch.use_deterministic_algorithms(True)
    try:
        (line,) = describe_attention(model("llama"), torch.bfloat16, 512, gpu)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "equal up to rounding" not in line


def test_on_a_cpu_and_over_padded_rows() -> None:
    lm = model("llama")
    assert describe_attention(lm, torch.float32, 512, CPU) == ["torch's flash attention for CPUs, sequence by sequence"]
    gpu = Platform("NVIDIA", (8, 0))
    padded = CausalLM(lm.model, packed=False)
    padded.model.set_attn_implementation("sdpa")
    assert describe_attention(padded, torch.float32, 512, CPU) == ["torch's SDPA, over padded rows"]
    (line,) = describe_attention(padded, torch.float32, 512, gpu)
    assert line.startswith("torch's SDPA, over padded rows; its backward pass adds in no fixed order")
    padded.model.set_attn_implementation("eager")
    assert describe_attention(padded, torch.float32, 512, gpu) == ["plain operations, over padded rows"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_the_kernels_that_a_recipe_names_have_the_same_losses(runs: Runs, packed: bool) -> None:
    cases = {
        word: Case(
            (
                "train.max_steps=2",
                "model.dropout=0",
                f"model.attention={word}",
                *(() if packed else ("data.pack_length=null",)),
            )
        )
        for word in ("auto", "eager", "sdpa")
    }
    trained = train(runs, cases, 1)
    losses = {word: each.column("loss") for word, each in trained.items()}
    assert difference(losses["eager"], losses["auto"]) < 1e-5 and losses["sdpa"] == losses["auto"]
    norms = {word: each.column("grad_norm") for word, each in trained.items()}
    assert (losses["eager"], norms["eager"]) != (losses["auto"], norms["auto"])  # another order of sums


@pytest.mark.slow
def test_a_run_with_an_impossible_kernel_does_not_start(runs: Runs) -> None:
    ended = runs.train("model.attention=flex").wait()
    assert ended.code == 2 and "model.attention: flex is not possible here" in ended.stderr
    run = runs.trained("model.attention=eager", "train.max_steps=2", ON_ROWS)
    (line,) = events(run, "start")[0]["attention"]
    assert line.startswith("plain operations") and "model.attention is eager" in line
