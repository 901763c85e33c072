"""The Python of cards and messages is run as it stands, offline, by transformers and peft alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_merging import IDS, base, logits_of, trained
from tests.support.commands import PATIENCE, trainwright
from tests.support.commands import environment as variables
from trainwright.compatibility.gguf.export import export_gguf
from trainwright.errors import RequestError
from trainwright.models.files import save_model
from trainwright.models.gpt.model import register
from trainwright.models.load import load_config, load_model
from trainwright.models.merging import merge
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.models.usage import format_loading_code
from trainwright.recipe.sections.model import ModelSection
from trainwright.run.hub import build_published_settings, format_model_card
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, save_history_model

GPT = {"model_type": "gpt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
EVENTS = [
    {"event": "start", "max_steps": 2, "world_size": 1, "device": "a CPU", "strategy": "single",
     "mixed_precision": "no", "parameters": 1, "trainable_parameters": 1, "weights": "here"},
    {"event": "evaluate", "step": 2, "metrics": {"loss": 2.25}},
]  # fmt: skip
# Executes every block of a file of them, and keeps the logits of the model that each leaves.
RUNNER = """
import json, sys, torch
found, ids = {}, torch.tensor(json.loads(sys.argv[2]))
for name, block in json.load(open(sys.argv[1])).items():
    left = {}
    exec(compile(block, name, "exec"), left)
    with torch.no_grad():
        found[name] = left["model"].eval()(input_ids=ids).logits.float()
    assert left["tokenizer"]("a")["input_ids"], name
