"""A sharded run is the run of one process: losses, gradient norms, metrics, texts, checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.runs import Runs, difference
from tests.support.training import Case, Trained, train

PROMPTS = (
    "data.validation=8",
    "evaluate.every=4",
    'evaluate.prompts=["What is os?", "Hi", "a"]',
    "evaluate.max_new_tokens=8",
)
SHARDED = {
    "fsdp on 2": (2, ("parallel.strategy=fsdp",)),
    "fsdp on 3": (3, ("parallel.strategy=fsdp",)),
    "hybrid 2x2": (4, ("parallel.strategy=fsdp", "parallel.replicate_size=2")),
}
PRECISIONS = {"fp32": ("train.mixed_precision=no",), "bf16": ("train.mixed_precision=bf16",)}
# By the passes a process makes a step. Several processes share those of one; 3 of them need fillers.
PASSES = {
    "one pass": ("train.micro_batch_size=1", "train.global_batch_size=2", "data.pack_length=null"),
    "three passes": ("train.micro_batch_size=1", "train.global_batch_size=6", "data.pack_length=null"),
}
RECOMPUTE = {"kept": (), "recomputed": ("train.activation_checkpointing=full",)}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def steps(count: int) -> tuple[str, ...]:
    return (f"train.max_steps={count}",)


Singles = dict[tuple[str, str], Trained]


def trained_singles(runs: Runs, count: int) -> Singles:
    rows = itertools.product(PRECISIONS, PASSES)
    cases = {
        (precision, passes): Case(
            ("parallel.strategy=single", *PRECISIONS[precision], *PASSES[passes], *PROMPTS, *steps(count))
        )
        for precision, passes in rows
    }
    return train(runs, cases, 1)


@pytest.fixture(scope="module")
def singles(runs: Runs) -> Singles:
    return trained_singles(runs, 8)


def assert_same(trained: Trained, single: Trained, tolerance: float) -> None:
    assert difference(trained.column("loss"), single.column("loss")) < tolerance
    assert difference(trained.column("grad_norm"), single.column("grad_norm")) < 2 * tolerance
    for found, expected in zip(trained.metrics(), single.metrics(), strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
    if tolerance < 1e-3:
        assert trained.texts() == single.texts()


# A row of every kind, and every kind of thing that can go along with it. The slow test has all of them.
SOME = {
    "accumulated": ("fsdp on 2", "fp32", "three passes", ()),
    "recomputed": ("fsdp on 2", "fp32", "one pass", RECOMPUTE["recomputed"]),
    "recomputed selectively, kept gathered": (
        "fsdp on 2",
        "fp32",
        "three passes",
        ("train.activation_checkpointing=selective", "parallel.reshard_after_forward=false"),
    ),
    "bf16, kept gathered": ("fsdp on 2", "bf16", "three passes", ("parallel.reshard_after_forward=false",)),
    "inner units": ("fsdp on 2", "fp32", "one pass", ("parallel.wrap=[LlamaMLP, LlamaDecoderLayer]",)),
    "offloaded": (
        "fsdp on 2",
        "bf16",
        "one pass",
        ("parallel.offload_parameters=true",),
    ),
    "uneven": ("fsdp on 3", "fp32", "three passes", RECOMPUTE["recomputed"]),
    "hybrid": ("hybrid 2x2", "fp32", "three passes", ()),
    "hybrid, kept gathered": ("hybrid 2x2", "bf16", "one pass", ("parallel.reshard_after_forward=false",)),
}


@pytest.fixture(scope="module")
def some(runs: Runs) -> dict[str, Trained]:
    trained: dict[str, Trained] = {}
    for where, (processes, sharding) in SHARDED.items():
        cases = {
            name: Case((*sharding, *PRECISIONS[precision], *PASSES[passes], *more, *PROMPTS, *steps(8)))
            for name, (place, precision, passes, more) in SOME.items()
            if place == where
        }
        trained |= train(runs, cases, processes)
    return trained


@pytest.mark.parametrize("name", SOME)
def test_a_sharded_run_is_the_run_of_one_process(some: dict[str, Trained], singles: Singles, name: str) -> None:
    _, precision, passes, _ = SOME[name]
    assert_same(some[name], singles[precision, passes], TOLERANCE[precision])


def test_ranks_hold_their_share_and_no_more(some: dict[str, Trained], singles: Singles) -> None:
    whole = singles["fp32", "three passes"].bytes[0]
    for name, share in {"accumulated": 1 / 2, "uneven": 1 / 3, "hybrid": 1 / 2}.items():
        assert [held / whole for held in some[name].bytes] == pytest.approx([share] * len(some[name].bytes), abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("where", SHARDED)
def test_the_whole_table(runs: Runs, where: str) -> None:
    processes, sharding = SHARDED[where]
    singles = trained_singles(runs, 20)
    rows = list(itertools.product(PRECISIONS, PASSES, RECOMPUTE))
    cases = {
        (precision, passes, kept): Case(
            (
                *sharding,
                *PRECISIONS[precision],
                *PASSES[passes],
                *RECOMPUTE[kept],
                *PROMPTS,
                *steps(20),
            )
        )
        for precision, passes, kept in rows
    }
    for (precision, passes, _), trained in train(runs, cases, processes).items():
        assert_same(trained, singles[precision, passes], TOLERANCE[precision])


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
    ("processes", "replicate_size", "reshard", "recompute", "tied_blocks"),
    [
        (1, 1, True, False, False),
        (2, 1, True, True, False),
        (4, 2, False, False, False),
        (3, 1, False, False, True),
        (4, 1, True, False, False),
        (4, 2, True, False, True),
    ],
)
def test_anything_can_be_sharded(
    runs: Runs, processes: int, replicate_size: int, reshard: bool, recompute: bool, tied_blocks: bool
) -> None:
    settings = (replicate_size, reshard, recompute, tied_blocks)
    runs.function("tests.parallel.odd_models:trains_as_plain_torch", *settings, processes=processes)


def test_parameters_without_rows_for_every_rank_survive_a_checkpoint(runs: Runs, tmp_path: Path) -> None:
    where = "tests.parallel.odd_models:continues_from_a_checkpoint"
    runs.function(where, str(tmp_path), False, processes=4)
    runs.function(where, str(tmp_path), True, processes=2)


def test_discarded_gradients_leave_nothing(runs: Runs) -> None:
    runs.function("tests.parallel.odd_models:discards_gradients", processes=2)


def test_ranks_use_the_whole_model_each_in_their_own_way(runs: Runs) -> None:
    runs.function("tests.parallel.odd_models:gives_the_whole_model_to_each_rank_alone", processes=2)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (["Block", "Blok"], ["Blok is not in the model", "Block, Linear"]),
        (["Embedding"], ["Embedding has its weights used from outside"]),
    ],
)
def test_classes_that_cannot_be_wrapped_are_refused(runs: Runs, wrap: list[str], words: list[str]) -> None:
    runs.function("tests.parallel.odd_models:refuses", wrap, words)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [(3, "cannot be divided into 3 equal replicas"), (2, "shard nothing; make it less, or use parallel.strategy ddp")],
)
def test_replicas_that_do_not_fit_the_processes_are_refused(runs: Runs, replicas: int, said: str) -> None:
    sizes = ("parallel.num_processes=2", f"parallel.replicate_size={replicas}")
    ended = runs.train("parallel.strategy=fsdp", *sizes).wait()
    assert ended.code == 2
    assert "parallel.replicate_size" in ended.stderr and said in ended.stderr
