"""A run with an adapter is the same on any number of processes, goes on where it ended, and leaves what PEFT loads."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.parallel.generation import step
from tests.support.runs import ON_ROWS, ROOT, TINY, Runs, column, difference, events
from tests.support.training import Case, Trained, built, train
from trainwright.engine.checkpoints.checkpoint import CheckpointError, Checkpoints
from trainwright.engine.checkpoints.export import check_checkpoint, check_export, gather_parameters
from trainwright.engine.task import import_task_module
from trainwright.errors import TrainingError
from trainwright.machine.detect import detect
from trainwright.models.load import load_config
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.model import ModelSection
from trainwright.run.resolve import resolve

K = TypeVar("K", bound=Hashable)
FEW = (
    "model.dropout=0",
    "optimizer.learning_rate=3e-3",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "train.max_steps=8",
    "train.micro_batch_size=2",
    "data.validation=8",
)
MIXTRAL = tuple(
    f"model.config.{key}"
    for key in ("model_type=mixtral", "num_local_experts=4", "num_experts_per_tok=2", "tie_word_embeddings=false")
)
GPT2 = ("model.config=null", "model.config={model_type: gpt2, n_embd: 64, n_layer: 2, n_head: 4, n_positions: 512}")
ADAPTERS: dict[str, tuple[str, ...]] = {
    "lora": ("model.adapter={type: lora, rank: 4}",),
    "rslora": ("model.adapter={type: rslora, rank: 4}",),
    "dora": ("model.adapter={type: dora, rank: 4}",),
    "nf4": ("model.adapter={type: qlora, rank: 4}",),
    "int8": ("model.adapter={type: qlora, quantization: int8, rank: 4}",),
    "dora on nf4": ("model.adapter={type: dora, quantization: nf4, rank: 4}",),
    "lora with dropout": ("model.adapter={type: lora, rank: 4, dropout: 0.2}",),
    "lora and a tied head": ("model.adapter={type: lora, rank: 4, modules_to_save: [lm_head]}",),
    "lora on embeddings and head": (
        "model.config.tie_word_embeddings=false",
        "model.adapter={type: lora, rank: 4, targets: [embed_tokens, lm_head, q_proj, up_proj]}",
    ),
    "lora on experts": (
        *MIXTRAL,
        "model.adapter={type: lora, rank: 4, target_parameters: [experts.gate_up_proj, experts.down_proj]}",
    ),
    "lora on quantized experts": (
        *MIXTRAL,
        "model.adapter={type: qlora, quantize_experts: true, rank: 4, target_parameters: [experts.gate_up_proj, "
        "experts.down_proj]}",
    ),
    "oft": ("model.adapter={type: oft, block_size: 16}",),
    "oft on nf4": ("model.adapter={type: oft, quantization: nf4}",),
    "pissa": ("model.adapter={type: lora, rank: 4, initialization: pissa}",),
    "lora in some blocks": ("model.adapter={type: lora, rank: 4, layers: 1-1, targets: '.*mlp.*'}",),
    "lora in bf16": ("model.adapter={type: lora, rank: 4}", "train.mixed_precision=bf16"),
    "nf4 in bf16": ("model.adapter={type: qlora, rank: 4}", "train.mixed_precision=bf16"),
    "nf4 recomputed": ("model.adapter={type: qlora, rank: 4}", "train.activation_checkpointing=full"),
    "lora on gpt2": (*GPT2, "model.adapter={type: lora, rank: 4}"),
    "nf4 on gpt2": (*GPT2, "model.adapter={type: qlora, rank: 4}"),
}
# Those of the fast tests.
FEWER = ("lora", "nf4", "lora on embeddings and head", "lora on experts", "lora on quantized experts", "oft")
MORE = tuple(name for name in ADAPTERS if name not in FEWER)
ANY = (*FEWER, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE))
# The strategy with which fast tests train each of them in two processes.
FAST = {"ddp": ("lora on embeddings and head", "lora on experts"), "fsdp": ("lora", "nf4", "oft")}
SPREAD = [(strategy, name) for strategy, names in FAST.items() for name in names]
OTHERS = [(strategy, name) for strategy in FAST for name in ADAPTERS if (strategy, name) not in SPREAD]


def case(name: str, strategy: str, *more: str) -> Case:
    return Case((*FEW, *ADAPTERS[name], f"parallel.strategy={strategy}", *more))


class Groups(dict[K, Trained]):
    """Trainings by name; asked for one, it trains all of its group."""

    def __init__(self, runs: Runs, groups: Sequence[dict[K, Case]], processes: int) -> None:
        super().__init__()
        self._runs, self._groups, self._processes = runs, groups, processes

    def __missing__(self, key: K) -> Trained:
        group = next(group for group in self._groups if key in group)
        self.update(train(self._runs, group, self._processes))
        return self[key]


@pytest.fixture(scope="module")
def alone(runs: Runs) -> dict[str, Trained]:
    """Every adapter on one process."""
    return Groups(runs, [{name: case(name, "single") for name in names} for names in (FEWER, MORE)], 1)


def assert_same(trained: Trained, single: Trained, name: str) -> None:
    tolerance = 2e-3 if "bf16" in name else 1e-5
    assert difference(trained.column("loss"), single.column("loss")) < tolerance
    assert trained.metrics()[-1]["loss"] == pytest.approx(single.metrics()[-1]["loss"], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY)
def test_losses_fall(alone: dict[str, Trained], name: str) -> None:
    losses = alone[name].column("loss")
    assert losses[-1] < losses[0] - 0.03
    first, last = alone[name].metrics()[0], alone[name].metrics()[-1]
    assert last["loss"] < first["loss"] - 0.03


@pytest.fixture(scope="module")
def in_two(runs: Runs) -> dict[tuple[str, str], Trained]:
    """Every adapter on two processes, whole and in shards."""
    return Groups(runs, [{(s, name): case(name, s) for s, name in pairs} for pairs in (SPREAD, OTHERS)], 2)


@pytest.mark.parametrize(
    ("strategy", "name"), [*SPREAD, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_two_processes_train_as_one_does(
    alone: dict[str, Trained], in_two: dict[tuple[str, str], Trained], strategy: str, name: str
) -> None:
    assert_same(in_two[strategy, name], alone[name], name)


def test_only_what_is_trained_is_kept_in_checkpoints(
    alone: dict[str, Trained], in_two: dict[tuple[str, str], Trained]
) -> None:
    layer = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    # The weight, the two moments of AdamW, and the number of its steps for each matrix.
    expected = 2 * layer * 12 + 2 * 14 * 4
    for name in ("lora", "nf4"):
        assert alone[name].bytes == [expected]
        assert sum(in_two["fsdp", name].bytes) == pytest.approx(expected, rel=0.01)
        assert max(in_two["fsdp", name].bytes) < 0.51 * expected


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_deepspeed_trains_adapters_as_one_process_does(alone: dict[str, Trained], runs: Runs, strategy: str) -> None:
    trained = train(runs, {name: case(name, strategy) for name in ADAPTERS}, 2)
    for name in ADAPTERS:
        assert_same(trained[name], alone[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("nf4", "single"),
        ("dora", "ddp"),
        ("nf4", "fsdp"),
        ("lora", "fsdp"),
        ("oft", "ddp"),
        ("oft", "fsdp"),
        ("lora on experts", "ddp"),
        ("lora on experts", "fsdp"),
        ("lora on quantized experts", "fsdp"),
    ],
)
def test_a_run_goes_on_bit_for_bit(
    alone: dict[str, Trained],
    in_two: dict[tuple[str, str], Trained],
    runs: Runs,
    name: str,
    strategy: str,
) -> None:
    whole = alone[name] if strategy == "single" else in_two[strategy, name]
    directory = runs.new_directory("checkpoints")
    begun = replace(case(name, strategy), checkpoints=str(directory))
    processes = 1 if strategy == "single" else 2
    first = train(runs, {0: replace(begun, until=5)}, processes)[0]
    copy = Path(shutil.copytree(directory, runs.new_directory("checkpoints")))
    second = train(runs, {0: begun}, processes)[0]
    assert first.column("loss") + second.column("loss") == whole.column("loss")
    assert second.metrics() == whole.metrics()[-len(second.metrics()) :]
    # And on other processes, spread in another way, to rounding.
    other = {"single": ("fsdp", 2), "ddp": ("fsdp", 2), "fsdp": ("single", 1)}[strategy]
    elsewhere = train(runs, {0: replace(case(name, other[0]), checkpoints=str(copy))}, other[1])[0]
    assert difference(elsewhere.column("loss"), whole.column("loss")[5:]) < 1e-5


def read_back_without_room(cases: list[list[str]], directory: str) -> None:
    """What each of two processes does in the tests below."""
    world = join("cpu")
    for index, overrides in enumerate(cases):
        _, task, strategy = built(world, [*FEW, "evaluate.every=null", *overrides])
        step(task, strategy)
        final, different = Path(directory) / str(index), list[str]()
        tensors = gather_parameters(strategy, different)
        if world.is_main:
            task.export(tensors, final)
        for _ in tensors:
            pass
        world.barrier()
        check_export(task, strategy, final, different, available_memory=0)
        file = final / "adapter_model.safetensors"
        weights = load_file(file)
        world.barrier()
        if world.is_main:
            next(tensor for name, tensor in weights.items() if "lora_B" in name).mul_(3)
            save_file(weights, file, {"format": "pt"})
        world.barrier()
        with pytest.raises(TrainingError, match="with its base is not the trained model"):
            check_export(task, strategy, final, different, available_memory=0)
        world.barrier()
        assert not final.exists() and (final.with_name(f"{index}-failed-check") / file.name).is_file()
    leave()


@pytest.mark.slow
def test_an_adapter_is_read_back_where_no_rank_has_room_for_the_model(runs: Runs, tmp_path: Path) -> None:
    cases = [[*ADAPTERS[name], "parallel.strategy=fsdp"] for name in ("lora", "nf4", "lora in bf16")]
    runs.function("tests.engine.test_adapters:read_back_without_room", cases, str(tmp_path), processes=2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_an_adapter_is_read_back_where_no_rank_of_deepspeed_has_room(runs: Runs, tmp_path: Path) -> None:
    cases = [[*ADAPTERS["lora"], "parallel.strategy=zero3"]]
    runs.function("tests.engine.test_adapters:read_back_without_room", cases, str(tmp_path), processes=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `tiny` as plain transformers writes it."""
    directory = tmp_path_factory.mktemp("base")
    config = load_recipe(TINY).model.config
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(load_config(ModelSection(config=config, tokenizer="bytes"))).save_pretrained(
        directory
    )
    build_bytes_tokenizer().save_pretrained(directory)
    return directory


