"""Packed, padded and one by one: the same model, the same losses, for every architecture that packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainwright.data.stream.batch import collate
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.models.causal_lm import CausalLM, check_model, compile_blocks, find_blocks
from trainwright.models.gpt.model import CACHE
from trainwright.models.supported import check_packable

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"head_dim": 16, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": WINDOW | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": WINDOW,
    "phi3": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {},
    "cohere": {"logit_scale": 0.1},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": WINDOW | {"num_local_experts": 4},
    "smollm3": {},
    "gpt_neox": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "glm4_moe": ROUTED | {"head_dim": 16},
    "deepseek_v2": ROUTED | LATENT | {"n_group": 1},
    "deepseek_v3": ROUTED | LATENT,
    # Of 40 tokens a document, 8 of which see each other, in two layers of three.
    "llama4_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 0],
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
    },
    "cohere2": WINDOW,
    "glm4": {"head_dim": 16},
    "ministral3": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
# From transformers 5.24 on, Falcon's own attention takes the beginnings of sequences from the positions.
KNOWS_PACKS = CACHE == "cache"
# Those that cannot be packed, and are trained on padded rows.
PADDED: dict[str, dict[str, Any]] = {
    "falcon": {"num_key_value_heads": None},
    "falcon-40b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-rw": {"model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "bloom": {"n_layer": 2, "n_head": 4, "num_hidden_layers": None, "num_attention_heads": None},
    "stablelm": {},
    "nemotron": {},
    "jamba": {
        "num_experts": 2,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "qwen3_next": EXPERTS
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "granitemoehybrid": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 32,
    },
}


def build(name: str) -> PreTrainedModel:
    settings = SIZES | (ARCHITECTURES.get(name) or PADDED.get(name, {}))
    settings = {key: value for key, value in settings.items() if value is not None}
    kind = settings.pop("model_type", name)
    if kind in ("gpt2", "mpt"):
        settings = {
            k: v
            for k, v in settings.items()
            if k not in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)  # far from uniform predictions
    return model


def examples() -> TokenDataset:
    generator = np.random.default_rng(0)
    pairs = [
        (generator.integers(3, 250, n).tolist(), (generator.random(n) < 0.7).tolist())
        for n in generator.integers(3, 40, 12)
    ]
    return TokenDataset.from_examples(pairs, "examples")


def loss_and_gradients(model: PreTrainedModel, *, pack: int | None, rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    data = examples()
    lm = CausalLM(model, packed=pack is not None).train()
    batch = Stream(data, StreamSettings(global_batch_size=12, seed=0, rows=rows, pack_length=pack)).global_batch(0)
    lm.zero_grad()
    losses = [lm(collate(data, micro, packed=pack is not None, pad_token_id=0)) for micro in batch.micro_batches]
    total = torch.stack(losses).sum() / batch.weight
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(name: str) -> None:
    model = build(name)
    padded_loss, padded = loss_and_gradients(model, pack=None, rows=3)
    packed_loss, packed = loss_and_gradients(model, pack=64, rows=2)
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)
    scale = max(grad.norm().item() for grad in padded.values())
    for key, grad in padded.items():
        assert (packed[key] - grad).norm().item() <= 1e-5 * scale, key


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2"])
def test_packed_logits_are_those_of_each_example_alone(name: str) -> None:
    model = build(name).eval()
    data = examples()
    micro = (
        Stream(data, StreamSettings(global_batch_size=4, seed=0, rows=4, pack_length=256))
        .global_batch(0)
        .micro_batches[0]
    )
    batch = collate(data, micro, packed=True, pad_token_id=0)
    head = model.get_output_embeddings()
    alone = []
    with torch.no_grad():
        for example in micro.examples:
            ids = torch.tensor(data.sequence(example)[0][None], dtype=torch.int64)
            alone.append(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
        packed = CausalLM(model, packed=True)._compute_hidden(batch)[0][0]
    torch.testing.assert_close(head(packed), head(torch.cat(alone)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "cohere"])
def test_an_objective_has_the_value_and_gradients_of_the_plain_computation(name: str) -> None:
    model = build(name)
    lm, batch = CausalLM(model, packed=True), probe()
    edges = [int(n) for n in batch.boundaries]
    document = torch.bucketize(batch.target_index, torch.tensor(edges[1:]), right=True)

    def objective(losses: torch.Tensor, batch: Any) -> torch.Tensor:
        sums = losses.new_zeros(len(edges) - 1).index_add(0, document, losses)
        return -torch.nn.functional.logsigmoid(sums[0] - sums[1] / 2).sum() + losses.square().mean()

    total = lm(batch, objective=objective)
    head, targets = lm.head(batch), batch.targets
    logits = (head.hidden @ head.weight.t()) * head.logit_scale
    if (cap := head.softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    plain = objective(torch.nn.functional.cross_entropy(logits, targets, reduction="none"), batch)
    torch.testing.assert_close(total, plain, rtol=1e-5, atol=1e-6)
    named = [p for p in lm.parameters() if p.requires_grad]
    for got, want in zip(torch.autograd.grad(total, named), torch.autograd.grad(plain, named), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def probe() -> Any:
    data = examples()
    micro = (
        Stream(data, StreamSettings(global_batch_size=3, seed=0, rows=3, pack_length=256))
        .global_batch(0)
        .micro_batches[0]
    )
    return collate(data, micro, packed=True, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDED)
def test_what_mixes_packed_documents_is_trained_padded_and_refused_in_packs(name: str) -> None:
    """By the model itself before it trains, and by its configuration before anything is loaded."""
    model = build(name)
    check_model(CausalLM(model, packed=False), probe())
    one, three = (loss_and_gradients(model, pack=None, rows=rows)[0] for rows in (1, 3))
    assert three == pytest.approx(one, rel=1e-5)
    if not (KNOWS_PACKS and name.startswith("falcon")):
        with pytest.raises(RequestError, match=r"data\.pack_length: .* does not keep packed sequences apart"):
            check_model(CausalLM(model, packed=True), probe())
    with pytest.raises(
        RequestError, match=r"data\.pack_length: .* does not keep packed sequences apart: .*; set it to"
    ):
        check_packable(model.config.to_dict(), 64)
    check_packable(model.config.to_dict(), None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_other_architecture_is_refused_in_packs(name: str) -> None:
    check_packable({"model_type": name, **ARCHITECTURES[name]}, 64)


def test_llama_4_is_packed_as_long_as_places_in_a_row_do_not_matter() -> None:
    config = {"model_type": "llama4_text", "floor_scale": 4096}
    check_packable(config, 4095)
    check_packable({**config, "attn_temperature_tuning": False}, 8192)
    with pytest.raises(RequestError, match="from token 4096 of a row on"):
        check_packable(config, 4096)


def test_a_hybrid_of_attention_alone_is_packed() -> None:
    check_packable({"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]}, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("packed", [True, False])
def test_the_check_passes_models_that_are_right(name: str, packed: bool) -> None:
    check_model(CausalLM(build(name), packed=packed), probe())


@pytest.mark.parametrize("name", ["bloom", "mamba", "stablelm"])
def test_the_check_refuses_architectures_that_mix_documents(name: str) -> None:
    settings = {"n_layer": 2, "n_head": 4} if name == "bloom" else {}
    ARCHITECTURES.setdefault(name, settings)
    try:
        model = build(name)
    finally:
        ARCHITECTURES.pop(name)
    with pytest.raises(RequestError, match=r"data\.pack_length"):
        check_model(CausalLM(model, packed=True), probe())


def test_the_check_refuses_a_head_it_does_not_know() -> None:
    model = CausalLM(build("llama"), packed=False)
    model._head["logit_scale"] = 0.5
    with pytest.raises(RequestError, match="logits"):
        check_model(model, probe())


def test_blocks_are_found_by_themselves() -> None:
    names = {name: type(find_blocks(build(name))[0]).__name__ for name in ("llama", "phi3", "gpt2")}
    assert names == {"llama": "LlamaDecoderLayer", "phi3": "Phi3DecoderLayer", "gpt2": "GPT2Block"}
    assert all(len(find_blocks(build(name))) == 2 for name in names)


def test_generation_uses_the_librarys_attention_and_gives_it_back() -> None:
    lm = CausalLM(build("llama"), packed=True).train()
    prompt = torch.tensor([[5, 6, 7]])
    with lm.open_for_generation() as model:
        text = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        fresh = build("llama").eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert text.tolist() == fresh.tolist()
    assert lm.training and lm.config._attn_implementation == "trainwright_packed"


def test_generation_has_no_dropout_and_training_goes_on_with_it_in_packs() -> None:
    lm = CausalLM(build("gpt2"), packed=True)
    for training in (True, False):
        lm.train(training)
        with lm.open_for_generation() as model:
            assert not any(part.training for part in model.modules())
            assert model.config._attn_implementation != "trainwright_packed"
        assert all(part.training is training for part in lm.modules())
        assert lm.config._attn_implementation == "trainwright_packed"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_are_compiled_whole_and_once_for_all_packs(name: str) -> None:
    """A part that the compiler cannot follow would divide a block, and attention would be chosen anew in every pass."""
    lm, data, graphs = CausalLM(build(name), packed=True).train(), examples(), []

    def compile_as_it_is(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_blocks([])
    for block in lm.blocks():
        block.compile(dynamic=True, fullgraph=True, backend=compile_as_it_is)
    batch = Stream(data, StreamSettings(global_batch_size=12, seed=0, rows=1, pack_length=80)).global_batch(0)
    for micro in batch.micro_batches[:3]:
        lm(collate(data, micro, packed=True, pad_token_id=0)).backward()
    assert len(graphs) == 1
