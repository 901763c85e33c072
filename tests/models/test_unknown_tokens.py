"""A tokenizer with more tokens than the model has embeddings: padding is no problem, other tokens are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from tests.data.test_templates import CHATML, IM, byte_level
from trainwright.cli.main import app
from trainwright.data.check import check_sources
from trainwright.data.rows.formats import EXAMPLES
from trainwright.errors import RequestError
from trainwright.inference.generation import Sampling, Stop, answer_batch
from trainwright.models.load import load_tokenizer
from trainwright.recipe.loading import build_recipe, dump_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.language_model import prepare_data
from trainwright.tasks.pretrain.task import prepare_once

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
EXTRA = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <extra>"}]}
ALONE = "parallel={strategy: single, num_processes: 1}"
MESSAGE = r"rows.jsonl:3: has the token '<extra>' \(id \d+\), but the model has only {} embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer got a padding token and another one after its embeddings were made."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(IM, CHATML, eos_token="<|im_end|>")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(directory)
    return directory


def test_rows_with_such_a_token_are_named_before_training(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW, EXTRA)))
    size = LlamaConfig.from_pretrained(model).vocab_size
    recipe = build_recipe(
        ["task=sft", f"model.name={model}", f"data={{train: {file}, validation: null, max_length: 64}}"], "test"
    )
    with pytest.raises(RequestError, match=MESSAGE.format(size)):
        prepare_data(recipe, load_tokenizer(recipe.model), tmp_path / "cache")
    result = CliRunner().invoke(app, ["data", "check", str(file), "--model", str(model), "--max-length", "64"])
    assert "embeddings; remove it from the rows" in " ".join(str(result.exception or result.output).split())
    for row, code in ((EXTRA, 2), (ROW, 0)):  # as in training, also in a late row
        file.write_text("".join(json.dumps(one) + "\n" for one in (*[ROW] * 20, row)))
        checked = CliRunner().invoke(app, ["recipe", "check", str(written(recipe, tmp_path / "recipe.yaml"))])
        said = " ".join(f"{checked.output} {checked.exception}".split())
        assert ("rows.jsonl:21: has the token '<extra>'" in said) == (code == 2), said
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW)))
    assert len(prepare_data(recipe, load_tokenizer(recipe.model), tmp_path / "cache").train) == 2


def written(recipe: RecipeSchema, file: Path) -> Path:
    file.write_text(dump_recipe(recipe))
    return file


def test_a_corpus_with_such_a_token_is_refused_before_pretraining(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Hello there", "Hello <extra>", "Hi")))
    data = f"data={{train: {file}, validation: null, max_length: 16}}"
    recipe = build_recipe(["task=pretrain", f"model.name={model}", data, ALONE], "test")
    with pytest.raises(RequestError, match=r"document 2: has the token '<extra>'"):
        prepare_once(recipe, tmp_path / "cache")
    (checked,) = check_sources(
        recipe, EXAMPLES, load_tokenizer(recipe.model), LlamaConfig.from_pretrained(model).vocab_size
    )
    assert "texts.jsonl:2: has the token '<extra>'" in checked.problems[0]


def test_prompts_are_padded_with_a_token_that_the_model_has(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = byte_level(IM, CHATML, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    prompts, sampling = [tokenizer("Hi")["input_ids"], tokenizer("Hello there, be brief")["input_ids"]], Sampling(4)
    together = answer_batch(loaded, tokenizer, prompts, sampling, Stop(frozenset()))
    alone = [answer_batch(loaded, tokenizer, [prompt], sampling, Stop(frozenset()))[0] for prompt in prompts]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    with pytest.raises(RequestError, match="the prompt has the token"):
        answer_batch(loaded, tokenizer, [[tokenizer.pad_token_id]], sampling, Stop(frozenset()))
