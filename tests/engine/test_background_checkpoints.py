"""Checkpoints that a process of its own writes while training goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
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


def writers(group: int) -> list[psutil.Process]:
    """The processes that write checkpoints in this group of processes."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("writer_process" in part for part in process.info["cmdline"] or ()):
            try:
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
    return found


def own_writers() -> list[psutil.Process]:
    """Those of this process; other tests of its group have their own."""
    own = psutil.Process()
    return [writer for writer in writers(os.getpgid(0)) if own in writer.parents()]


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
    wait_for(lambda: not writers(started.pid))
    complete = sorted((run / "checkpoints").glob("step-*"))
    assert complete
    for path in complete:
        Checkpoint.open(path)
    runs.resumed(run)
    for name in ("loss", "grad_norm", "tokens"):
        assert column(run, name) == column(undisturbed, name)
    assert not list((run / "checkpoints").glob(".*"))


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
    wait_for(lambda: not writers(started.pid))


@pytest.mark.slow
def test_training_goes_on_when_the_process_that_writes_is_killed(runs: Runs) -> None:
    fixed = ("parallel.num_processes=2", "train.max_steps=20")
    undisturbed = runs.trained(*fixed)
    started = runs.train(*fixed, "checkpoint={every: 1, keep_last: 50, background: true}")
    started.wait_for_step(3)
    found = writers(started.pid)
    assert len(found) == 2
    found[1].kill()
    ended = started.wait()
    assert ended.code == 0 and started.run is not None, ended.stderr
    (fault,) = events(started.run, "fault")
    assert fault["kind"] == "checkpoint" and fault["action"] == "continue"
    assert "killed by signal 9" in fault["detail"] and "waits for checkpoints from now on" in fault["detail"]
    written = [event["step"] for event in events(started.run, "checkpoint")]
    assert written[-1] == 20 and len(written) == 19, "one is lost, and those after it are written"
    assert column(started.run, "loss") == column(undisturbed, "loss")


@pytest.fixture
def background(tmp_path: Path) -> Iterator[tuple[Background, Checkpoints]]:
    made = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_best=False)
    one = Background(made, WORLD)
    yield one, made
    one.close()


def state(value: float) -> dict[str, Shard]:
    """48 MiB in 12 tensors."""
    return {f"model.{index}": Shard.full(torch.full((MIB,), value + index)) for index in range(12)}


@pytest.mark.parametrize("seed", slow_but(0, among=range(8)))
def test_a_kill_at_any_byte_loses_that_checkpoint_alone(background: tuple[Background, Checkpoints], seed: int) -> None:
    one, made = background
    one.begin(1, state(1.0), {}, "", set())
    assert one.flush() is not None
    one.begin(2, state(2.0), {}, "", set())
    limit = random.Random(seed).randrange(48 * MIB)
    file = made.scratch(2) / "rank-00000.safetensors"
    (writer,) = own_writers()
    # It may be over before this process sees it: then the kill meets the checksums, or the rename.
    wait_for(lambda: made.path(2).exists() or (file.exists() and file.stat().st_size >= limit), every=0.0)
    writer.kill()
    try:
        one.flush()
    except CheckpointError as error:
        assert "killed by signal 9" in str(error)
        assert not one.usable
    found, refused = made.latest()
    assert found is not None and not refused
    with found.reader() as read:
        value = 2.0 if made.path(2).exists() else 1.0
        shard = state(value)["model.3"]
        assert torch.equal(read("model.3", shard), shard.local)


@pytest.mark.parametrize("seed", slow_but(0, among=range(40)))
def test_a_kill_at_any_moment_of_the_write_loses_that_checkpoint_alone(
    background: tuple[Background, Checkpoints], seed: int
) -> None:
    """From the first byte to the rename: also while the file is read again and the manifest is written."""
    one, made = background
    begun = time.monotonic()
    one.begin(1, state(1.0), {}, "", set())
    assert one.flush() is not None
    takes = time.monotonic() - begun
    (writer,) = own_writers()
    killer = threading.Timer(random.Random(seed).uniform(0, takes), writer.kill)
    one.begin(2, state(2.0), {}, "", set())
    killer.start()
    try:
        one.flush()
    except CheckpointError as error:
        assert "killed by signal 9" in str(error)
    killer.join()
    found, refused = made.latest()
    assert found is not None and not refused
    with found.reader() as read:
        shard = state(float(found.step))["model.3"]
        assert torch.equal(read("model.3", shard), shard.local)


def test_memory_for_the_copy_is_allocated_before_the_first_checkpoint() -> None:
    writer = Writer()
    try:
        writer.allocate(48 * MIB)
        memory = Path(f"/proc/{writer.pid}/fd")
        files = [file for file in memory.iterdir() if "memfd:checkpoint" in os.readlink(file)]
        assert files
        wait_for(lambda: files[0].stat().st_blocks * 512 >= 48 * MIB)
    finally:
        writer.close()


@pytest.mark.slow
def test_a_run_is_ready_for_its_first_checkpoint_after_its_first_step(runs: Runs) -> None:
    started = runs.train("parallel.num_processes=2", "checkpoint={every: 1000, background: true}", "train.max_steps=60")
    started.wait_for_step(2)
    wait_for(lambda: started.ended or len(writers(started.pid)) == 2)
    ended = started.wait()
    assert ended.code == 0, ended.stderr
    wait_for(lambda: not writers(started.pid))


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
    with Checkpoint.open(saved.path).reader() as read:
        for name, shard in state(1.0).items():
            assert torch.equal(read(name, shard), shard.local), name


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


def test_the_copy_is_no_memory_of_this_process_and_the_writer_needs_little(tmp_path: Path) -> None:
    writer = Writer()
    try:
        tensors = {name: shard.local for name, shard in state(1.0).items()}
        before = psutil.Process().memory_info().rss
        writer.write(tmp_path / "x", tensors, set()).wait()
        assert psutil.Process().memory_info().rss - before < 16 * MIB
        assert psutil.Process(writer.pid).memory_info().rss < 40 * MIB
    finally:
        writer.close()


def test_it_is_refused_with_an_adapter(runs: Runs) -> None:
    ended = runs.train("model.adapter={type: lora, rank: 4}", "checkpoint.background=true").wait()
    assert ended.code == 2
    assert "checkpoint.background: true cannot be used with an adapter" in ended.stderr
