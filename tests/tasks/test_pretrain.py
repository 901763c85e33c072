"""Pretraining: the same run however it is spread, what it says of itself, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import Muon as TorchMuon
from transformers import AutoModelForCausalLM

from tests.support.runs import ROOT, Runs, column, difference, events
from tests.support.slow import slow_but
from tests.support.training import Case, Trained, train
from trainwright.engine.optimizers.muon import Muon, orthogonalize
from trainwright.engine.progress import LossStatistics, Noise
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.planning.facts import build_facts
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import OptimizerSection
from trainwright.tasks.pretrain.task import count_token_bytes

RECIPES = sorted((ROOT / "recipes" / "pretrain").glob("*.yaml"))
GPT = "{model_type: gpt, variant: modern, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 128}"
# `tiny` as a pretraining of the guides; what a resolved recipe of another task has beside goes away.
BASE = (
    "task=pretrain",
    f"data.train={ROOT / 'docs'}",
    "data.format=documents",
    "data.limit=null",
    "data.validation=2",
    "data.max_length=64",
    "data.pack_length=64",
    "model.dropout=0",
    f"model.config={GPT}",
    "train.max_steps=8",
)
PHI3 = "{model_type: phi3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4, \
num_key_value_heads: 2, max_position_embeddings: 128, pad_token_id: 0}"
KINDS = {
    "documents": (),
    "contiguous": ("pretrain.windows=contiguous", "pretrain.z_loss=1e-3", "data.validation=0.1"),
    "muon": ("optimizer.name=muon", "optimizer.learning_rate=3e-3"),
    "growing": ("train.initial_batch_size=2", "train.batch_warmup_steps=4", "train.gradient_noise_scale=2"),
}
SPREAD = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp offloaded": ("parallel.strategy=fsdp", "parallel.offload_parameters=true"),
    "zero2": ("parallel.strategy=zero2",),
}


def case(*overrides: str) -> Case:
    return Case((*BASE, *overrides))


def test_a_run_learns_reports_bits_and_saves_what_transformers_loads(runs: Runs) -> None:
    (trained,) = train(
        runs, {"": case("train.max_steps=60", "evaluate.prompts=[The]", "evaluate.every=30")}, 1
    ).values()
    first, *_, last = trained.metrics()
    assert last["loss"] < first["loss"] - 0.5
    # A token of this tokenizer is a byte; only ends of documents are none.
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2), rel=0.02)
    step = next(event for event in trained.events if event["event"] == "step")
    assert step["metrics"]["bits_per_byte"] == pytest.approx(step["loss"] / math.log(2), rel=0.02)
    assert len(trained.texts()) == 3


@pytest.mark.parametrize("kind", slow_but("muon", among=KINDS))
def test_two_processes_train_as_one(runs: Runs, kind: str) -> None:
    one = train(runs, {"": case(*KINDS[kind])}, 1)[""]
    two = train(runs, {"": case(*KINDS[kind])}, 2)[""]
    _assert_same(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_trains_as_one_process(runs: Runs, kind: str) -> None:
    one = train(runs, {"": case(*KINDS[kind])}, 1)[""]
    spread = {name: how for name, how in SPREAD.items() if (kind, name) != ("muon", "zero2")}
    for trained in train(runs, {name: case(*KINDS[kind], *how) for name, how in spread.items()}, 2).values():
        _assert_same(one, trained)
    if kind == "muon":  # rows that do not divide evenly
        _assert_same(one, train(runs, {"": case(*KINDS[kind], "parallel.strategy=fsdp")}, 3)[""])


def _assert_same(one: Trained, other: Trained) -> None:
    assert other.column("tokens") == one.column("tokens")
    assert difference(other.column("loss"), one.column("loss")) < 1e-5
    for found, wanted in zip(other.metrics(), one.metrics(), strict=True):
        # Where two tokens are all but equally likely, the order of a sum decides which of them is the likeliest.
        expected = {name: pytest.approx(value, rel=1e-5) for name, value in wanted.items()}
        assert found == {**expected, "token_accuracy": pytest.approx(wanted["token_accuracy"], abs=1e-3)}
    keys = [[event["metrics"].keys() for event in trained.events if "metrics" in event] for trained in (one, other)]
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_a_fresh_phi3_is_sharded_by_its_layers_with_and_without_offload(runs: Runs) -> None:
    phi3 = (*BASE, f"model.config={PHI3}", "parallel.strategy=fsdp", "parallel.wrap=[Phi3DecoderLayer]")
    offloaded = (*phi3, "parallel.offload_parameters=true")
    cases = [[list(phi3), "cpu"], [list(offloaded), "cpu"]]
    runs.function("tests.tasks.pretrain_entries:wrapped_by_layer", cases, processes=2)
    one = train(runs, {"": case(f"model.config={PHI3}")}, 1)[""]
    for trained in train(runs, {0: Case(phi3), 1: Case(offloaded)}, 2).values():
        _assert_same(one, trained)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(runs: Runs) -> None:
    more = ("train.skip_loss_spikes=4", "train.gradient_noise_scale=2", "train.initial_batch_size=2")
    more = (*more, "train.batch_warmup_steps=5", "optimizer.name=muon")
    whole = train(runs, {"": case(*more)}, 1)[""]
    checkpoints = str(runs.new_directory("checkpoints"))
    before = train(runs, {"": Case((*BASE, *more), until=3, checkpoints=checkpoints)}, 1)[""]
    after = train(runs, {"": Case((*BASE, *more), checkpoints=checkpoints)}, 1)[""]
    assert before.column("loss") + after.column("loss") == whole.column("loss")
    steps = [event["metrics"] for event in whole.events if event["event"] == "step"]
    resumed = [event["metrics"] for event in after.events if event["event"] == "step"]
    assert resumed == steps[3:]


def test_a_budget_of_tokens_is_as_many_steps_as_have_them(runs: Runs) -> None:
    budget = ("train.max_steps=null", "train.max_tokens=6000", "pretrain.windows=contiguous", "data.validation=null")
    trained = train(runs, {"": case(*budget)}, 1)[""]
    assert trained.column("tokens")[-1] == pytest.approx(6000, abs=8 * 64)


@pytest.mark.slow
def test_shards_are_trained_on_and_refused_where_they_are_anothers(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    made = runs.command(
        "data", "tokenize", str(ROOT / "docs"), "--documents", "--tokenizer", "bytes", "--out", str(out)
    )
    assert made.wait().code == 0
    given = {"": case(f"data.train={out}", "data.format=auto")}
    assert train(runs, given, 1)[""].column("loss") == train(runs, {"": case()}, 1)[""].column("loss")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"include": str(ROOT / "recipes" / "sft" / "tiny.yaml"), "task": "pretrain"}))
    another = f"model.tokenizer=bpe:300:{ROOT / 'docs'}"
    ended = runs.train(f"data.train={out}", "data.limit=null", another, recipe=recipe).wait()
    assert ended.code == 2
    assert "was made with another tokenizer" in ended.stderr
    (out / "00000.tokens").write_bytes(b"x")
    ended = runs.train(f"data.train={out}", "data.limit=null", recipe=recipe).wait()
    assert ended.code == 2
    assert "00000.tokens is cut short" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-openwebtext", "phi3-fsdp", "llama-8b"])
def test_recipes_for_gpus_train_small(runs: Runs, tmp_path: Path, name: str) -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "pretrain" / f"{name}.yaml").read_text())
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    recipe["model"]["config"] |= {**small, "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 64}
    recipe["model"]["tokenizer"] = "bytes"
    if "pad_token_id" in recipe["model"]["config"]:
        recipe["model"]["config"]["pad_token_id"] = 256
    (tmp_path / "text.txt").write_text("some text, and more of it\n" * 2000)
    recipe["data"] |= {"train": str(tmp_path / "text.txt"), "max_length": 64, "validation": None}
    recipe["train"] |= {"max_tokens": 2000, "global_batch_size": 8, "mixed_precision": "no"}
    recipe["optimizer"]["warmup_steps"] = 1
    recipe["parallel"]["num_processes"] = 2
    recipe |= {"evaluate": {}, "checkpoint": {}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run = runs.trained(recipe=path)
    assert len(column(run, "loss")) == 4
    assert AutoModelForCausalLM.from_pretrained(run / "final").config.hidden_size == 32


@pytest.mark.slow
def test_stdlib_tiny_runs_as_a_user_starts_it(runs: Runs) -> None:
    short = ("train.max_steps=20", "optimizer.warmup_steps=5", "evaluate.max_new_tokens=16", "checkpoint.every=null")
    run = runs.trained(*short, "parallel.num_processes=2", recipe=ROOT / "recipes" / "pretrain" / "stdlib-tiny.yaml")
    assert column(run, "loss")[-1] < column(run, "loss")[0] - 1
    assert type(AutoModelForCausalLM.from_pretrained(run / "final")).__name__ == "Qwen3ForCausalLM"
    assert {event["prompt"] for event in events(run, "generate")} == {"def ", "import os\n\n", "class "}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read_and_planned(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    local = (f"data.train={tmp_path / 'text.txt'}",) if path.stem == "shakespeare" else ()
    # The vocabulary of a tokenizer that only the hub has is written down.
    tokenizer = () if path.stem in ("shakespeare", "stdlib-tiny") else ("model.tokenizer=bytes",)
    recipe = load_recipe(path, (*local, *tokenizer))
    facts = build_facts(recipe)
    assert facts.workload.facts.total > 0
    assert facts.workload.steps


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.max_tokens=0",), "max_tokens"),
        (("train.max_tokens=5",), "train.max_steps and train.max_tokens"),
        (("optimizer.name=muon", "parallel.strategy=zero2"), "muon needs whole rows, blocks or matrices"),
        (("train.initial_batch_size=2",), "batch_warmup_steps"),
        (("train.initial_batch_size=8", "train.batch_warmup_steps=5"), "not less than"),
        (("evaluate.metrics=[f1]",), "evaluate.metrics"),
        (("data.long_documents=cut",), "data.long_documents"),
        (("data.deduplicate=true",), "data.deduplicate"),
        (("task=sft", "pretrain={}"), "has no effect with task sft"),
        (("model.implementation=gpt",), "model.config.model_type to gpt"),
        (("model.adapter=lora",), "adapters need a model of transformers"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_recipe(ROOT / "recipes" / "sft" / "tiny.yaml", (*BASE, *overrides))


def test_muon_is_torchs_with_its_scale() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 16), [torch.randn(24, 16) for _ in range(3)]
    section = OptimizerSection(name="muon", learning_rate=0.01, weight_decay=0.1)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    muon = Muon([("blocks.0.weight", ours)], section)
    reference = TorchMuon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        reference.step()
    # It iterates in bf16.
    assert (ours - theirs).abs().max() < 0.02 * (theirs - start).abs().max()
    values = torch.linalg.svdvals(orthogonalize(torch.randn(30, 50)))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_the_noise_scale_of_gradients_that_are_known() -> None:
    generator, noise, found = torch.Generator().manual_seed(0), Noise(), None
    truth = torch.full((400,), 0.5)  # |G|^2 = 100, tr(S) = 400
    for _ in range(300):
        examples = truth + torch.randn(64, 400, generator=generator)
        found = noise.add((float(examples[:32].mean(0).norm()), 32.0), (float(examples.mean(0).norm()), 64.0))
    assert found == pytest.approx(4.0, rel=0.3)


def test_a_spike_is_left_out_and_a_new_level_is_not() -> None:
    losses = LossStatistics()
    steady = [2.0 + 0.01 * (step % 7) for step in range(100)]
    assert not any(losses.is_spike(loss, 6) for loss in steady)
    assert losses.is_spike(3.0, 6)
    assert not losses.is_spike(2.03, 6)
    assert [losses.is_spike(3.0, 6) for _ in range(12)].count(True) == 10


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    tokenizer = build_bytes_tokenizer()
    sizes = count_token_bytes(tokenizer, 300)
    text = "Größe — 1 €\n"
    assert sizes[tokenizer(text)["input_ids"]].sum() == len(text.encode())
    assert sizes[tokenizer.eos_token_id] == 0