def on(base: Path, *more: str) -> tuple[str, ...]:
    fresh = ("model.config=null", "model.tokenizer=null", f"model.name={base}")
    return (ON_ROWS, *FEW, *fresh, "parallel.num_processes=2", *more)


def test_a_run_leaves_an_adapter_and_says_how_much_is_trained(runs: Runs, base: Path) -> None:
    run = runs.trained(*on(base, "model.adapter=qlora", "parallel.strategy=fsdp"))
    start = events(run, "start")[0]
    model = AutoModelForCausalLM.from_pretrained(base)
    added = sum(t.numel() for t in load_file(run / "final" / "adapter_model.safetensors").values())
    assert start["trainable_parameters"] == added
    assert start["parameters"] == model.num_parameters() + added
    assert events(run, "finish")[-1]["status"] == "finished"
    adapted = PeftModel.from_pretrained(model, run / "final")
    assert sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" in n) == added
    assert {p.name for p in (run / "final").iterdir()} >= {"adapter_config.json", "base_model.json", "tokenizer.json"}


@pytest.mark.slow
def test_a_run_goes_on_from_the_adapter_of_another(runs: Runs, base: Path) -> None:
    first = runs.trained(*on(base, "model.adapter={type: lora, rank: 4}"))
    start = ("model.adapter={type: lora}", f"model.adapter.start_from={first}")
    for stack in ("false", "true"):
        second = runs.trained(*on(base, *start, f"model.adapter.stack={stack}"))
        ended = events(first, "evaluate")[-1]["metrics"]["loss"]
        begun, last = (events(second, "evaluate")[i]["metrics"]["loss"] for i in (0, -1))
        assert begun == pytest.approx(ended, rel=1e-5)
        assert last < begun - 0.01
        rank = 4 if stack == "false" else 20
        assert json.loads((second / "final" / "adapter_config.json").read_text())["r"] == rank


