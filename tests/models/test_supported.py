"""Models that are no decoder-only language models are refused by their config.json, in the same words everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import PATIENCE, ROOT, environment
from trainwright.cli.main import app
from trainwright.errors import RequestError
from trainwright.models.configuration import read_config
from trainwright.models.resolve_model import check_directory
from trainwright.models.supported import check_supported
from trainwright.planning.facts import check_model, read_configuration
from trainwright.recipe.sections.model import ModelSection

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 300}  # fmt: skip
TEXT, VISION = {"text_config": {"model_type": "llama"}}, {"vision_config": {"model_type": "clip_vision_model"}}
# As published: google-t5/t5-small, facebook/bart-base, Qwen/Qwen2-VL-2B-Instruct, …
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
     "an encoder-decoder model (t5)"),
    ({"model_type": "mt5", "d_model": 512}, "an encoder-decoder model (mt5)"),
    ({"model_type": "bart", "architectures": ["BartModel"]}, "an encoder-decoder model (bart)"),
    ({"model_type": "made-up", "is_encoder_decoder": True}, "an encoder-decoder model (made-up)"),
    ({"model_type": "qwen2_vl", "hidden_size": 1536, **VISION}, "a vision-language model (qwen2_vl)"),
    ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}, **VISION},
     "a vision-language model (qwen2_5_vl)"),
    ({"model_type": "gemma3", **TEXT}, "a vision-language model (gemma3)"),
    ({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}, **VISION},
     "a vision-language model (mllama)"),
    ({"model_type": "of-next-year", **VISION, "auto_map": {"AutoModel": "m.M"}},
     "a vision-language model (of-next-year)"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder-only model (bert)"),
    ({"model_type": "xlm-roberta"}, "an encoder-only model (xlm-roberta)"),
    ({"model_type": "modernbert"}, "an encoder-only model (modernbert)"),
    ({"model_type": "whisper", "is_encoder_decoder": True}, "a speech or audio model (whisper)"),
    ({"model_type": "vit"}, "not a language model (vit)"),
    ({"model_type": "xlnet"}, "a permutation language model (xlnet)"),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "a classifier (llama)"),
    ({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"},
     "a diffusion model (UNet2DConditionModel)"),
    ({"model_type": "chatglm", "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLM"}},
     "a model with custom code, which is never run (chatglm)"),
    ({"model_type": ["llama"]}, "a configuration whose model_type is not a name (['llama'])"),
]  # fmt: skip
SENTENCE = " is {}; Trainwright trains decoder-only language models"


@pytest.mark.parametrize(("config", "what"), OTHERS, ids=[what for _, what in OTHERS])
def test_others_are_refused_by_what_they_are(config: dict[str, Any], what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = ModelSection(name=str(tmp_path))
    said = set()
    for look in (
        lambda: check_supported(config, f"model.name: {tmp_path}"),
        lambda: read_config(tmp_path),
        lambda: check_model(section),
        lambda: read_configuration(section),
    ):
        with pytest.raises(RequestError) as raised:
            look()
        said.add(str(raised.value))
    assert said == {f"model.name: {tmp_path}{SENTENCE.format(what)}"}
    if "model_type" in config:
        with pytest.raises(RequestError) as raised:
            check_model(ModelSection(config=config, tokenizer="bytes"))
        assert str(raised.value) == f"model.config{SENTENCE.format(what)}"


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "configuration.C"}},
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}, **VISION},
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], **TEXT, **VISION},
        {"model_type": "mamba"},
        {"model_type": "bloom"},
        {"model_type": "gpt"},
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "qwen2_moe"},
    ],
)
def test_language_models_are_not(config: dict[str, Any]) -> None:
    check_supported(config, "here")


@pytest.mark.parametrize(("kind", "what"), [("mamba", "a state-space model"), ("rwkv", "a recurrent model")])
def test_models_without_attention_can_be_asked_and_are_not_trained(tmp_path: Path, kind: str, what: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2}))
    section = ModelSection(name=str(tmp_path))
    assert read_config(tmp_path).model_type == kind
    for look in (lambda: check_model(section), lambda: read_configuration(section)):
        with pytest.raises(RequestError) as raised:
            look()
        assert (
            str(raised.value)
            == f"model.name: {tmp_path} is {what} ({kind}); Trainwright trains decoder-only transformers"
        )


def test_an_unknown_architecture_and_the_nearest_are_named() -> None:
    with pytest.raises(
        RequestError, match=r"of an architecture that transformers 5\S* does not have \(lama, perhaps ll"
    ):
        check_supported({**LLAMA, "model_type": "lama"}, "here")


def test_a_diffusion_pipeline_is_told(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(RequestError, match=r"is a diffusion model \(diffusers\); Trainwright trains decoder-only"):
        check_directory(tmp_path, "model.name")


def test_every_command_that_looks_at_a_recipe_says_it(tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text(json.dumps(OTHERS[0][0]))
    recipe, name = str(ROOT / "recipes" / "sft" / "tiny.yaml"), f"model.name={tmp_path / 't5'}"
    overrides = (name, "model.config=null", "model.tokenizer=null", "model.dropout=null")
    commands = (("recipe", "check"), ("plan",), ("train", "--dry-run"), ("train",))
    for command in commands:
        result = CliRunner().invoke(app, [command[0], *command[1:], recipe, *overrides])
        assert isinstance(result.exception, RequestError), (command, result.output)
        assert str(result.exception) == f"model.name: {tmp_path / 't5'}{SENTENCE.format(OTHERS[0][1])}"
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path / "t5")])
    assert isinstance(result.exception, RequestError) and "trains decoder-only" in str(result.exception)


def test_what_is_known_is_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from trainwright.models.supported import check_supported; "
        "check_supported({'model_type': 'llama'}, 'x', {'llama'}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=PATIENCE)
