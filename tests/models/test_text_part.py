from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.support.runs import Runs, column
from tests.support.wholes import CONFIGS, write_whole
from trainwright.errors import RequestError
from trainwright.models.files import check_saved, save_model
from trainwright.models.load import load_model
from trainwright.models.text_part import read_causal
from trainwright.models.usage import format_loading_code
from trainwright.planning.facts import read_configuration
from trainwright.recipe.sections.model import ModelSection

IDS = torch.arange(20, 37)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS).logits
    return result


def whole(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_language_model_of_a_whole_model_is_read_and_saved_in_it(kind: str, tmp_path: Path) -> None:
    before = write_whole(kind, tmp_path / "whole")
    model = load_model(ModelSection(name=str(before)))
    assert torch.equal(logits(model), logits(whole(before)))
    for parameter in model.parameters():
        parameter.data += 0.01
    after = tmp_path / "after"
    tokenizer = AutoTokenizer.from_pretrained(before)
    checksums = save_model(after, model.config, model.state_dict(), tokenizer, model.generation_config)
    assert check_saved(after, checksums, IDS, logits(model)) is None
    assert torch.equal(logits(whole(after)), logits(model))
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    others = {name for name in old if "language_model" not in name and "text_model" not in name}
    assert changed and {name for name in changed & others if "lm_head" not in name} == set()
    assert (after / "preprocessor_config.json").read_text() == (before / "preprocessor_config.json").read_text()
    assert "AutoModelForImageTextToText" in str(format_loading_code(after, "model"))


def test_a_plan_is_of_the_language_model(tmp_path: Path) -> None:
    section = ModelSection(name=str(write_whole("gemma3", tmp_path / "whole")))
    assert read_configuration(section)["model_type"] == "gemma3_text"
    fresh = ModelSection(config=CONFIGS["gemma3"] | {"model_type": "gemma3"}, tokenizer="bytes")
    assert read_configuration(fresh)["model_type"] == "gemma3_text"


def test_overrides_are_of_the_language_model_and_saved(tmp_path: Path) -> None:
    before = write_whole("llava", tmp_path / "whole")
    model = load_model(ModelSection(name=str(before), overrides={"max_position_embeddings": 4096}))
    assert model.config.max_position_embeddings == 4096
    save_model(tmp_path / "after", model.config, model.state_dict(), AutoTokenizer.from_pretrained(before))
    saved = json.loads((tmp_path / "after" / "config.json").read_text())
    assert saved["text_config"]["max_position_embeddings"] == 4096 and saved["model_type"] == "llava"


def test_a_file_without_a_tensor_of_the_language_model_is_refused(tmp_path: Path) -> None:
    directory = write_whole("mistral3", tmp_path / "whole")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"lacks 9 tensors of MistralForCausalLM"):
        load_model(ModelSection(name=str(directory)))


def test_added_tokens_without_rows_are_refused(tmp_path: Path) -> None:
    directory = write_whole("gemma3", tmp_path / "whole")
    with pytest.raises(RequestError, match=r"model.added_tokens: .* is a model of several modalities"):
        load_model(ModelSection(name=str(directory), added_tokens=[f"<{n}>" for n in range(60)]))


_OF_WHOLES = (
    *("model.config=null", "model.tokenizer=null", "model.dropout=null", "data.pack_length=null", "train.max_steps=3"),
    *("model.chat_template=chatml", "parallel.num_processes=2"),
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole("gemma3", tmp_path_factory.mktemp("wholes") / "gemma3")


def test_training_is_the_same_under_every_strategy_and_the_whole_model_loads(gemma: Path, runs: Runs) -> None:
    ddp, fsdp = (
        runs.trained(*_OF_WHOLES, f"model.name={gemma}", f"parallel.strategy={name}") for name in ("ddp", "fsdp")
    )
    assert column(fsdp, "loss") == pytest.approx(column(ddp, "loss"), abs=1e-5)
    final = ddp / "final"
    trained = read_causal(final, dtype=torch.float32)
    assert torch.equal(logits(whole(final)), logits(trained))
    assert not torch.equal(logits(trained), logits(whole(gemma)))


def test_an_adapter_loads_on_the_whole_model_and_is_continued(gemma: Path, runs: Runs) -> None:
    lora = (*_OF_WHOLES, f"model.name={gemma}", "model.adapter.type=lora")
    final = runs.trained(*lora) / "final"
    adapted = PeftModel.from_pretrained(whole(gemma), final)
    states = load_file(final / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in states)
    assert "AutoModelForImageTextToText" in str(format_loading_code(final, "adapter"))
    assert not torch.equal(logits(adapted), logits(whole(gemma)))
    continued = runs.trained(
        *lora, f"model.adapter.start_from={final}", "train.max_steps=1", "optimizer.learning_rate=1e-30"
    )
    again = load_file(continued / "final" / "adapter_model.safetensors")
    assert again.keys() == states.keys() and all(torch.equal(again[name], states[name]) for name in states)
