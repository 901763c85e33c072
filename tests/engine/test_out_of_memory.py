"""A run that meets the end of memory goes on with smaller micro-batches, and is the same run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.runs import ON_ROWS, TINY, Finished, Runs, column, difference, events
from tests.support.slow import slow_but
from tests.support.workers import by_hand
from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.event_reader import EventRecord
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage
from trainwright.engine.policies.micro_batch_halving import describe_remedy
from trainwright.machine.detect import detect
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.run.resolve import resolve
from trainwright.run.run_directory import read_reasons, record

# A few large tensors, which the C library maps one by one. In addition to what a forked process begins with, a run in
# micro-batches of 8 rows takes 650 to 700 MiB, of 4 rows 500 to 550, of 2 rows up to 400.
WIDE = (
    ON_ROWS,
    "data.pack_length=null",
    "model.dropout=0",
    "model.config.intermediate_size=24576",
    "model.config.num_hidden_layers=1",
    "train.global_batch_size=16",
    "train.micro_batch_size=8",
    "train.max_steps=4",
    "checkpoint.every=2",
)
ROOM = 600


def spread(count: int, strategy: str) -> tuple[str, ...]:
    return f"parallel.num_processes={count}", f"parallel.strategy={strategy}"


def limited(runs: Runs, mebibytes: int, *overrides: str) -> tuple[Path, Finished]:
    """A run whose every process has so much memory beside what it begins with."""
    run = runs.new_directory("run")
    arguments = ["train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *overrides]
    request = {"function": "tests.support.memory:trainwright", "arguments": [mebibytes, *arguments]}
    return run, runs._start({**request, "environment": {}}, None).wait()


def made(runs: Runs, *overrides: str) -> Path:
    """A run's directory as the launcher makes it."""
    run = runs.new_directory("made")
    run.mkdir()
    recipe = resolve(load_recipe(TINY, [*overrides, "logging.observers.tensorboard=false"]), detect()).recipe
    record(run, dump_recipe(recipe), "tiny", [])
    return run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def same_run(one: Path, other: Path) -> None:
    assert column(one, "tokens") == column(other, "tokens")
    assert difference(column(one, "loss"), column(other, "loss")) < 1e-5
    measured = [[event["metrics"]["loss"] for event in events(run, "evaluate")] for run in (one, other)]
    assert difference(*measured) < 1e-5 if measured[0] else not measured[1]


def rows_kept(run: Path) -> Any:
    return load_recipe(run / "recipe.yaml").train.micro_batch_size


PLACES = ("micro-batch 0, layer 1", "micro-batch 1, layer 0", "after the exchange")


def halvings(run: Path) -> list[EventRecord]:
    """The faults of a run that began with 8 rows: mostly one, more where the C library has scattered its memory."""
    faults = events(run, "fault")
    rows = [re.match(r"micro-batch (\d) -> (\d)[,;]", fault["action"]) for fault in faults]
    assert all(fault["kind"] == "out_of_memory" for fault in faults)
    found = [tuple(map(int, each.groups())) for each in rows if each]
    assert found and found == [(8, 4), (4, 2), (2, 1)][: len(faults)]
    assert rows_kept(run) == found[-1][1]
    return faults


@pytest.mark.slow
def test_one_process_goes_on_with_half_the_micro_batch(runs: Runs) -> None:
    few = (*WIDE, "train.global_batch_size=8", "data.validation=4", *spread(1, "single"))
    unlimited = runs.trained(*few)
    run, ended = limited(runs, ROOM, *few)
    assert ended.code == 0, ended.stdout + ended.stderr
    fault, *_ = halvings(run)
    assert fault["rank"] == 0 and "requested" in fault["detail"] and "ulimit -d" in fault["detail"]
    step = fault["step"]
    assert fault["action"] == f"micro-batch 8 -> 4, accumulation 1 -> 2; step {step} is repeated"
    assert fault["action"] in ended.stdout
    same_run(run, unlimited)
    assert len(events(run, "start")) == 1

    rows = rows_kept(run)
    kept = Checkpoints(run / "checkpoints", keep_last=2, keep_best=True)
    assert load_recipe(kept.path(4) / "recipe.yaml").train.micro_batch_size == rows
    assert read_reasons(run)[-1].startswith(f"train.micro_batch_size {rows}: {2 * rows} ran out of memory at step ")
    again = runs.trained(recipe=run / "recipe.yaml")
    assert events(again, "start")[0]["micro_batch_size"] == rows
    same_run(again, unlimited)


def test_a_shortage_says_what_was_asked_for_and_what_helps() -> None:
    def work() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")

    shortage = catch_shortage(work)
    assert isinstance(shortage, MemoryShortage)
    assert shortage.detail.startswith("1.0 MiB requested, ")
    recipe = load_recipe(TINY, ["parallel.strategy=single", "train.activation_checkpointing=none"])
    assert describe_remedy(recipe, 4) == "resume with train.micro_batch_size=2"
    assert describe_remedy(recipe, 1).startswith("try train.activation_checkpointing=full or a strategy that shards ")
    assert ") when resuming, or a smaller data.pack_length and data.max_length in a new run" in describe_remedy(
        recipe, 1
    )


