"""Models without memory for their weights, and what fills them. Real processes: tests/parallel."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainwright.errors import RequestError
from trainwright.models.files import save_model
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.weights import FileWeights, TensorWeights, build_empty_model, load_empty
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World
from trainwright.recipe.sections.model import ModelSection

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FRESH = ModelSection(config={"model_type": "llama", **SIZES}, tokenizer="bytes")


@pytest.fixture
def stored(tmp_path: Path) -> ModelSection:
    """A model in a directory, in bf16."""
    model = load_model(FRESH, seed=3)
    tokenizer = load_tokenizer(FRESH)
    save_model(tmp_path / "model", model.config, model.state_dict(), tokenizer, model.generation_config, torch.bfloat16)
    return ModelSection(name=str(tmp_path / "model"))


def changed(section: ModelSection, **tensors: torch.Tensor | None) -> None:
    """Put tensors into a model's file; None removes one."""
    file = Path(str(section.name)) / "model.safetensors"
    content = load_file(file)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        content.pop(name) if tensor is None else content.__setitem__(name, tensor)
    save_file(content, file, metadata={"format": "pt"})


def test_an_empty_model_draws_nothing_and_has_its_buffers() -> None:
    before = torch.get_rng_state()
    empty = build_empty_model(load_config(FRESH))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in empty.parameters())
    whole = load_model(FRESH)
    buffers = dict(whole.named_buffers())
    assert buffers and buffers.keys() == dict(empty.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in empty.named_buffers())
    assert empty.get_output_embeddings().weight.shape == whole.get_output_embeddings().weight.shape


def test_rows_come_from_the_file_in_the_dtype_that_is_wanted(stored: ModelSection) -> None:
    loaded = load_empty(stored, seed=0, prefix="model.")
    assert loaded is not None and isinstance(loaded[1], FileWeights)
    whole = load_model(stored)
    name = "model.layers.1.mlp.up_proj.weight"
    expected = dict(whole.named_parameters())[name]
    block = Shard(torch.empty(10, 32), (48, 32), (20, 0))
    loaded[1].fill(f"model.{name}", block, ALONE)
    assert torch.equal(block.local, expected[20:30])
    nothing = Shard(torch.empty(0, 32), (48, 32), (48, 0))
    loaded[1].fill(f"model.{name}", nothing, ALONE)
    low = Shard(torch.empty(48, 32, dtype=torch.float16), (48, 32), (0, 0))
    loaded[1].fill(f"model.{name}", low, ALONE)
    assert torch.equal(low.local, expected.to(torch.float16))


def test_weights_of_another_file_have_another_fingerprint(stored: ModelSection) -> None:
    def fingerprint() -> str | None:
        loaded = load_empty(stored, seed=0)
        assert loaded is not None
        return loaded[1].fingerprint()

    first = fingerprint()
    assert first is not None and fingerprint() == first
    changed(stored, model__norm__weight=torch.full((32,), 2.0))
    assert fingerprint() != first


def test_tensors_that_are_not_used_are_named(stored: ModelSection, caplog: pytest.LogCaptureFixture) -> None:
    changed(stored, value_head__weight=torch.ones(4))
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        loaded = load_empty(stored, seed=0)
    assert loaded is not None and isinstance(loaded[1], FileWeights)
    assert "has 1 more than the model uses: value_head.weight" in caplog.text


def test_what_is_not_in_the_file_is_missed_by_the_rank_that_reads_it(stored: ModelSection) -> None:
    changed(stored, model__norm__weight=None)
    loaded = load_empty(stored, seed=0)
    assert loaded is not None and isinstance(loaded[1], TensorWeights)
    loaded[1].load(rank=1)
    with pytest.raises(RequestError, match=r"lacks 1 tensor of LlamaForCausalLM \(model\.norm\.weight\)"):
        loaded[1].load(rank=0)
