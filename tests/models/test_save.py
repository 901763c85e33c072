"""Saving: what plain transformers loads has the same weights, and is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainwright.errors import TrainingError
from trainwright.models.files import save_model
from trainwright.models.load import load_model, load_tokenizer
from trainwright.recipe.sections.model import ModelSection

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "llama-tied": {**SIZES, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8},
    "phi3": {**SIZES, "pad_token_id": 0},
    "mistral": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "gpt_neox": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
}


def section(kind: str, **fields: Any) -> ModelSection:
    config = {"model_type": kind.split("-")[0], **CONFIGS[kind]}
    return ModelSection(config=config, tokenizer="bytes", **fields)


def stored_names(directory: Path) -> list[str]:
    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return names


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_loads_the_same_weights(kind: str, tmp_path: Path) -> None:
    model = load_model(section(kind), seed=3)
    tokenizer = load_tokenizer(section(kind))
    save_model(tmp_path / "m", model.config, model.state_dict(), tokenizer, model.generation_config)

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(loaded) is type(model)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) and v.dtype == expected[k].dtype for k, v in loaded.state_dict().items())
    ids = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)

    model.save_pretrained(tmp_path / "theirs")
    assert sorted(stored_names(tmp_path / "m")) == sorted(stored_names(tmp_path / "theirs"))
    ours, theirs = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("m", "theirs"))
    assert ours == theirs
    text = AutoTokenizer.from_pretrained(tmp_path / "m").apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_dtype_and_what_training_set_are_not_left_behind(tmp_path: Path) -> None:
    model = load_model(section("gpt2", dropout=0.5))
    model.set_attn_implementation("eager")
    assert model.config.resid_pdrop == 0.5
    save_model(
        tmp_path / "m",
        model.config,
        model.state_dict(),
        load_tokenizer(section("gpt2")),
        dtype=torch.bfloat16,
    )
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (written["resid_pdrop"], written["attn_pdrop"], written["dtype"]) == (0.1, 0.1, "bfloat16")
    assert not [k for k in written if k.startswith("_")]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    expected = model.state_dict()
    assert all(torch.equal(v, expected[k].bfloat16()) for k, v in loaded.state_dict().items())
    assert model.config.resid_pdrop == 0.5


def test_shards_from_an_iterator_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.models.files.SHARD_BYTES", 20_000)
    model = load_model(section("llama-tied"), seed=1)
    items: Iterator[tuple[str, torch.Tensor]] = iter(model.state_dict().items())
    save_model(tmp_path / "m", model.config, items, load_tokenizer(section("llama")))
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(stored_names(tmp_path / "m"))
    assert "lm_head.weight" not in index["weight_map"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in loaded.state_dict().items())
    again = load_model(ModelSection(name=str(tmp_path / "m")))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())


def test_failure_keeps_the_directory_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.models.files.SHARD_BYTES", 1000)
    model, tokenizer = load_model(section("llama"), seed=1), load_tokenizer(section("llama"))
    save_model(tmp_path / "m", model.config, model.state_dict(), tokenizer)
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    state = model.state_dict()

    def cut() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(state.items())[:4]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "m", model.config, cut(), tokenizer)
    with pytest.raises(TrainingError, match=r"without lm_head\.weight"):
        save_model(tmp_path / "m", model.config, list(state.items())[:-1], tokenizer)
    with pytest.raises(TrainingError, match=r"module\.x is not a tensor"):
        save_model(tmp_path / "m", model.config, {"module.x": state["lm_head.weight"]}, tokenizer)
    with pytest.raises(TrainingError, match=r"lm_head\.weight is \(3,\), not \(259, 32\)"):
        save_model(tmp_path / "m", model.config, {"lm_head.weight": torch.zeros(3)}, tokenizer)
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_disk_without_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    model, tokenizer = load_model(section("llama"), seed=1), load_tokenizer(section("llama"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_model(tmp_path / "m", model.config, model.state_dict(), tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG and str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_directory_and_leftovers_of_a_killed_save_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".m.tmp-1").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "stale.safetensors").write_bytes(b"x")
    model = load_model(section("llama"), seed=1)
    save_model(tmp_path / "m", model.config, model.state_dict(), load_tokenizer(section("llama")))
    assert os.listdir(tmp_path) == ["m"]
    assert not (tmp_path / "m" / "stale.safetensors").exists()
    modes = {p.name: p.stat().st_mode for p in (tmp_path / "m").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
