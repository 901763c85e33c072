"""A run under DeepSpeed is the run of one process: losses, gradient norms, metrics, texts, checkpoints."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.conftest import from_directory
from tests.support.runs import ON_ROWS, Runs, column, difference, events
from tests.support.strategies import PASSES, PRECISIONS, TOLERANCE, Singles, assert_same, assert_table, case, steps
from tests.support.training import Case, Trained, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'deepspeed==0.19.*'"
)

SHARDED = {
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
    "zero3 offloaded": (
        "parallel.strategy=zero3",
        "parallel.offload_optimizer=true",
        "parallel.offload_parameters=true",
    ),
}
STAGES = ("zero1", "zero2", "zero3")
RECOMPUTED = ("train.activation_checkpointing=full",)

# Those of the fast tests.
SOME = {
    "zero2": ("zero2", "fp32", "three passes", ()),
    "zero3 offloaded": ("zero3 offloaded", "fp32", "three passes", ()),
}
MORE = {
    "zero1": ("zero1", "fp32", "three passes", ()),
    "zero3": ("zero3", "fp32", "three passes", ()),
    "zero2 with its optimizer offloaded": ("zero2", "fp32", "three passes", ("parallel.offload_optimizer=true",)),
    "zero3 recomputed": ("zero3", "fp32", "one pass", RECOMPUTED),
    "zero1 in bf16": ("zero1", "bf16", "three passes", ()),
    "zero2 in bf16": ("zero2", "bf16", "three passes", ()),
    "zero3 in bf16": ("zero3", "bf16", "one pass", ()),
    "zero1 with its optimizer offloaded": ("zero1", "bf16", "three passes", ("parallel.offload_optimizer=true",)),
    "zero3 offloaded in bf16": ("zero3 offloaded", "bf16", "three passes", ()),
    "zero2 recomputed": ("zero2", "fp32", "one pass", RECOMPUTED),
}


def trained(runs: Runs, cases: dict[str, tuple[str, str, str, tuple[str, ...]]]) -> dict[str, Trained]:
    return train(
        runs,
        {
            name: case((precision, passes, "kept"), 8, *SHARDED[sharding], *more)
            for name, (sharding, precision, passes, more) in cases.items()
        },
        2,
    )


@pytest.fixture(scope="module")
def some(runs: Runs) -> dict[str, Trained]:
    return trained(runs, SOME)


@pytest.fixture(scope="module")
def more(runs: Runs) -> dict[str, Trained]:
    return trained(runs, MORE)


@pytest.mark.parametrize("name", SOME)
def test_a_run_under_deepspeed_is_the_run_of_one_process(some: dict[str, Trained], singles: Singles, name: str) -> None:
    _, precision, passes, _ = SOME[name]
    assert_same(some[name], singles[precision, passes], TOLERANCE[precision])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_runs_under_deepspeed_are_too(more: dict[str, Trained], singles: Singles, name: str) -> None:
    _, precision, passes, _ = MORE[name]
    assert_same(more[name], singles[precision, passes], TOLERANCE[precision])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDED)
def test_the_whole_table(runs: Runs, sharding: str) -> None:
    assert_table(runs, 2, SHARDED[sharding])


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(runs: Runs, tmp_path: Path) -> None:
    settings = (*PRECISIONS["bf16"], *PASSES["three passes"], "data.validation=8", *steps(6))
    cases = {}
    for stage in STAGES:
        cases[stage, "uninterrupted"] = Case((*SHARDED[stage], *settings))
        cases[stage, "begun"] = Case((*SHARDED[stage], *settings), 4, str(tmp_path / stage))
        cases[stage, "continued"] = Case((*SHARDED[stage], *settings), None, str(tmp_path / stage))
    trained = train(runs, cases, 2)
    for stage in STAGES:
        uninterrupted, begun, continued = (trained[stage, part] for part in ("uninterrupted", "begun", "continued"))
        for name in ("loss", "grad_norm"):
            assert begun.column(name) + continued.column(name) == uninterrupted.column(name)
        assert continued.metrics()[-1] == uninterrupted.metrics()[-1]


@pytest.mark.slow
def test_checkpoints_move_between_strategies_and_numbers_of_processes(
    runs: Runs, singles: Singles, tmp_path: Path
) -> None:
    settings = (*PRECISIONS["fp32"], *PASSES["three passes"], "data.validation=8", *steps(8))
    stations = [
        (2, "zero1"),
        (3, "zero3"),
        (1, "single"),
        (3, "zero2"),
        (2, "fsdp"),
        (1, "zero3"),
    ]
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, (processes, strategy) in enumerate(stations, start=1):
        case = Case((f"parallel.strategy={strategy}", *settings), step, str(tmp_path))
        trained = train(runs, {"only": case}, processes)["only"]
        for name, values in found.items():
            values += trained.column(name)
    for name, values in found.items():
        assert difference(values, singles["fp32", "three passes"].column(name)[: len(stations)]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_what_is_exported_is_what_one_process_exports(runs: Runs, stage: str) -> None:
    settings = (ON_ROWS, "train.max_steps=6", "data.validation=8")
    one = runs.trained(*settings, "parallel.strategy=single")
    run = runs.trained(*settings, f"parallel.strategy={stage}", "parallel.num_processes=2")
    assert events(run, "start")[0]["parameters"] == events(one, "start")[0]["parameters"]
    assert difference(column(run, "loss"), column(one, "loss")) < 1e-5
    found, expected = (load_file(path / "final" / "model.safetensors") for path in (run, one))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert (run / "logs" / "rank-0.log").read_text() == ""


OFFLOADED = {"offload_optimizer": True}
OFFLOADED_3 = {"offload_optimizer": True, "offload_parameters": True}


@pytest.mark.slow
def test_weights_are_filled_into_shards_to_the_bit(runs: Runs, model_directories: dict[str, Path]) -> None:
    settings = {kind: from_directory(path) for kind, path in model_directories.items()}
    fp32, bf16 = (["parallel.strategy=zero3", f"train.mixed_precision={name}"] for name in ("no", "bf16"))
    cases = {
        "TensorWeights": fp32,
        "TensorWeights, masters beside": bf16,
        "FileWeights": [*fp32, *settings["as it is"]],
        "FileWeights, masters beside": [*bf16, *settings["as it is"]],
        "NoneType": [*fp32, *settings["stored twice"]],
    }
    kinds = [name.split(",")[0] for name in cases]
    where = "tests.parallel.loading:weights_are_those_of_one_process"
    runs.function(where, list(cases.values()), kinds, processes=2)


@pytest.mark.slow
def test_anything_can_be_sharded(runs: Runs) -> None:
    cases: list[tuple[str, dict[str, bool], dict[str, bool]]] = [
        ("zero1", {}, {"discarded": True}),
        ("zero1", OFFLOADED, {}),
        ("zero2", {}, {"recomputed": True}),
        ("zero2", OFFLOADED, {"discarded": True}),
        ("zero3", {}, {"discarded": True}),
        ("zero3", {}, {"recomputed": True}),
        ("zero3", OFFLOADED_3, {"recomputed": True, "discarded": True}),
    ]
    runs.function("tests.parallel.odd_models:train_as_plain_torch", cases, processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_a_number_of_processes_that_divides_nothing(runs: Runs, processes: int) -> None:
    cases: list[tuple[str, dict[str, bool], dict[str, bool]]] = [("zero2", {}, {}), ("zero3", {}, {})]
    runs.function("tests.parallel.odd_models:train_as_plain_torch", cases, processes=processes)


@pytest.mark.slow
def test_parameters_smaller_than_the_number_of_ranks_survive_a_checkpoint(runs: Runs, tmp_path: Path) -> None:
    where = "tests.parallel.odd_models:continue_from_checkpoints"
    runs.function(where, ["zero1", "zero3"], str(tmp_path), False, processes=4)
    runs.function(where, ["zero1", "zero3"], str(tmp_path), True, processes=2)


@pytest.mark.slow
def test_ranks_use_the_whole_model_each_in_their_own_way(runs: Runs) -> None:
    where = "tests.parallel.odd_models:give_the_whole_model_to_each_rank_alone"
    runs.function(where, ["zero2", "zero3"], processes=2)


@pytest.mark.slow
def test_texts_do_not_need_room_for_a_whole_copy(runs: Runs) -> None:
    cases = [
        ["train.mixed_precision=no", *SHARDED["zero3"]],
        ["train.mixed_precision=bf16", *SHARDED["zero3 offloaded"]],
    ]
    runs.function("tests.parallel.generation:same_texts_without_room", cases, processes=2)


def test_parameters_that_deepspeed_cannot_take_are_refused_by_name(runs: Runs) -> None:
    runs.function("tests.parallel.odd_models:refuse", "zero2", {}, {"has_number": True}, ["layers.0.scale"])


def test_ranks_hold_their_share_and_no_more(runs: Runs, tmp_path: Path) -> None:
    runs.function("tests.parallel.odd_models:weigh", ["single"], str(tmp_path))
    runs.function("tests.parallel.odd_models:weigh", ["zero1", "zero3"], str(tmp_path), processes=2)
    whole = int((tmp_path / "single-0").read_text())
    for rank in range(2):
        assert int((tmp_path / f"zero3-{rank}").read_text()) / whole == pytest.approx(0.5, abs=0.03)
        # Whole parameters, and half of the masters and of Adam's two moments.
        assert int((tmp_path / f"zero1-{rank}").read_text()) / whole == pytest.approx((1 + 3 / 2) / 3, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_offloaded_gradients_are_read_when_they_have_arrived(runs: Runs, strategy: str) -> None:
    runs.function("tests.parallel.entries:offloaded_gradients_are_awaited", strategy)