@pytest.mark.slow
def test_ranks_that_did_not_run_out_do_the_step_again_with_the_one_that_did(runs: Runs) -> None:
    settings = (*WIDE, "train.global_batch_size=32")
    unlimited = runs.trained(*settings, *spread(2, "ddp"))
    run = runs.new_directory("run")
    fixed = (1, ROOM, str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    request = {"function": "tests.support.memory:worker", "arguments": [*fixed, *settings]}
    workers = [runs._start({**request, "environment": each}, None) for each in by_hand(2, free_port())]
    for worker in workers:
        ended = worker.wait()
        assert ended.code == 0, ended.stdout + ended.stderr
    fault, *_ = halvings(run)
    assert fault["rank"] == 1
    assert fault["action"].startswith("micro-batch 8 -> 4, accumulation 2 -> 4; step ")
    same_run(run, unlimited)


@pytest.mark.parametrize("where", slow_but(PLACES[1], among=PLACES))
def test_a_step_that_fails_anywhere_leaves_nothing_behind(runs: Runs, where: str) -> None:
    runs.function("tests.support.memory:abandon", where, processes=2)


@pytest.mark.slow
def test_sharded_ranks_are_started_again_with_half_the_micro_batch(runs: Runs) -> None:
    unlimited = runs.trained(*WIDE, *spread(2, "fsdp"))
    run, ended = limited(runs, ROOM, *WIDE, *spread(2, "fsdp"))
    assert ended.code == 0, ended.stdout + ended.stderr
    fault, *_ = halvings(run)
    assert fault["rank"] in (0, 1)
    assert fault["action"] == "micro-batch 8 -> 4; started again from the newest checkpoint"
    assert fault["action"] in ended.stdout and "error:" not in ended.stderr
    assert [start["micro_batch_size"] for start in events(run, "start")][:2] == [8, 4]
    same_run(run, unlimited)
    assert read_reasons(run)[-1].startswith(f"train.micro_batch_size {rows_kept(run)}: ")


@pytest.mark.slow
def test_several_nodes_are_started_again_together(runs: Runs) -> None:
    settings = (*WIDE, "parallel.strategy=fsdp", "parallel.num_processes=2")
    unlimited = runs.trained(*settings)
    run = runs.new_directory("run")
    fixed = ["train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *settings]
    place = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    request = {"function": "tests.support.memory:trainwright", "environment": {}}
    nodes = [
        runs._start({**request, "arguments": [ROOM, *fixed, *place, "--node-rank", str(index)]}, None)
        for index in range(2)
    ]
    for node in nodes:
        ended = node.wait()
        assert ended.code == 0, ended.stdout + ended.stderr
        assert "error:" not in ended.stderr
    fault, *_ = halvings(run)
    assert fault["action"] == "micro-batch 8 -> 4; started again from the newest checkpoint"
    assert [start["micro_batch_size"] for start in events(run, "start")][:2] == [8, 4]
    same_run(run, unlimited)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short rows to train on, and among them one that is longer than all others together."""
    path = tmp_path_factory.mktemp("rows") / "short.jsonl"
    rows = [{"question": f"{n}?", "answer": "x" * (230 if n == 20 else 5)} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "long.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": "y" * 230}) + "\n" for n in range(16)))
    return path


@pytest.mark.slow
def test_they_go_on_from_the_newest_checkpoint(runs: Runs, short: Path) -> None:
    settings = (
        *WIDE,
        f"data.train={short}",
        "data.validation=null",
        "data.max_length=256",
        "train.global_batch_size=8",
        "train.micro_batch_size=4",
        "train.max_steps=5",
        "checkpoint.every=1",
        *spread(2, "fsdp"),
    )
    unlimited = runs.trained(*settings)
    tokens = column(unlimited, "tokens")
    largest = max(range(5), key=lambda step: tokens[step] - (tokens[step - 1] if step else 0)) + 1
    assert largest > 2
    run, ended = limited(runs, ROOM, *settings)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert all(fault["detail"].endswith(f"at step {largest}") for fault in events(run, "fault"))
    assert [start["resumed_from"] for start in events(run, "start")][:2] == [None, largest - 1]
    same_run(run, unlimited)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("ddp", 2)])
def test_an_evaluation_is_done_again_in_halves_and_training_stays_as_it_is(
    runs: Runs, short: Path, long: Path, strategy: str, count: int
) -> None:
    sources = (f"data.train={short}", f"data.validation={long}", "data.max_length=256", "data.limit=20")
    settings = (*WIDE, *sources, *spread(count, strategy))
    unlimited = runs.trained(*settings)
    run, ended = limited(runs, 560, *settings)
    assert ended.code == 0, ended.stdout + ended.stderr
    faults = events(run, "fault")
    assert faults[0]["action"] == "validation in micro-batches of 4 instead of 8; it is repeated"
    assert all(fault["kind"] == "out_of_memory" and fault["action"].startswith("validation") for fault in faults)
    same_run(run, unlimited)
    assert rows_kept(run) == 8


@pytest.mark.parametrize(("strategy", "count"), [("single", 1), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_a_row_that_does_not_fit_ends_the_run_and_says_what_would(runs: Runs, strategy: str, count: int) -> None:
    packs = ("data.pack_length=1024", "data.max_length=128", "train.micro_batch_size=1", "train.global_batch_size=32")
    run, ended = limited(runs, 600, *WIDE, *packs, *spread(count, strategy))
    assert ended.code == 4, ended.stdout + ended.stderr
    assert "memory ran out on rank" in ended.stderr and "with micro-batches of 1 row:" in ended.stderr
    for fix in ("train.activation_checkpointing=full", "data.pack_length and data.max_length"):
        assert fix in ended.stderr
    assert ("parallel.strategy=fsdp" if strategy == "single" else "parallel.num_processes") in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(events(run, "start")) == 1
    if strategy == "single":
        assert events(run, "fault")[0]["action"] == "stop"


def test_a_kill_that_the_kernel_did_not_count_is_not_taken_for_the_end_of_memory(runs: Runs) -> None:
    started = runs.train(ON_ROWS, *spread(2, "ddp"), "train.max_steps=1000", "faults.restarts=off")
    started.wait_for_step(3)
    victim = max(psutil.Process(started.pid).children(recursive=True), key=lambda worker: worker.memory_info().rss)
    os.kill(victim.pid, signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 5 and "was killed by an external SIGKILL" in ended.stderr
    assert started.run is not None
    assert len(events(started.run, "start")) == 1
    assert [event["kind"] for event in events(started.run, "fault")] == ["failure"]
    assert rows_kept(started.run) == 2


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of its own, without a limit yet; the test is skipped where that needs other rights."""
    root = Path("/sys/fs/cgroup")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = [root / "memory" / path.lstrip("/") for _, names, path in lines if "memory" in names.split(",")]
    places += [root / path.lstrip("/") for _, names, path in lines if not names]
    group = places[0] / f"trainwright-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("cgroups cannot be made here")
    try:
        if _limit_file(group) is None:
            pytest.skip("cgroups have no memory controller here")
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break


def _limit_file(group: Path) -> Path | None:
    files = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
    return next((file for file in files if file.is_file()), None)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("fsdp", 2)])
