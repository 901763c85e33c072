from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainwright.models.load import load_model, load_tokenizer
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.models.truncate_config import (
    count_layers,
    count_parameters,
    count_varied_layers,
    cut_config,
    cut_model,
)
from trainwright.recipe.sections.model import ModelSection

SMALL = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 4, "n_positions": 64},
    # One entry a layer says which kind of attention it has.
    "gemma3_text": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", 2),
        ("gemma3_text", 7),  # every sixth attends to all
        ("qwen3_next", 4),
        ("deepseek_v3", 4),  # the first three are dense
        ("jamba", 8),
    ],
)
def test_a_few_layers_have_one_of_every_kind(kind: str, layers: int) -> None:
    config = CONFIG_MAPPING[kind]()
    assert count_varied_layers(config) == layers
    assert count_layers(cut_config(config, layers)) == layers
    assert count_varied_layers(CONFIG_MAPPING["llama"](num_hidden_layers=1)) == 1


@pytest.mark.parametrize("kind", SMALL)
def test_a_fresh_model_has_its_first_layers(kind: str, tmp_path: Path) -> None:
    section = ModelSection(
        config={"model_type": kind, **SMALL[kind]}, tokenizer="bytes", dropout=0.1 * (kind == "gpt2")
    )
    whole = load_model(section)
    cut = load_model(cut_model(section, 2, tmp_path / "cut"))
    assert count_layers(whole.config) == 4
    assert count_layers(cut.config) == 2
    assert sum(p.numel() for p in cut.parameters()) == count_parameters(whole.config, 2)
    assert sum(p.numel() for p in whole.parameters()) == count_parameters(whole.config)
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("kind", SMALL)
def test_a_model_with_weights_keeps_those_of_its_first_layers(kind: str, tmp_path: Path) -> None:
    tokenizer = build_bytes_tokenizer()
    whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **SMALL[kind]))
    whole.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    section = cut_model(ModelSection(name=str(tmp_path / "whole")), 3, tmp_path / "cut")
    assert section.name == str(tmp_path / "cut")
    cut = load_model(section)
    assert count_layers(cut.config) == 3
    weights = whole.state_dict()
    for name, tensor in cut.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert len(load_tokenizer(section)) == len(tokenizer)
    assert count_layers(AutoConfig.from_pretrained(tmp_path / "whole")) == 4


def test_large_models_are_counted_without_being_made() -> None:
    config = CONFIG_MAPPING["llama"](
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_key_value_heads=8
    )
    assert count_parameters(config) == pytest.approx(69e9, rel=0.1)