torch.save(found, sys.argv[3])
"""


def card_of(directory: Path, weights: Path, model: Mapping[str, Any], task: str = "sft") -> str:
    """The card of a run of ``model`` that left ``weights``."""
    directory.mkdir(parents=True)
    data = {"forget": "forget.jsonl", "retain": "retain.jsonl"} if task == "unlearn" else {"train": "rows.jsonl"}
    recipe = {"task": task, "model": dict(model), "data": data, "train": {"max_steps": 2}}
    (directory / "recipe.yaml").write_text(json.dumps(recipe))
    (directory / "events.jsonl").write_text(
        "".join(json.dumps({"time": 0.0, "step_time": 1.0, **event}) + "\n" for event in EVENTS)
    )
    return format_model_card(directory, f"me/{weights.name}", weights)


@pytest.mark.parametrize("kind", ["deep", "without a start", "a start of nothing", "a named pipe", "missing"])
def test_a_run_without_events_that_can_be_read_has_no_card(tmp_path: Path, kind: str) -> None:
    card_of(tmp_path / "run", tmp_path / "run", {"config": GPT, "tokenizer": "bytes"})
    file = tmp_path / "run" / "events.jsonl"
    content = {"deep": "[" * 100_000, "without a start": "", "a start of nothing": '{"event": "start", "time": 1}\n'}
    file.unlink()
    if kind in content:
        file.write_text(content[kind])
    elif kind == "a named pipe":
        os.mkfifo(file)
    with pytest.raises(RequestError, match="no card can be written without its events"):
        format_model_card(tmp_path / "run", "me/x", tmp_path / "run")


def block_of(card: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    return str(block)


def executed(blocks: Mapping[str, str], cwd: Path) -> dict[str, torch.Tensor]:
    (cwd / "blocks.json").write_text(json.dumps(blocks))
    command = [sys.executable, "-c", RUNNER, "blocks.json", json.dumps(IDS.tolist()), "logits.pt"]
    done = subprocess.run(command, cwd=cwd, env=variables(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(cwd / "logits.pt", weights_only=True)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_what_cards_say_runs_and_is_the_model(tmp_path: Path) -> None:
    place = tmp_path / "anywhere"  # with the model under its name, and beside it the bases that are not published
    (place / "me").mkdir(parents=True)
    plain = base(place / "plain-base", intermediate_size=128)  # bitsandbytes wants whole blocks of 64
    export_gguf(plain, place / "small.gguf", "f16")
    blocks, expected, cards = {}, {}, {}

    def add(name: str, model: dict[str, Any], logits: torch.Tensor, task: str = "sft") -> None:
        cards[name] = card_of(tmp_path / "runs" / name, place / "me" / name, model, task)
        blocks[name], expected[name] = block_of(cards[name]), logits

    whole = {"name": str(plain)}
    shutil.copytree(plain, place / "me" / "whole")
    add("whole", whole, logits_of(plain))
    shutil.copytree(plain, place / "me" / "unlearned")
    add("unlearned", whole, logits_of(plain), task="unlearn")
    section = ModelSection(config=GPT, tokenizer="bytes")
    register()
    own = load_model(section, torch.float32, 0)
    save_model(
        place / "me" / "gpt", load_config(section), own.state_dict(), build_bytes_tokenizer(), own.generation_config
    )
    add("gpt", {"config": GPT, "tokenizer": "bytes"}, own(input_ids=IDS).logits.detach(), task="pretrain")
    adapters = {
        "adapter": (plain, {}),
        "dora": (plain, {"type": "dora"}),
        "nf4": (plain, {"quantization": "nf4"}),
        "nf4-once": (plain, {"quantization": "nf4", "double_quantization": False}),
        "int8": (plain, {"quantization": "int8"}),
        "gguf": (place / "small.gguf", {}),
        "gguf-nf4": (place / "small.gguf", {"quantization": "nf4"}),
    }
    for name, (of, adapter) in adapters.items():
        saved, logits = trained(of, place / "me" / name, **adapter)
        add(name, saved.model_dump(exclude_defaults=True), logits)
    saved, logits = trained(plain, tmp_path / "to-merge")
    merge(saved, 0, place / "me" / "merged")
    add("merged", whole, logits)

    found = executed(blocks, place)
    for name, logits in expected.items():
        # LLM.int8() rounds activations as well, which training on its weights does not; a GGUF file stays unquantized.
        rtol, atol = (0.2, 0.2) if name == "int8" else (1e-3, 1e-3)
        if name == "gguf-nf4":
            assert torch.cosine_similarity(found[name].flatten(), logits.flatten(), dim=0) > 0.8
            continue
        torch.testing.assert_close(
            found[name], logits, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert str(tmp_path) not in "".join(cards.values())
    sent = build_published_settings(place / "me" / "gguf")
    assert sorted(sent) == ["adapter_config.json", "base_model.json"] and str(tmp_path) not in str(sent)
    named = json.loads(sent["base_model.json"])
    assert named["file"] == named["name"] == "small.gguf"
    assert build_published_settings(place / "me" / "whole") == {}
    said = " ".join(cards["gguf"].split())
    digest = re.search(r"SHA-256 ([0-9a-f]{64})", said)
    assert digest is not None and "small.gguf" in said and "F16" in said
    assert "base_model:" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_what_messages_say_runs_from_anywhere(tmp_path: Path) -> None:
    plain = base(tmp_path / "plain")
    export_gguf(plain, tmp_path / "small.gguf", "f32")
    (tmp_path / "elsewhere").mkdir()
    places = {"whole": plain, "adapter": tmp_path / "adapter", "gguf": tmp_path / "gguf"}
    expected = {"whole": logits_of(plain)}
    expected["adapter"] = trained(plain, places["adapter"])[1]
    expected["gguf"] = trained(tmp_path / "small.gguf", places["gguf"])[1]
    blocks = {name: str(format_loading_code(place, str(place))) for name, place in places.items()}
    for name, logits in executed(blocks, tmp_path / "elsewhere").items():
        torch.testing.assert_close(logits, expected[name], rtol=1e-4, atol=1e-4)


def test_an_adapter_on_fresh_weights_is_said_to_need_its_run(tmp_path: Path) -> None:
    section = {"config": {"model_type": "llama"}, "tokenizer": "bytes", "adapter": {"type": "lora"}}
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "adapter_config.json").write_text('{"base_model_name_or_path": "fresh llama"}')
    (tmp_path / "final" / "base_model.json").write_text('{"name": "fresh llama", "fingerprint": "0", "path": ""}')
    card = card_of(tmp_path / "run", tmp_path / "final", section)
    assert "```python" not in card and "trainwright merge RUN" in card


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["bandit", "gymnasium"])
def test_what_an_agent_s_card_says_evaluates_it(tmp_path: Path, environment: str) -> None:
    pytest.importorskip("gymnasium")
    lake = {"entry_point": "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", "tasks": [{}] * 4, "horizon": 5}
    options = lake if environment == "gymnasium" else {}
    made = make(environment, **options)
    tried = {"test_fraction": 0.5, "trial": {"episodes": 2, "copies": 1, "last_episodes": 1}}
    section = {"environment": environment, "environment_options": options, "context_length": 8, **tried}
    recipe = {"task": "algorithm_distillation", "train": {"max_steps": 2}, "algorithm_distillation": section}
    run, weights = tmp_path / "run", tmp_path / "run" / "final"
    run.mkdir()
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    (run / "events.jsonl").write_text(json.dumps({"time": 0.0, **EVENTS[0]}) + "\n")
    shape = HistoryShape(made.observation_counts, made.action_count, 16, 1, 2, "transition", "rotary", steps=8)
    about = {"environment": {"name": environment, "options": options}, "tried": tried}
    save_history_model(weights, shape, about, HistoryModel(shape, seed=0).named_parameters())
    card = format_model_card(run, "me/agent", weights)
    said, kept = (re.findall(rf"^```{kind}\n(.*?)^```", card, re.DOTALL | re.M)[0] for kind in ("sh", "yaml"))
    download, evaluate = (shlex.split(line) for line in said.splitlines())
    shutil.copytree(weights, tmp_path / download[-1])
    if "agent/recipe.yaml" in card:
        (tmp_path / "agent" / "recipe.yaml").write_text(kept)
    assert ("--trust-code" in evaluate) == ("agent/recipe.yaml" in card) == (environment == "gymnasium")
    ended = trainwright(*evaluate[1:], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