@pytest.mark.slow
def test_a_run_is_not_resumed_on_other_frozen_weights(runs: Runs, base: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(base, tmp_path / "mine"))
    run = runs.trained(*on(mine, "model.adapter=lora", "train.max_steps=4"))
    weights = load_file(mine / "model.safetensors")
    weights["model.norm.weight"] += 0.1
    save_file(weights, mine / "model.safetensors", {"format": "pt"})
    ended = runs.resume(run, "train.max_steps=8").wait()
    assert ended.code == 2, ended.stderr
    assert "the frozen weights are not those of" in ended.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.adapter.targets=[q_proj, queries]",),
            "queries matches no linear module of LlamaForCausalLM; choose from ",
        ),
        (("model.adapter.start_from=nowhere",), "nowhere has no adapter_config.json (no such directory)"),
        (("model.adapter.stack=true",), "no adapter to stack on"),
        (("model.adapter.type=none", "model.adapter.rank=3"), "has no effect without an adapter"),
        (("model.adapter.type=none", "model.adapter.quantization=int8"), "nothing would be trained without an adapter"),
        (("model.adapter={type: oft, rank: 8}",), "rank: has no effect with oft, only with lora, dora"),
        (
            ("model.adapter={type: oft, block_size: 48}",),
            "48 does not divide the 64 inputs of model.layers.0",
        ),
        (("model.adapter=ia3",), "ia3 also scales the biases of its modules, which merge and export do not"),
        (("model.adapter.initialization=loftq",), "loftq needs the weights before their quantization"),
        (("model.adapter.quantize_experts=true",), "quantize_experts: has no effect without a quantization; set it to"),
        (("model.adapter.double_quantization=false",), "has no effect with quantization none, only with nf4"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    runs: Runs, base: Path, overrides: tuple[str, ...], message: str
) -> None:
    started = runs.train(*on(base, "model.adapter=lora", *overrides))
    ended = started.wait()
    assert ended.code == 2, ended.stdout + ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert started.run is not None and not started.run.exists()


