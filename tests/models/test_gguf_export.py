from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.slow import slow_but
from trainwright.compatibility.gguf.export import export_gguf
from trainwright.compatibility.gguf.reading import write_converted
from trainwright.errors import RequestError
from trainwright.models.files import save_model
from trainwright.models.tokenization import build_bytes_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 258,
    "pad_token_id": 256,
}  # fmt: skip
GPT2 = {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 258}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "mistral": {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 16},
    "gemma2": {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SIZES, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "phi3": {**SIZES, "sliding_window": None},
    "gpt2": GPT2,
    "starcoder2": SIZES,
}


def make(family: str, directory: Path, **fields: Any) -> None:
    config = AutoConfig.for_model(family, **(FAMILIES[family] | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one and biases of zero would hide what is lost
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_model(directory, config, model.state_dict(), build_bytes_tokenizer(), model.generation_config)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but("llama", "gemma2", "gpt2", among=FAMILIES))
def test_a_file_in_f32_is_read_back_as_the_model(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "model")
    size = export_gguf(tmp_path / "model", tmp_path / "out" / "model.gguf", "f32")
    assert size == (tmp_path / "out" / "model.gguf").stat().st_size
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.gguf"]
    write_converted(tmp_path / "out" / "model.gguf", tmp_path / "again", "test")
    texts = []
    for place in ("model", "again"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / place, dtype=torch.float32).eval()
        ids = torch.tensor([list(b"def main(")])
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False))
    assert torch.equal(texts[0], texts[1])


def fields_of(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ODD = LLAMA3 | {"rope_theta": 1000.0, "factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
FAST = YARN | {"beta_fast": 8.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0], "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
}  # fmt: skip
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rope", "keys"),
    [
        ("llama", LLAMA3, {"llama.rope.freq_base": 500000.0}),
        ("gemma3_text", GEMMA3, {"gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.factor": 8.0}),
        ("qwen2", YARN, {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.original_context_length": 32}),
        pytest.param("mistral", ODD, {"llama.rope.freq_base": 1000.0}, marks=pytest.mark.slow),
        pytest.param("phi3", LONG, {"phi3.rope.scaling.type": "longrope"}, marks=pytest.mark.slow),
        pytest.param("llama", LONG, {"llama.rope.scaling.type": "longrope"}, marks=pytest.mark.slow),
        pytest.param("qwen3", FAST, {"qwen3.rope.scaling.yarn_beta_fast": 8.0}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_rotary_embeddings_are_written_and_read_back(
    family: str, rope: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    make(family, tmp_path / "model", rope_parameters=rope)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f32")  # compares rotations at all distances itself
    found = fields_of(tmp_path / "model.gguf")
    assert {key: found.get(key) for key in keys} == keys
    write_converted(tmp_path / "model.gguf", tmp_path / "again", "test")
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval() for name in ("model", "again")
    )
    ids = torch.arange(1, 121)[None]
    with torch.no_grad():
        assert torch.allclose(one(ids).logits, other(ids).logits, atol=1e-4)


def test_llama3_factors_are_those_that_llama_cpp_divides_by(tmp_path: Path) -> None:
    """The formula of llama.cpp's converter, by hand."""
    from gguf import GGUFReader

    make("llama", tmp_path / "model", rope_parameters=LLAMA3)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    (stored,) = [each for each in GGUFReader(tmp_path / "model.gguf").tensors if each.name == "rope_freqs.weight"]
    expected = []
    for index in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * index / 16)
        smooth = (64 / wavelength - 1.0) / 3.0
        expected.append(1.0 if wavelength < 16 else 8.0 if wavelength > 64 else 1 / ((1 - smooth) / 8.0 + smooth))
    assert stored.tensor_type.name == "F32"
    assert stored.data.tolist() == pytest.approx(expected, rel=1e-5)
    assert AutoConfig.from_pretrained(converted(tmp_path)).rope_parameters == LLAMA3


def converted(directory: Path) -> Path:
    write_converted(directory / "model.gguf", directory / "again", "test")
    return directory / "again"


@pytest.mark.parametrize(
    ("family", "fields", "problem"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ("qwen3", {"rope_parameters": LLAMA3}, "rope_type llama3 of a qwen3"),
        ("gemma3_text", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar 24, .* readers take 16"),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 3}, "layer_types"),
    ],
)
def test_what_its_readers_would_compute_differently_is_refused(
    family: str, fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    make(family, tmp_path / "model", **fields)
    with pytest.raises(RequestError, match=problem):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_head_that_the_configuration_ties_is_written(tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, file, {"format": "pt"})
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f32")
    assert not AutoConfig.from_pretrained(converted(tmp_path)).tie_word_embeddings


def test_the_end_of_a_turn_is_in_the_file(tmp_path: Path) -> None:
    make("llama", tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    found = fields_of(tmp_path / "model.gguf")
    assert found["tokenizer.ggml.eos_token_id"] == found["tokenizer.ggml.eot_token_id"] == 258


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_a_sentencepiece_tokenizer_with_and_without_a_space_before_a_text(scheme: str, tmp_path: Path) -> None:
    make("llama", tmp_path / "model", vocab_size=320)
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.'"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for merged in ("\u2581a", "\u2581x", "he"):
        vocabulary[merged] = len(vocabulary)
    merges = [("\u2581", "a"), ("\u2581", "x"), ("h", "e")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    tokenizer.save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")  # compares tokens itself
    assert fields_of(tmp_path / "model.gguf")["tokenizer.ggml.add_space_prefix"] is (scheme == "first")
    again = PreTrainedTokenizerFast.from_pretrained(converted(tmp_path))
    for text in ("a hex", " he said x", "x"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert again(text, add_special_tokens=False).input_ids == ids
        assert again.decode(ids).lstrip() == tokenizer.decode(ids).lstrip()


def test_f16_halves_the_matrices(tmp_path: Path) -> None:
    from gguf import GGUFReader

    make("llama", tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # tied


def test_what_a_file_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt_neox", **{**SIZES, "num_key_value_heads": 4})
    model = AutoModelForCausalLM.from_config(config)
    save_model(tmp_path / "model", config, model.state_dict(), build_bytes_tokenizer())
    with pytest.raises(RequestError, match="gpt_neox; GGUF export supports llama"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    make("llama", tmp_path / "llama")
    (tmp_path / "taken.gguf").write_text("mine")
    with pytest.raises(RequestError, match="exists"):
        export_gguf(tmp_path / "llama", tmp_path / "taken.gguf")
    assert (tmp_path / "taken.gguf").read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llama", "model", "taken.gguf"]


@pytest.mark.slow
def test_a_real_model_and_its_tokenizer(tmp_path: Path) -> None:
    from trainwright.models.resolve_model import resolve
    from trainwright.recipe.sections.model import ModelSection

    directory = resolve(ModelSection(name="HuggingFaceTB/SmolLM2-135M-Instruct")).directory
    assert directory is not None
    export_gguf(directory, tmp_path / "model.gguf", "f16")  # reads back logits and tokens itself
    assert (tmp_path / "model.gguf").stat().st_size < 280 * 10**6
