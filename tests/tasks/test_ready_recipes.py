"""The recipes for fine-tuning: planned for the machines they are for, and their architectures trained, small."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.runs import ROOT, ROWS, Runs, column, events
from trainwright.machine.describe import parse_machine
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import build_constraints, make_plan
from trainwright.recipe.loading import load_recipe

RECIPES = ROOT / "recipes"
FILES = sorted(file for task in ("sft", "dpo", "cpt") for file in (RECIPES / task).glob("*.yaml"))
ZERO_3 = ("model.adapter=none", "parallel.strategy=zero3")
MACHINES: list[tuple[str, str, tuple[str, ...]]] = [
    ("sft/quickstart", "1xT4", ()),
    ("sft/lora", "1xT4", ()),
    ("sft/qlora", "1xT4", ()),
    ("sft/smollm2-smoltalk", "4xA100-40GB", ()),
    ("sft/distributed", "2xRTX4090", ()),
    ("sft/zero2", "2xRTX4090", ()),
    ("sft/gemma-27b", "2xRTX4090", ()),
    ("sft/gemma-27b", "8xH100", ZERO_3),
    ("dpo/quickstart", "1xT4", ()),
    ("cpt/documents", "1xT4", ()),
    ("cpt/mixture", "1xT4", ()),
]
SHAPE = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
SMALL = {
    "smollm2-smoltalk": f"{{model_type: llama, {SHAPE}}}",
    "distributed": f"{{model_type: qwen2, {SHAPE}}}",
    "zero2": f"{{model_type: qwen2, {SHAPE}}}",
    "gemma-27b": f"{{model_type: gemma2, head_dim: 8, query_pre_attn_scalar: 8, sliding_window: 16, {SHAPE}}}",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_are_sound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipes' relative paths start
    assert load_recipe(path).task in ("sft", "dpo")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "overrides"), MACHINES)
def test_recipes_fit_the_machines_that_they_are_for(
    name: str, machine: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides)
    plan = make_plan(build_constraints(recipe), build_facts(recipe).workload, parse_machine(machine))
    assert plan.fits, plan
    if name == "sft/gemma-27b" and not overrides:
        whole = load_recipe(RECIPES / f"{name}.yaml", ["model.adapter=none"])
        assert not make_plan(build_constraints(whole), build_facts(whole).workload, parse_machine(machine)).fits


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_recipes_of_models_that_are_downloaded_train_small(runs: Runs, name: str) -> None:
    if name == "zero2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    small = ["model.name=null", f"model.config={SMALL[name]}", "model.tokenizer=bytes"]
    few = ["data.max_length=128", "train.max_steps=3", "train.epochs=null", "train.global_batch_size=4"]
    few += ["data.validation=8", "evaluate.every=3", "checkpoint.every=3", "optimizer.warmup_steps=0"]
    rows = [f"data.train={ROWS}", *(["data.pack_length=128"] if name != "smollm2-smoltalk" else [])]
    rows += [f"evaluate.prompts={json.dumps(['Spell lamp backwards.'])}", "evaluate.max_new_tokens=4"]
    run = runs.trained(*small, *few, *rows, "parallel.num_processes=2", recipe=RECIPES / "sft" / f"{name}.yaml")
    assert len(column(run, "loss")) == 3
    before, after = events(run, "evaluate")[0], events(run, "evaluate")[-1]
    assert after["metrics"]["loss"] < before["metrics"]["loss"]
    assert (run / "final" / "adapter_config.json").exists() is (name == "gemma-27b")
