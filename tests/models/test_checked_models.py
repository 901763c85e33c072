"""What ``trainwright recipe check`` and ``train`` say of a model before any of its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.support.runs import ON_ROWS, TINY
from trainwright.cli import main
from trainwright.errors import TrainwrightError
from trainwright.models.adapters.files import BaseModel
from trainwright.models.tokenization import build_bytes_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 258,
    "pad_token_id": 256,
}  # fmt: skip
PLAIN = ("model.config=null", "model.tokenizer=null", "model.dropout=null", ON_ROWS)


def model_in(directory: Path, kind: str = "llama", **fields: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | fields))).save_pretrained(directory)
    build_bytes_tokenizer().save_pretrained(directory)
    return directory


def ended(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, arguments)
    if isinstance(result.exception, TrainwrightError):  # what `trainwright` prints after "error: "
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, " ".join(result.output.split())


def check(model: object, *overrides: str) -> tuple[int, str]:
    return ended("recipe", "check", str(TINY), f"model.name={model}", *PLAIN, *overrides)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
def test_a_model_that_was_not_looked_at_is_not_called_ok() -> None:
    code, said = check("google/flan-t5-small")
    assert code == 0 and ": ok" not in said and "valid, but the model was not checked" in said
    assert "google/flan-t5-small: neither its configuration nor its files are on this machine" in said
    code, said = check("meta-llama/Llama-3.1-8B")
    assert code == 0 and ": ok: " in said and "meta-llama/Llama-3.1-8B: its files are not on this machine" in said


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B", "some/typo"])
def test_a_model_that_is_not_here_is_not_found_rather_than_too_large(name: str) -> None:
    code, said = ended("train", str(TINY), f"model.name={name}", *PLAIN, "--dry-run")
    assert code == 2 and f"model.name: {name} was not found" in said
    assert "; not in the Hugging Face cache;" in said and "incomplete" not in said and "fit" not in said


@pytest.mark.usefixtures("no_hub")
def test_an_incomplete_model_of_the_cache_is_called_so(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    model_in(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert check("some/model")[1].startswith(f"{TINY}: ok: ")
    (snapshot / "model.safetensors").unlink()
    code, said = ended("train", str(TINY), "model.name=some/model", *PLAIN, "--dry-run")
    assert code == 2 and "incomplete in the Hugging Face cache (" in said and "has no model.safetensors" in said


@pytest.mark.usefixtures("no_hub")
def test_a_revision_of_an_id_is_another_model(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "0" * 40), ("it-SFT", "1" * 40)):
        model_in(repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    (repository / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    assert check("some/model@it-SFT")[1].startswith(f"{TINY}: ok: ")
    assert check("some/model@" + "1" * 40)[1].startswith(f"{TINY}: ok: ")
    code, said = ended("train", str(TINY), "model.name=some/model", *PLAIN, "--dry-run")
    assert code == 2 and "incomplete" in said
    code, said = ended("train", str(TINY), "model.name=some/model@other", *PLAIN, "--dry-run")
    assert code == 2 and "some/model@other was not found" in said and "not in the Hugging Face cache" in said
    base = BaseModel("some/model@it-SFT", "", "some/model@it-SFT")
    assert base.repository == ("some/model", "it-SFT")
    assert BaseModel("/a@b/model", "", "/a@b/model").repository == ("/a@b/model", None)


def test_a_tokenizer_larger_than_the_embeddings_is_named(tmp_path: Path) -> None:
    directory = model_in(tmp_path / "model")
    tokenizer = build_bytes_tokenizer()
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(directory)
    code, said = check(directory)
    assert code == 0 and "the tokenizer has 260 tokens and the model 259 embeddings" in said and "(<extra>)" in said
    code, said = check(model_in(tmp_path / "other"), f"model.tokenizer={directory}")
    assert code == 2 and "model.tokenizer: it has 260 tokens, but the model has only 259 embeddings" in said


def adapter_of(base: Path, directory: Path, tokens: int | None = None) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(str(directory), save_embedding_layers=tokens is not None)
    return directory


def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = model_in(tmp_path / "model")
    wide = model_in(tmp_path / "wide" / "model", hidden_size=64)
    fitting = adapter_of(base, tmp_path / "fitting")
    assert check(base, f"model.adapter={{type: lora, start_from: {fitting}}}")[0] == 0
    resized = adapter_of(base, tmp_path / "resized", 300)
    code, said = check(base, f"model.adapter={{type: lora, start_from: {resized}}}")
    assert code == 2 and "an embedding of its own for 300 tokens, and model.name has 259" in said
    assert "set model.name to the model it was trained on" not in said
    code, said = check(wide, f"model.adapter={{type: lora, start_from: {fitting}}}")  # a model of the same name
    assert code == 2 and "does not fit" in said and "q_proj" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_all_linear_leaves_out_are_named(kind: str, tmp_path: Path) -> None:
    sizes = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16}}
    directory = model_in(tmp_path / "model", kind, num_experts_per_tok=2, **sizes[kind])
    said = "all-linear does not adapt the experts (mlp.experts.gate_up_proj, mlp.experts.down_proj)"
    assert said in check(directory, "model.adapter=lora")[1]
    assert said not in check(directory)[1]
    assert said not in check(directory, "model.adapter={type: lora, modules_to_save: [experts]}")[1]
    assert said not in check(directory, "model.adapter={type: lora, targets: [q_proj]}")[1]
    code, shown = ended("plan", str(TINY), f"model.name={directory}", *PLAIN, "model.adapter=lora", "--on", "1xH100")
    assert code == 0 and said in shown
    code, shown = check(directory, "model.adapter={type: lora, targets: [gate_up_proj]}")
    assert code == 2 and "in the experts it is a parameter" in shown
