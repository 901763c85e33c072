"""What holds under every strategy, shown under each; what is a strategy's own is in its own file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.runs import Runs, difference
from tests.support.slow import slow_but
from tests.support.strategies import TOLERANCE, Singles, assert_same, assert_table, case, steps
from tests.support.training import Case, train

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'deepspeed==0.19.*'"
)
ZERO = ("zero1", "zero2", "zero3")
FP32 = "train.mixed_precision=no"


def using(strategy: str) -> str:
    return f"parallel.strategy={strategy}"


def every(*names: str, fast: str | None = None) -> list[object]:
    """Strategies as parameters of a test; those of DeepSpeed where it is. With ``fast``, the others are slow."""
    marks = {name: [needs_deepspeed] if name in ZERO else [] for name in names}
    for name in names:
        marks[name] += [pytest.mark.slow] if fast not in (None, name) else []
    return [pytest.param(name, marks=marks[name]) for name in names]


DDP = {
    "accumulated": ("fp32", "three passes", "kept"),
    "recomputed": ("fp32", "one pass", "recomputed"),
    "bf16, recomputed": ("bf16", "three passes", "recomputed"),
}


@pytest.mark.parametrize(
    "names", [("accumulated",), pytest.param(tuple(DDP)[1:], marks=pytest.mark.slow)], ids=" ".join
)
def test_ddp_is_the_run_of_one_process(runs: Runs, singles: Singles, names: tuple[str, ...]) -> None:
    trained = train(runs, {name: case(DDP[name], 8, using("ddp")) for name in names}, 2)
    for name in names:
        precision, passes, _ = DDP[name]
        assert_same(trained[name], singles[precision, passes], TOLERANCE[precision])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_the_whole_table_of_ddp(runs: Runs, processes: int) -> None:
    assert_table(runs, processes, (using("ddp"),))


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", slow_but(False, among=(False, True)))
@pytest.mark.parametrize("precision", slow_but("bf16", among=("no", "bf16", "fp16")))
def test_three_processes_round_as_one_does(runs: Runs, precision: str, deepspeed: bool) -> None:
    """Three is no power of two: a factor of the loss is rounded by every operation of a backward pass in bf16."""
    settings = (f"train.mixed_precision={precision}", "train.micro_batch_size=1", "train.global_batch_size=6")
    settings += ("data.validation=8", *steps(2))
    if deepspeed:
        pytest.importorskip("deepspeed")
    one = train(runs, {"one": Case((using("single"), *settings))}, 1)["one"]
    names = ZERO if deepspeed else ("ddp", "fsdp")
    for name, trained in train(runs, {name: Case((using(name), *settings)) for name in names}, 3).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, name
        assert difference(trained.column("grad_norm"), one.column("grad_norm")) < 2e-5, name


RECOMPUTED = ("train.activation_checkpointing=2", "train.activation_checkpointing=selective")


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_recomputes_some_of_it(runs: Runs, singles: Singles) -> None:
    row = ("fp32", "one pass", "kept")
    cases = {(stage, how): case(row, 8, using(stage), how) for stage in ZERO for how in RECOMPUTED}
    for found in train(runs, cases, 2).values():
        assert_same(found, singles["fp32", "one pass"], TOLERANCE["fp32"])


# Weights so large that gradients times the first loss scale are more than fp16 can hold.
OVERFLOWING = ("train.mixed_precision=fp16", "model.config.initializer_range=0.4", "data.validation=8", *steps(6))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", every("ddp", "fsdp", "zero2", fast="fsdp"))
def test_a_step_whose_fp16_gradients_overflow_is_done_again(runs: Runs, strategy: str) -> None:
    one = train(runs, {"one": Case((using("single"), *OVERFLOWING))}, 1)["one"]
    assert one.faults() and {fault["kind"] for fault in one.faults()} == {"overflow"}
    assert [event["step"] for event in one.events if event["event"] == "step"] == list(range(1, 7))
    several = train(runs, {"several": Case((using(strategy), *OVERFLOWING))}, 2)["several"]
    again = [[(fault["step"], fault["action"]) for fault in trained.faults()] for trained in (one, several)]
    assert again[0] == again[1]
    assert difference(several.column("loss"), one.column("loss")) < 2e-2
    assert several.column("tokens") == one.column("tokens")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", every("single", "ddp", "fsdp", "zero1", "zero2", "zero3"))
def test_compiled_blocks_give_the_same_run(runs: Runs, strategy: str) -> None:
    settings = (FP32, "train.micro_batch_size=1", "data.validation=8", *steps(4))
    plain = train(runs, {"plain": Case((using("single"), *settings))}, 1)["plain"]
    compiled = {"compiled": Case((using(strategy), "train.compile=true", *settings))}
    found = train(runs, compiled, 1 if strategy == "single" else 2)["compiled"]
    assert difference(found.column("loss"), plain.column("loss")) < 1e-5
    assert difference(found.column("grad_norm"), plain.column("grad_norm")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", every("ddp", "fsdp", "zero1", "zero2", "zero3"))
def test_plain_transformers_loads_what_was_trained(runs: Runs, tmp_path: Path, strategy: str) -> None:
    cases = [[using(strategy), FP32], [using(strategy), "train.mixed_precision=bf16"]]
    runs.function("tests.parallel.entries:exported_model_is_the_trained_one", cases, str(tmp_path), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", every("fsdp", "zero3", fast="fsdp"))
def test_the_head_is_gathered_once_for_all_chunks_of_the_loss(runs: Runs, strategy: str) -> None:
    runs.function("tests.parallel.entries:the_head_is_gathered_once", strategy, processes=2)


@pytest.mark.slow
def test_checkpoints_move_from_each_to_each_on_up_to_four(runs: Runs, singles: Singles, tmp_path: Path) -> None:
    settings = (FP32, "train.micro_batch_size=1", "train.global_batch_size=6", "data.pack_length=null")
    stations = [(4, "ddp"), (3, "fsdp"), (1, "single"), (4, "fsdp"), (2, "ddp"), (4, "fsdp hybrid"), (4, "ddp")]
    if importlib.util.find_spec("deepspeed") is not None:
        stations = [
            (4, "zero2"),
            (4, "ddp"),
            (4, "zero3"),
            (2, "fsdp"),
            (4, "zero1"),
            (1, "single"),
            (4, "zero3"),
            (3, "ddp"),
        ]
    losses: list[float] = []
    for number, (processes, name) in enumerate(stations, start=1):
        hybrid = ("parallel.replicate_size=2",) if name.endswith("hybrid") else ()
        overrides = (using(name.split()[0]), *hybrid, *settings, "data.validation=8", *steps(8))
        losses += train(runs, {"only": Case(overrides, number, str(tmp_path))}, processes)["only"].column("loss")
    expected = singles["fp32", "three passes"].column("loss")[: len(stations)]
    assert difference(losses, expected) < 1e-5
