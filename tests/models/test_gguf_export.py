from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.slow import slow_but
from trainwright.errors import RequestError
from trainwright.models.files.save import save_model
from trainwright.models.gguf.export import export_gguf
from trainwright.models.gguf.reading import write_converted
from trainwright.models.tokenization.bytes import bytes_tokenizer

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
    "gemma2": {**SIZES, "head_dim": 16, "final_logit_softcapping": 5.0},
    "gpt2": GPT2,
    "starcoder2": SIZES,
}


def make(family: str, directory: Path) -> None:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one and biases of zero would hide what is lost
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_model(directory, config, model.state_dict(), bytes_tokenizer(), model.generation_config)


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
    save_model(tmp_path / "model", config, model.state_dict(), bytes_tokenizer())
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
    from trainwright.models.source import resolve
    from trainwright.recipe.sections.model import ModelSection

    directory = resolve(ModelSection(name="HuggingFaceTB/SmolLM2-135M-Instruct")).directory
    assert directory is not None
    export_gguf(directory, tmp_path / "model.gguf", "f16")  # reads back logits and tokens itself
    assert (tmp_path / "model.gguf").stat().st_size < 280 * 10**6
