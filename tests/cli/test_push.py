from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli.main import app
from trainwright.errors import MachineError, RequestError
from trainwright.recipe.loading import load_recipe

RECIPE = """
task: sft
model: {name: some/base}
data: {train: /home/somebody/secret/rows.jsonl}
train: {max_steps: 2, global_batch_size: 4}
"""
STEP = {"event": "step", "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 9, "target_tokens": 9,
        "tokens_per_second": 9.0, "step_time": 1.0, "memory_bytes": 9}  # fmt: skip
EVENTS = [
    {"event": "start", "max_steps": 2, "world_size": 2, "device": "a card", "strategy": "ddp",
     "mixed_precision": "bf16", "parameters": 1_000_000, "trainable_parameters": 1_000_000,
     "data": ["train: /home/somebody/secret/rows.jsonl, 40 rows"]},
    {"event": "evaluate", "step": 0, "metrics": {"loss": 3.0}},
    {**STEP, "step": 1, "loss": 2.5},
    {**STEP, "step": 2, "loss": 2.0},
    {"event": "evaluate", "step": 2, "metrics": {"loss": 2.25}},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "final").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"time": 0.0, "step_time": 1.0, **event}) + "\n" for event in EVENTS)
    )
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "final" / "model.safetensors").write_bytes(b"0" * 2_000_000)
    return tmp_path


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["push", *arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_dry_run_shows_the_files_and_the_card(run: Path) -> None:
    shown = invoke(str(run), "me/model", "--dry-run")
    assert "would upload 3 files, 2.0 MB, to https://huggingface.co/me/model" in shown
    assert "base_model: some/base" in shown and "library_name: transformers" in shown
    assert "| loss | 3.0000 | 2.2500 |" in shown
    assert "| 2 | 2.0000 | 2.2500 |" in shown
    assert "2 steps of 4 examples on 2 x a card (ddp, bf16)" in shown
    assert "train: rows.jsonl" in shown and "secret" not in shown
    upload = tw.push(run, "me/model", dry_run=True)
    assert f"{upload}\n" == shown and list(upload.files) == ["config.json", "model.safetensors"] and upload.url is None


def test_no_path_of_the_machine_is_in_the_card(run: Path) -> None:
    parts = "[{source: /home/somebody/secret/a.jsonl, weight: 2}, {source: ~/secret/b.jsonl}]"
    more = "{name: /home/somebody/secret/base, adapter: {type: lora, start_from: /home/somebody/secret/before}}"
    recipe = RECIPE.replace("/home/somebody/secret/rows.jsonl", parts).replace("{name: some/base}", more)
    (run / "recipe.yaml").write_text(recipe)
    (run / "final" / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/somebody/secret/base"}')
    shown = invoke(str(run), "me/model", "--dry-run")
    assert "secret/" not in shown.replace("/home/somebody/secret/rows.jsonl", "") and "base_model: " not in shown
    assert "source: a.jsonl" in shown and "source: b.jsonl" in shown and "start_from: before" in shown
    assert 'from_pretrained("base")' in shown


def test_the_card_has_no_job_and_no_copies(run: Path) -> None:
    private = {
        "launch": {"to": "secret-cluster", "account": "secret-account", "partition": "secret-part", "nodes": 37},
        "checkpoint": {"copies": ["s3://secret-bucket/runs"]},
        "logging": {"observers": {"prometheus": {"address": "secret-host:9000"}}},
    }
    (run / "recipe.yaml").write_text(
        RECIPE + "".join(f"{key}: {json.dumps(value)}\n" for key, value in private.items())
    )
    shown = invoke(str(run), "me/model", "--dry-run")
    (kept,) = re.findall(r"^```yaml\n(.*?)^```", shown, re.DOTALL | re.MULTILINE)
    assert "secret" not in kept and "37" not in kept
    (run / "again.yaml").write_text(kept)
    assert load_recipe(run / "again.yaml").task == "sft"


def test_a_text_that_begins_like_a_home_directory_is_no_path(run: Path) -> None:
    prompt = "~nobody-of-that-name answers"
    (run / "recipe.yaml").write_text(RECIPE + f'evaluate: {{prompts: ["{prompt}"]}}\n')
    assert prompt in invoke(str(run), "me/model", "--dry-run")


def test_an_adapter_is_said_to_be_one(run: Path) -> None:
    (run / "final" / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (run / "recipe.yaml").write_text(RECIPE.replace("{name: some/base}", "{name: some/base, adapter: dora}"))
    shown = invoke(str(run), "me/model", "--dry-run")
    assert "library_name: peft" in shown and "base_model_relation: adapter" in shown
    assert 'base = AutoModelForCausalLM.from_pretrained("some/base")' in shown
    assert 'PeftModel.from_pretrained(base, "me/model")' in shown and "An adapter (dora)" in shown


def test_a_model_made_from_a_packages_gguf_file_does_not_name_the_hubs_weights_as_its_base(run: Path) -> None:
    weights = "some/base from the package a-package 1.0 (base.Q4_1.gguf), dequantized to fp32"
    start = {**EVENTS[0], "weights": weights}
    lines = [json.dumps({"time": 0.0, "step_time": 1.0, **event}) + "\n" for event in (start, *EVENTS[1:])]
    (run / "events.jsonl").write_text("".join(lines))
    shown = invoke(str(run), "me/model", "--dry-run")
    assert "base_model" not in shown and f"A model made from {weights}" in shown


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_token_nothing_is_sent(run: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RequestError, match="HF_TOKEN"):
        invoke(str(run), "me/model")


def test_offline_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with pytest.raises(MachineError, match="HF_HUB_OFFLINE"):
        invoke(str(run), "me/model")


@pytest.mark.parametrize("repository", ["model", "a/b/c", "/"])
def test_a_repository_is_owner_and_name(run: Path, repository: str) -> None:
    with pytest.raises(RequestError, match="owner/name"):
        invoke(str(run), repository)


def test_only_finished_runs_are_sent(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a run"):
        invoke(str(tmp_path), "me/model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RequestError, match="--resume"):
        invoke(str(tmp_path), "me/model")