@pytest.mark.parametrize("change", ["value", "zero", "shard"])
def test_a_checkpoint_that_is_not_the_adapter_is_not_kept(runs: Runs, tmp_path: Path, change: str) -> None:
    loaded = load_recipe(TINY, [ON_ROWS, *FEW, "model.adapter=lora", "parallel.num_processes=1"])
    recipe = resolve(loaded, detect()).recipe
    task = import_task_module(recipe).build(recipe, runs.directory / "cache")
    alone = World(0, 1, 0, 1, torch.device("cpu"))
    trained = {f"model.{name}": p.detach() for name, p in task.module.named_parameters() if p.requires_grad}
    if change != "zero":
        for name, tensor in trained.items():
            tensor.add_(0.01) if ".lora_B." in name else None
    shards = {name: Shard.full(tensor) for name, tensor in trained.items()}
    saved = Checkpoints(tmp_path, keep_last=1, keep_best=False).save(alone, 1, shards, {}, "")
    if change == "value":
        next(iter(trained.values()))[0, 0] += 1
    if change == "shard":
        lost = next(iter(shards))
        shards[f"{lost}.other"] = shards.pop(lost)
    with pytest.raises(CheckpointError, match="but reads back differently"):
        check_checkpoint(task, alone, saved.path, shards)
    assert not saved.path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_real_model_learns_from_its_recipe(runs: Runs, name: str) -> None:
    recipe = ROOT / "recipes" / "sft" / f"{name}.yaml"
    few = ("train.max_steps=6", "train.global_batch_size=4", "data.limit=300", "evaluate.prompts=[Hi]")
    run = runs.trained(*few, "parallel.num_processes=1", recipe=recipe)
    first, last = (events(run, "evaluate")[i]["metrics"]["loss"] for i in (0, -1))
    assert last < first - 0.02
    assert column(run, "loss")[0] < 5, "the model knows how to speak"
    base = json.loads((run / "final" / "base_model.json").read_text())
    assert base["name"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    start = events(run, "start")[0]
    assert start["parameters"] - start["trainable_parameters"] == 134_515_008
