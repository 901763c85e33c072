"""Blocks that are traced with fake tensors: against those that are written down, and as a plan sees them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_operations import FAMILIES, PACK, ROWS, Shape, architecture_of
from trainwright.planning.architectures import traced
from trainwright.planning.facts import architecture_of as architecture_of_model
from trainwright.planning.memory.inventory import inventory
from trainwright.planning.operations import Device, PassSettings, block_kinds, block_pass
from trainwright.recipe.sections.model import ModelSection

SLOW = pytest.mark.slow
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=SLOW)])
@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", ROWS), pytest.param("llama", PACK, marks=SLOW), pytest.param("gpt2", ROWS, marks=SLOW)],
    ids=["llama, masked rows", "llama in packs", "gpt2, masked rows"],
)
def test_a_traced_block_is_the_one_that_is_written_down(family: str, shape: Shape, recompute: str) -> None:
    setting = PassSettings(architecture_of(family), shape.planned, Device("cpu", 1), 4)
    written = block_pass(setting, block_kinds(setting.architecture)[0], recompute)  # type: ignore[arg-type]
    config = json.dumps({"model_type": family, **FAMILIES[family]})
    found = traced.numbers(config, recompute, 4, shape.planned, input_wants=True)
    # What kernels work in is not seen, so peaks may be a little higher than traced.
    assert found["kept"] == pytest.approx(written.kept, rel=0.01, abs=4096)
    assert found["output"] == written.output
    assert found["forward_peak"] == pytest.approx(written.forward_peak, rel=0.1)
    assert found["evaluation_peak"] == pytest.approx(written.evaluation_peak, rel=0.1)
    assert sum(moment[1] for moment in found["moments"]) == written.gradients


def test_a_family_that_is_not_known_has_the_parameters_of_its_model(cache: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    a = architecture_of_model(ModelSection.model_validate({"config": OPT, "tokenizer": "bytes"}))
    values: dict[str, Any] = dict(OPT)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert inventory(a, 4, True).numel == sum(p.numel() for p in model.parameters())
    assert a.config and a.tied and a.learned_positions and not a.gated


@pytest.mark.slow
def test_the_second_plan_traces_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps(OPT)
    first = traced.numbers(config, "none", 4, ROWS.planned, input_wants=True)
    assert list((cache / "traces").iterdir())
    monkeypatch.setitem(sys.modules, "trainwright.planning.architectures.tracing", None)  # importing it now fails
    assert traced.numbers(config, "none", 4, ROWS.planned, input_wants=True) == first


def test_a_model_that_cannot_be_made_is_said_to_be_untraceable() -> None:
    with pytest.raises(traced.TraceError, match="no-such-family"):
        traced.layout(json.dumps({"model_type": "no-such-family"}))