def test_a_worker_that_the_kernel_kills_for_memory_is_started_again(
    runs: Runs, cgroup: Path, strategy: str, count: int
) -> None:
    settings = (*WIDE, *spread(count, strategy))
    unlimited = runs.trained(*settings)
    limit = _limit_file(cgroup)
    assert limit is not None
    limit.write_text(str(count * ROOM * 2**20))
    run = runs.new_directory("run")
    arguments = ["train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *settings]
    function = "tests.support.memory:trainwright_in_cgroup"
    request = {"function": function, "arguments": [str(cgroup), *arguments], "environment": {}}
    ended = runs._start(request, None).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    faults = events(run, "fault")
    assert faults and all(fault["kind"] == "out_of_memory" for fault in faults)
    assert faults[0]["detail"] == "the kernel killed the process"
    assert faults[0]["action"] == "micro-batch 8 -> 4; started again from the newest checkpoint"
    same_run(run, unlimited)


def test_what_a_run_took_is_beside_what_was_predicted(runs: Runs) -> None:
    run = made(runs, ON_ROWS, *spread(1, "single"), "train.max_steps=5", "train.global_batch_size=2")
    plan = json.loads((run / "plan.json").read_text())
    predicted = {"memory_bytes": 2**30, "tensors_bytes": 2**20, "step_time": 1.0, "tokens_per_second": 1000.0}
    (run / "plan.json").write_text(json.dumps({**plan, "predicted": predicted}))
    runs.function("tests.support.memory:work", str(run))
    assert events(run, "start")[0]["predicted"] == predicted
    measured = events(run, "finish")[0]["measured"]
    # After the steps the model is saved and read back.
    assert max(column(run, "memory_bytes")) <= measured["memory_bytes"] < 1.1 * max(column(run, "memory_bytes"))
    rate = sorted(column(run, "tokens_per_second")[2:])[1]
    assert measured["tokens_per_second"] == rate
    total, before = column(run, "tokens")[-1], column(run, "tokens")[1]
    assert measured["step_time"] == pytest.approx((total - before) / 3 / rate)  # the mean of the steps' tokens
