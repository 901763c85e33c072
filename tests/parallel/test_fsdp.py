"""A sharded run is the run of one process: losses, gradient norms, metrics, texts, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.conftest import from_directory
from tests.support.runs import ON_ROWS, Runs, difference, events
from tests.support.strategies import PASSES, PRECISIONS, TOLERANCE, Singles, assert_same, assert_table, case, steps
from tests.support.training import Case, Trained, train

SHARDED = {
    "fsdp on 2": (2, ("parallel.strategy=fsdp",)),
    "fsdp on 3": (3, ("parallel.strategy=fsdp",)),
    "hybrid 2x2": (4, ("parallel.strategy=fsdp", "parallel.replicate_size=2")),
}

# By the place of SHARDED, with a row of the table and what goes along with it: those of the fast tests, and others.
SOME = {
    "uneven": ("fsdp on 3", "fp32", "three passes", ("train.activation_checkpointing=full",)),
    "hybrid": ("hybrid 2x2", "fp32", "three passes", ()),
}
MORE = {
    "accumulated": ("fsdp on 2", "fp32", "three passes", ()),
    "recomputed selectively, kept gathered": (
        "fsdp on 2",
        "fp32",
        "three passes",
        ("train.activation_checkpointing=selective", "parallel.reshard_after_forward=false"),
    ),
    "recomputed": ("fsdp on 2", "fp32", "one pass", ("train.activation_checkpointing=full",)),
    "bf16, kept gathered": ("fsdp on 2", "bf16", "three passes", ("parallel.reshard_after_forward=false",)),
    "inner units": ("fsdp on 2", "fp32", "one pass", ("parallel.wrap=[LlamaMLP, LlamaDecoderLayer]",)),
    "offloaded": ("fsdp on 2", "bf16", "one pass", ("parallel.offload_parameters=true",)),
    "hybrid, kept gathered": ("hybrid 2x2", "bf16", "one pass", ("parallel.reshard_after_forward=false",)),
}


def trained_of(runs: Runs, rows: dict[str, tuple[str, str, str, tuple[str, ...]]]) -> dict[str, Trained]:
    trained: dict[str, Trained] = {}
    for where, (processes, sharding) in SHARDED.items():
        cases = {
            name: case((precision, passes, "kept"), 8, *sharding, *more)
            for name, (place, precision, passes, more) in rows.items()
            if place == where
        }
        trained |= train(runs, cases, processes) if cases else {}
    return trained


@pytest.fixture(scope="module")
def some(runs: Runs) -> dict[str, Trained]:
    return trained_of(runs, SOME)


@pytest.fixture(scope="module")
def more(runs: Runs) -> dict[str, Trained]:
    return trained_of(runs, MORE)


@pytest.mark.parametrize("name", SOME)
def test_a_sharded_run_is_the_run_of_one_process(some: dict[str, Trained], singles: Singles, name: str) -> None:
    _, precision, passes, _ = SOME[name]
    assert_same(some[name], singles[precision, passes], TOLERANCE[precision])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_sharded_runs_are_too(more: dict[str, Trained], singles: Singles, name: str) -> None:
    _, precision, passes, _ = MORE[name]
    assert_same(more[name], singles[precision, passes], TOLERANCE[precision])


def test_ranks_hold_their_share_and_no_more(some: dict[str, Trained], singles: Singles) -> None:
    whole = singles["fp32", "three passes"].bytes[0]
    for name, share in {"uneven": 1 / 3, "hybrid": 1 / 2}.items():
        assert [held / whole for held in some[name].bytes] == pytest.approx([share] * len(some[name].bytes), abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("where", SHARDED)
def test_the_whole_table(runs: Runs, where: str) -> None:
    assert_table(runs, *SHARDED[where])


@pytest.mark.slow
def test_checkpoints_move_between_strategies_and_numbers_of_processes(
    runs: Runs, singles: Singles, tmp_path: Path
) -> None:
    settings = (*PRECISIONS["fp32"], *PASSES["three passes"], "data.validation=8", *steps(8))
    stations = [
        (1, "single", ()),
        (2, "fsdp", ()),
        (3, "ddp", ()),
        (4, "fsdp", ("parallel.replicate_size=2",)),
        (3, "fsdp", ("parallel.reshard_after_forward=false",)),
        (1, "fsdp", ()),
        (4, "fsdp", ()),
        (2, "ddp", ()),
    ]
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, (processes, strategy, more) in enumerate(stations, start=1):
        case = Case((f"parallel.strategy={strategy}", *settings, *more), step, str(tmp_path))
        trained = train(runs, {"only": case}, processes)["only"]
        for name, values in found.items():
            values += trained.column(name)
    single = singles["fp32", "three passes"]
    for name, values in found.items():
        assert difference(values, single.column(name)) < 1e-5


@pytest.mark.parametrize(
    ("processes", "settings", "so"),
    [
        pytest.param(1, {}, {"by_input": False}, marks=pytest.mark.slow),
        (2, {}, {"recomputed": True, "discarded": True}),
        pytest.param(2, {}, {"muon": True}, marks=pytest.mark.slow),
        pytest.param(4, {"replicate_size": 2, "reshard_after_forward": False}, {}, marks=pytest.mark.slow),
        (3, {"reshard_after_forward": False}, {"tied_blocks": True}),
        pytest.param(4, {}, {}, marks=pytest.mark.slow),
        (4, {"replicate_size": 2}, {"tied_blocks": True}),
    ],
)
def test_anything_can_be_sharded(runs: Runs, processes: int, settings: dict[str, Any], so: dict[str, bool]) -> None:
    cases = [("fsdp", settings, so)]
    runs.function("tests.parallel.odd_models:train_as_plain_torch", cases, processes=processes)


FSDP = "parallel.strategy=fsdp"
FP32 = "train.mixed_precision=no"


@pytest.mark.slow
def test_weights_are_filled_into_shards_to_the_bit(runs: Runs, model_directories: dict[str, Path]) -> None:
    named = {kind: [FSDP, FP32, *from_directory(path)] for kind, path in model_directories.items()}
    cases = {
        "TensorWeights": [FSDP, FP32],
        "TensorWeights of a tied model, offloaded": [FSDP, FP32, "parallel.offload_parameters=true"],
        "FileWeights": named["as it is"],
        "FileWeights in units": [*named["as it is"], "parallel.wrap=[LlamaMLP, LlamaDecoderLayer]"],
        "TensorWeights of a renamed model": named["renamed"],
        "NoneType": named["stored twice"],
    }
    kinds = [name.split()[0] for name in cases]
    where = "tests.parallel.loading:weights_are_those_of_one_process"
    runs.function(where, list(cases.values()), kinds, processes=3)
    runs.function(where, [cases["TensorWeights"], cases["FileWeights"]], ["TensorWeights", "FileWeights"], processes=1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's account of memory")
def test_no_rank_has_memory_for_the_whole_model_but_one_that_gives_it_to_all(runs: Runs, tmp_path: Path) -> None:
    large = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}  # 99 million parameters
    sizes = [f"model.config.{key}={value}" for key, value in large.items()]
    runs.function("tests.parallel.loading:peak", [FSDP, FP32, *sizes], str(tmp_path), processes=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first < 1.25 and second < 0.75, (first, second)


def test_parameters_without_rows_for_every_rank_survive_a_checkpoint(runs: Runs, tmp_path: Path) -> None:
    where = "tests.parallel.odd_models:continue_from_checkpoints"
    runs.function(where, ["fsdp"], str(tmp_path), False, processes=4)
    runs.function(where, ["fsdp"], str(tmp_path), True, processes=2)


def test_ranks_use_the_whole_model_each_in_their_own_way(runs: Runs) -> None:
    runs.function("tests.parallel.odd_models:give_the_whole_model_to_each_rank_alone", ["fsdp"], processes=2)


@pytest.mark.slow
def test_texts_do_not_need_room_for_a_whole_copy(runs: Runs) -> None:
    fsdp = "parallel.strategy=fsdp"
    cases = [
        [fsdp, "train.mixed_precision=no"],
        [fsdp, "train.mixed_precision=bf16", "parallel.reshard_after_forward=false"],
        [fsdp, "train.mixed_precision=no", "parallel.wrap=[LlamaMLP, LlamaDecoderLayer]"],
        [fsdp, "train.mixed_precision=bf16", "parallel.offload_parameters=true"],
    ]
    runs.function("tests.parallel.generation:same_texts_without_room", cases, processes=2)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (["Block", "Blok"], ["Blok is not in the model", "Block, Linear"]),
        (["Embedding"], ["Embedding has its weights used from outside"]),
    ],
)
def test_classes_that_cannot_be_wrapped_are_refused(runs: Runs, wrap: list[str], words: list[str]) -> None:
    runs.function("tests.parallel.odd_models:refuse", "fsdp", {"wrap": wrap}, {}, ["parallel.wrap", *words])


def test_a_class_that_is_not_there_is_found_before_workers_start(runs: Runs) -> None:
    overrides = ("parallel.strategy=fsdp", "parallel.num_processes=2", "parallel.wrap=[LlamaDecoder]")
    started = runs.train(*overrides)
    ended = started.wait()
    assert ended.code == 2
    assert "LlamaDecoder is not in the model; what can be wrapped is " in ended.stderr
    assert "LlamaDecoderLayer" in ended.stderr and "rank" not in ended.stderr
    assert started.run is not None and not started.run.exists()


@pytest.mark.slow
def test_a_key_that_one_strategy_reads_chooses_it(runs: Runs) -> None:
    few = (ON_ROWS, "train.max_steps=2", "parallel.num_processes=2")
    start = events(runs.trained(*few, "parallel.wrap=[LlamaDecoderLayer]"), "start")[0]
    assert start["strategy"] == "fsdp"
    assert "parallel.strategy fsdp: required by parallel.wrap" in start["reasons"]
    ended = runs.train(*few, "parallel.offload_optimizer=true").wait()
    assert ended.code == 2
    assert (
        "parallel.offload_optimizer: has an effect only with zero1, zero2, zero3; set parallel.strategy" in ended.stderr
    )


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        (3, "cannot be divided into 3 equal replicas"),
        (2, "do not shard anything; lower it, or use parallel.strategy ddp"),
    ],
)
def test_replicas_that_do_not_fit_the_processes_are_refused(runs: Runs, replicas: int, said: str) -> None:
    sizes = ("parallel.num_processes=2", f"parallel.replicate_size={replicas}")
    ended = runs.train("parallel.strategy=fsdp", *sizes).wait()
    assert ended.code == 2
    assert "parallel.replicate_size" in ended.stderr and said in ended.stderr
