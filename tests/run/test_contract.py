"""A run that would not be what its recipe says stops before the first step, on every rank, saying what differs."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, machine_file, started
from tests.support.runs import ON_ROWS, TINY, Runs, events
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.run.run_directory import record

RESOLVED = (
    ON_ROWS,
    "parallel.device=cpu",
    "train.mixed_precision=no",
    "train.compile=false",
    "train.activation_checkpointing=none",
    "train.max_steps=2",
    "logging.observers.tensorboard=false",
)


def directory(runs: Runs, processes: int, strategy: str = "ddp") -> Path:
    """A run that is ready for its workers."""
    run = runs.new_directory("contract")
    run.mkdir()
    wanted = (f"parallel.num_processes={processes}", f"parallel.strategy={strategy}")
    record(run, dump_recipe(load_recipe(TINY, [*RESOLVED, *wanted])), "tiny", [])
    return run


def refusal(runs: Runs, run: Path, kind: str, processes: int) -> str:
    """What every one of the processes says when it stops."""
    runs.function("tests.support.contract_entries:refused", kind, run, processes=processes)
    said = {(run / f"refused-{rank}").read_text() for rank in range(processes)}
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize(
    ("kind", "strategy", "expected"),
    [
        ("recipe", "ddp", "recipe: train.seed: 0 on ranks 0, 2, 1 on rank 1"),
        pytest.param(
            "setting",
            "ddp",
            "settings: precision of fp32 products: 'highest' on ranks 0, 2, 'high' on rank 1",
            marks=pytest.mark.slow,
        ),
        ("weights", "ddp", "weights: fingerprint: "),
        ("device", "ddp", "device: type: the run was planned for 'cuda', and it is 'cpu' on ranks 0-2"),
        pytest.param(
            "dtype",
            "ddp",
            "layout: forward dtype: the recipe asks for 'float32', and it is 'bfloat16' on rank 1",
            marks=pytest.mark.slow,
        ),
        ("another strategy", "fsdp", "layout: strategy: the recipe asks for 'fsdp', and it is 'ddp' on ranks 0-2"),
        pytest.param(
            "another strategy",
            "fsdp",
            "layout: placement: the recipe asks for 'rows over 3 ranks', and it is 'whole",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "alone",
            "ddp",
            "layout: gradient ranks: the recipe asks for 3, and it is 1 on rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_is_not_as_the_recipe_says_stops_all(runs: Runs, kind: str, strategy: str, expected: str) -> None:
    said = refusal(runs, directory(runs, 3, strategy), kind, 3)
    assert expected in said
    assert "to fix it: " in said


@pytest.mark.parametrize(("asked", "started"), [(2, 1), (2, 3), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_as_many_processes_as_were_asked_for(runs: Runs, asked: int, started: int) -> None:
    said = refusal(runs, directory(runs, asked, "ddp"), "none", started)
    assert f"processes: number: the recipe asks for {asked}, and it is {started} on rank" in said


@pytest.mark.slow
def test_an_environment_variable_on_one_rank_ends_every_worker_with_3(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    arguments = ("-m", "trainwright.worker", str(TINY), *RESOLVED, "parallel.num_processes=2", "data.limit=100")
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", **meeting}
            odd = {"NVIDIA_TF32_OVERRIDE": "1"} if rank else {}
            output = tmp_path / f"output-{rank}"
            workers.append(stack.enter_context(started(*arguments, cwd=tmp_path, output=output, **place, **odd)))
        assert [worker.wait(PATIENCE) for worker in workers] == [3, 3]
    said = "".join((tmp_path / f"output-{rank}").read_text() for rank in range(2))
    assert said.count("settings: NVIDIA_TF32_OVERRIDE: None on rank 0, '1' on rank 1") == 1, said
    assert not list(tmp_path.glob("runs/*/events.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallel.num_processes=1",), "whole (259 x 64), float32; "),
        pytest.param(("parallel.num_processes=2",), "whole, 2 copies (259 x 64), float32; ", marks=pytest.mark.slow),
        (("parallel.num_processes=2", "train.mixed_precision=bf16"), "bfloat16 (masters float32); "),
        pytest.param(
            ("parallel.num_processes=3", "parallel.strategy=fsdp"),
            "rows over 3 ranks (87 x 64 of 259 x 64), float32",
            marks=pytest.mark.slow,
        ),
        (
            ("parallel.num_processes=4", "parallel.strategy=fsdp", "parallel.replicate_size=2"),
            "rows over 2 ranks, 2 copies (130 x 64 of 259 x 64), float32; of 90,624 elements this rank holds 50.0%",
        ),
    ],
)
def test_the_start_event_says_how_the_model_lies(runs: Runs, overrides: tuple[str, ...], expected: str) -> None:
    run = runs.trained(ON_ROWS, "train.max_steps=2", *overrides)
    layout = events(run, "start")[0]["layout"]
    assert layout.startswith("model.model.embed_tokens.weight ")
    assert expected in layout


def test_a_machine_with_a_gpu_trains_on_its_cpu(runs: Runs, tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30, "capability": [9, 0]}
    run = tmp_path / "run"
    fixed = (*RESOLVED, "parallel.num_processes=1", f"logging.run_directory={run}")
    ended = runs.command("train", str(TINY), *fixed, TRAINWRIGHT_MACHINE=machine_file(tmp_path, gpus=[gpu])).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert events(run, "start")[0]["gpus"] == 0 and len(events(run, "step")) == 2
