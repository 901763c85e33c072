"""Checkpoints that a thread writes while training goes on."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import MACHINE
from tests.support.forked import wait_for
from tests.support.runs import TINY, Runs, column, events
from tests.support.slow import slow_but
from trainwright.engine.checkpoints.background import Background
from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.engine.checkpoints.writer import Writer
from trainwright.engine.event_reader import read_events
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
MIB = 2**20
KEPT = "checkpoint={every: 3, keep_last: 50, keep_best: false, background: %s}"
FILES = ("state.json", "rank-00000.safetensors", "rank-00001.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but("fsdp", among=("ddp", "fsdp", "zero3")))
def test_they_have_the_same_bytes_as_those_that_training_waits_for(runs: Runs, strategy: str) -> None:
    fixed = (f"parallel={{strategy: {strategy}, num_processes: 2}}", "train.max_steps=6")
    waited = runs.trained(*fixed, KEPT % "false")
    background = runs.trained(*fixed, KEPT % "true")
    for name in ("loss", "grad_norm", "tokens"):
        assert column(background, name) == column(waited, name)
    assert [event["step"] for event in events(background, "checkpoint")] == [3, 6]
    assert not events(background, "fault")
    for step in (3, 6):
        ours, theirs = (run / "checkpoints" / f"step-{step:08d}" for run in (background, waited))
        assert {file.name for file in ours.iterdir()} == {*FILES, "recipe.yaml", "manifest.json"}
        for name in FILES:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    candidates = json.loads((background / "plan.json").read_text())["candidates"]
    (copied,) = {sum(each["memory"]["host"].values()) for each in candidates if each["num_processes"] == 2}
    written = sum(
        tensor.numel() * tensor.element_size()
        for file in FILES[1:]
        for tensor in load_file(background / "checkpoints" / "step-00000006" / file).values()
    )
    assert written <= 2 * copied <= 1.01 * written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cores", "background", "width"), [(2, False, 6000), pytest.param(8, True, 30000, marks=pytest.mark.slow)]
)
def test_auto_does_not_take_the_cores_of_the_training(
    runs: Runs, tmp_path: Path, cores: int, background: bool, width: int
) -> None:
    described = json.loads(MACHINE.read_text())
    described["machine"]["cpu_cores"] = cores
    (tmp_path / "machine.json").write_text(json.dumps(described))
    run = runs.new_directory("run")
    ended = runs.command(
        *("train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false"),
        *("parallel={num_processes: 2, strategy: ddp}", "train.max_steps=4", "evaluate.every=null"),
        *("checkpoint={every: 2, keep_best: false}", f"model.config.intermediate_size={width}"),
        TRAINWRIGHT_MACHINE=str(tmp_path / "machine.json"),
    ).wait()
    assert ended.code == 0, ended.stderr
    order = [(event["event"], event["step"]) for event in read_events(run / "events.jsonl") if "step" in event]
    first, third = order.index(("checkpoint", 2)), order.index(("step", 3))
    assert (first > third) == background, order
    (event, *_) = events(run, "checkpoint")
    assert event["slowed_seconds"] >= 0.0
    if not background:
        assert event["slowed_seconds"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 10)))])
def test_a_run_that_is_killed_while_it_writes_goes_on_as_if_it_had_not_been(runs: Runs, seed: int) -> None:
    fixed = ("parallel={strategy: fsdp, num_processes: 2}", "train.max_steps=20")
    often = "checkpoint={every: 1, background: true}"
    undisturbed = runs.trained(*fixed)
    chance = random.Random(seed)
    started = runs.train(*fixed, often)
    started.wait_for_step(chance.randint(3, 10))  # the third step comes after the first checkpoint is complete
    wait_for(lambda: started.ended or any(chance.random() < 0.01 for _ in range(10)), every=0.001)
    started.kill()
    run = started.run
    assert run is not None
    complete = sorted((run / "checkpoints").glob("step-*"))
    assert complete
    for path in complete:
        Checkpoint.open(path)
    runs.resumed(run)
    for name in ("loss", "grad_norm", "tokens"):
        assert column(run, name) == column(undisturbed, name)
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_stop_waits_for_what_is_being_written(runs: Runs) -> None:
    started = runs.train("parallel.num_processes=2", "checkpoint={every: 1, background: true}")
    started.wait_for_step(5)
    started.kill(signal.SIGTERM)
    ended = started.wait()
    run = started.run
    assert run is not None
    assert ended.code == 75, ended.stdout + ended.stderr
    last = events(run, "finish")[-1]["step"]
    Checkpoint.open(run / "checkpoints" / f"step-{last:08d}")
    assert not list((run / "checkpoints").glob(".*"))


@pytest.fixture
def background(tmp_path: Path) -> Iterator[tuple[Background, Checkpoints]]:
    made = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=False)
    one = Background(made, WORLD)
    yield one, made
    one.close()


def state(value: float) -> dict[str, Shard]:
    """48 MiB in 12 tensors."""
    return {f"model.{index}": Shard.full(torch.full((MIB,), value + index)) for index in range(12)}


def writing_forever(directory: str) -> None:
    """Write a checkpoint in front, and then others in the background until the process is killed."""
    made = Checkpoints(Path(directory), keep_last=2, keep_best=False)
    background = Background(made, WORLD)
    for step in itertools.count(1):
        background.begin(step, state(float(step)), {}, "", set())
        background.flush()


@pytest.mark.slow
@pytest.mark.parametrize("seed", slow_but(0, among=range(20)))
def test_a_kill_at_any_moment_of_the_write_loses_that_checkpoint_alone(tmp_path: Path, seed: int) -> None:
    """From the first byte to the rename: also while the file is read again and the manifest is written."""
    directory, chance = tmp_path / "checkpoints", random.Random(seed)
    process = multiprocessing.get_context("fork").Process(target=writing_forever, args=(str(directory),))
    process.start()
    begun = time.monotonic()
    wait_for(lambda: (directory / "step-00000001").exists())
    time.sleep(chance.uniform(0, time.monotonic() - begun))
    process.kill()
    process.join()
    found, refused = Checkpoints(directory, keep_last=2, keep_best=False).find_latest()
    assert found is not None and not refused
    with found.open_reader() as read:
        shard = state(float(found.step))["model.3"]
        assert torch.equal(read("model.3", shard), shard.local)


def test_memory_for_the_copy_is_allocated_before_the_first_checkpoint() -> None:
    writer = Writer()
    try:
        writer.allocate(48 * MIB)
        directory = Path("/proc/self/fd")
        names = [name for name in os.listdir(directory) if "memfd:checkpoint" in str((directory / name).resolve())]
        wait_for(lambda: any((directory / name).stat().st_blocks * 512 >= 48 * MIB for name in names))
    finally:
        writer.close()


def test_what_changes_once_the_copy_is_done_does_not_reach_the_checkpoint(
    background: tuple[Background, Checkpoints],
) -> None:
    one, _ = background
    shards = state(1.0)
    buffer = shards["model.5"].local
    one.begin(1, shards, {}, "", {buffer.data_ptr()})
    buffer.fill_(-1.0)  # as a forward pass may
    one.wait_copied()
    for shard in shards.values():
        shard.local.fill_(-1.0)
    saved = one.flush()
    assert saved is not None
    with Checkpoint.open(saved.path).open_reader() as read:
        for name, shard in state(1.0).items():
            assert torch.equal(read(name, shard), shard.local), name


@pytest.mark.slow
def test_no_space_fails_that_checkpoint_and_not_the_next(
    background: tuple[Background, Checkpoints], tmp_path: Path
) -> None:
    one, made = background
    one.begin(1, state(1.0), {}, "", set())
    assert one.flush() is not None
    (made.scratch(2) / "rank-00000.safetensors").mkdir(parents=True)
    one.begin(2, state(2.0), {}, "", set())  # removes it
    assert one.flush() is not None
    tmp_path.joinpath("checkpoints").rename(tmp_path / "away")
    tmp_path.joinpath("checkpoints").write_text("")
    one.begin(3, state(3.0), {}, "", set())
    with pytest.raises(CheckpointError, match="checkpoint of step 3 was not written"):
        one.flush()
    assert one.usable
    tmp_path.joinpath("checkpoints").unlink()
    one.begin(4, state(4.0), {}, "", set())
    assert one.flush() is not None


def test_the_copy_is_no_resident_memory_of_this_process(tmp_path: Path) -> None:
    writer = Writer()
    try:
        tensors = {name: shard.local for name, shard in state(1.0).items()}
        before = psutil.Process().memory_info().rss
        writer.write(tmp_path / "x", tensors, set()).wait()
        assert psutil.Process().memory_info().rss - before < 16 * MIB
    finally:
        writer.close()


@pytest.mark.slow
def test_it_is_refused_with_an_adapter(runs: Runs) -> None:
    ended = runs.train("model.adapter={type: lora, rank: 4}", "checkpoint.background=true").wait()
    assert ended.code == 2
    assert "checkpoint.background: true cannot be used with an adapter" in ended.stderr
