"""What goes wrong in a run, and what it does about it."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import PATIENCE, descendants, started, wait_for
from tests.support.ledgers import whole_ledger
from tests.support.runs import ON_ROWS, ROWS, TINY, Finished, Runs, column, difference, events
from tests.support.slow import slow_but
from trainwright.engine.checkpoints.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.event_reader import read_log
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World


def processes(count: int) -> str:
    return f"parallel.num_processes={count}"


def stopped(runs: Runs, *overrides: str, step: int) -> Path:
    """A run that was stopped by a signal after this step, with a checkpoint."""
    started = runs.train(*overrides)
    started.wait_for_step(step)
    started.kill(signal.SIGTERM)
    assert started.wait().code == 75
    assert started.run is not None
    return started.run


def checkpoints(run: Path) -> Checkpoints:
    return Checkpoints(run / "checkpoints", keep_last=2, keep_best=True)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_the_one_before_is_used(runs: Runs) -> None:
    # Large enough for the writing to take a while.
    large = (
        processes(2),
        ON_ROWS,
        "model.config.hidden_size=512",
        "model.config.intermediate_size=1024",
        "train.max_steps=6",
        "train.global_batch_size=2",
        "data.validation=null",
    )
    uninterrupted = runs.trained(*large)
    for _ in range(10):
        started = runs.train(*large, "checkpoint.every=1")
        assert started.run is not None
        directory = started.run / "checkpoints"
        wait_for(lambda at=directory: any(at.glob("step-00000002")), every=0.001)
        wait_for(lambda at=directory, s=started: any(at.glob(".writing-*")) or s.ended, every=0.0005)
        started.kill()
        assert started.wait().code == -signal.SIGKILL
        if any(directory.glob(".writing-*")):
            break
    else:
        pytest.fail("no kill came while a checkpoint was written")
    run = started.run
    (half,) = directory.glob(".writing-*")
    whole = max(checkpoints(run).steps())
    assert int(half.name[-8:]) == whole + 1 and whole >= 2
    runs.resumed(run)
    assert events(run, "start")[-1]["resumed_from"] == whole
    assert not events(run, "fault")
    assert column(run, "loss") == column(uninterrupted, "loss")
    # The last two, and the one that no check of repeated steps came after yet.
    assert sorted(path.name for path in directory.iterdir()) == [f"step-{s:08}" for s in sorted({whole, 5, 6})]


@pytest.mark.parametrize(
    "file", slow_but("rank-00001.safetensors", among=("rank-00001.safetensors", "state.json", "manifest.json"))
)
def test_a_flipped_byte_is_refused_by_name_and_the_checkpoint_before_is_used(runs: Runs, file: str) -> None:
    settings = (processes(2), ON_ROWS, "train.max_steps=10", "checkpoint.every=3")
    uninterrupted = runs.trained(*settings)
    run = runs.copied(uninterrupted)
    assert checkpoints(run).steps() == [9, 10]
    damaged = checkpoints(run).path(10) / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    ended = runs.resume(run).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    (fault,) = events(run, "fault")
    assert fault["kind"] == "checkpoint" and str(damaged) in fault["detail"] and "before" in fault["action"]
    assert str(damaged) in ended.stdout
    assert events(run, "start")[-1]["resumed_from"] == 9
    assert column(run, "loss") == column(uninterrupted, "loss")
    assert Checkpoint.open(checkpoints(run).path(10)).state["progress"]["step"] == 10


@pytest.mark.slow
def test_any_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    world = World(0, 1, 0, 1, torch.device("cpu"))
    made = checkpoints(tmp_path)
    state = {"model.a": Shard.full(torch.ones(2, 4)), "model.b": Shard.full(torch.zeros(3))}
    saved = made.save(world, 1, state, {"progress": {"step": 1}}, "task: sft\n").path
    manifest = saved / "manifest.json"
    content = manifest.read_bytes()
    believed = json.loads(content)
    for place in range(len(content)):
        for bit in (1, 4, 32):
            changed = bytearray(content)
            changed[place] ^= bit
            manifest.write_bytes(changed)
            found, refused = made.find_latest()
            if found is None:
                assert str(manifest) in str(refused[0]) or str(saved) in str(refused[0])
            else:  # white space may be any
                assert json.loads(manifest.read_bytes()) == believed
    manifest.write_bytes(content)
    assert made.find_latest()[0] is not None


@pytest.fixture(scope="module")
def poisoned(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides for a model that gives NaN for one letter, and data in which one example has that letter."""
    made = tmp_path_factory.mktemp("poisoned")
    untied = runs.trained(processes(1), ON_ROWS, "train.max_steps=1", "model.config.tie_word_embeddings=false")
    model = made / "model"
    subprocess.run(["cp", "-r", untied / "final", model], check=True)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord("~")] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:100]]
    rows.insert(50, {"question": "What is a tilde?", "answer": "This is one: ~"})
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"data.train={made / 'rows.jsonl'}",
        "data.validation=null",
        f"model.name={model}",
        "model.config=null",
        "model.tokenizer=null",
        "checkpoint.every=1",
        "data.pack_length=null",
        "train.max_steps=20",
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but(2, among=(1, 2)))
def test_a_loss_that_is_no_number_stops_before_the_weights_are_touched(
    runs: Runs, poisoned: tuple[str, ...], count: int
) -> None:
    started = runs.train(*poisoned, processes(count))
    ended = started.wait()
    run = started.run
    assert run is not None
    assert ended.code == 4, ended.stdout + ended.stderr
    step = len(column(run, "loss")) + 1
    assert 1 < step <= 13
    assert f"at step {step}" in ended.stderr and "What is a tilde?" in ended.stderr
    assert "Traceback" not in ended.stderr
    (fault,) = events(run, "fault")
    assert fault["kind"] == "non_finite" and fault["action"] == "stop" and fault["step"] == step
    assert "What is a tilde?" in fault["detail"] and fault["rank"] in range(count)
    # The one micro-batch, of two rows, and not the whole batch of eight.
    assert len(fault["detail"].split("Examples in the batch: ")[1].split(" (")[0].split(", ")) == 2
    assert not (run / "final").exists()

    assert checkpoints(run).steps()[-1] == step - 1
    found, refused = checkpoints(run).find_latest()
    assert found is not None and not refused
    for file in found.path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            broken = tensor.isnan() | tensor.isinf()
            if name.endswith("embed_tokens.weight") and name.startswith("model."):
                broken[ord("~")] = False  # as it was given
            assert not broken.any(), name


def steps_of(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def without_numbers(runs: Runs, poisoned: tuple[str, ...], policy: str, *more: str) -> Path:
    return runs.trained(*poisoned, "checkpoint.every=4", "train.max_steps=16", f"faults.on_non_finite={policy}", *more)


def test_a_run_that_rewinds_is_the_run_without_the_batch(runs: Runs, poisoned: tuple[str, ...]) -> None:
    skipped = without_numbers(runs, poisoned, "skip", processes(1))
    (fault,) = events(skipped, "fault")
    bad = fault["step"]
    assert fault["kind"] == "non_finite" and fault["action"] == "its update is skipped"
    losses = steps_of(skipped)
    assert [step for step, loss in losses.items() if not math.isfinite(loss)] == [bad]

    rewound = without_numbers(runs, poisoned, "rewind", processes(1))
    (fault,), (rewind,) = events(rewound, "fault"), events(rewound, "rewind")
    assert "What is a tilde?" in fault["detail"]
    assert fault["action"].endswith(f"; the global batch of step {bad} is left out")
    assert rewind["left_out"] == [bad]
    assert rewind["resumed_from"] == (bad - 1) // 4 * 4 if bad > 4 else "no checkpoint" in fault["action"]
    assert steps_of(rewound) == {step: loss for step, loss in losses.items() if step != bad}
    (ledger,) = whole_ledger(rewound, ranks=1)
    undone = [event for event in read_log(rewound / "events.jsonl").everything if event["time"] < rewind["time"]]
    kept = [event["time"] for event in undone if event.get("step", 0) <= (rewind["resumed_from"] or 0)]
    assert ledger.seconds["repeated"] >= rewind["time"] - max(kept) - 0.01
    one, other = (load_file(run / "final" / "model.safetensors") for run in (rewound, skipped))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_rewinds_and_a_killed_run_leaves_out_the_same(
    runs: Runs, poisoned: tuple[str, ...], strategy: str
) -> None:
    alone = steps_of(without_numbers(runs, poisoned, "rewind", processes(1)))
    settings = (processes(2), f"parallel.strategy={strategy}", "faults.restarts=off")
    whole = without_numbers(runs, poisoned, "rewind", *settings)
    assert steps_of(whole).keys() == alone.keys()
    assert difference(list(steps_of(whole).values()), list(alone.values())) < 1e-5
    policy = ("checkpoint.every=4", "train.max_steps=16", "faults.on_non_finite=rewind")
    started = runs.train(*poisoned, *policy, *settings)
    started.wait_for_step(14)
    started.kill()
    assert started.run is not None
    assert steps_of(runs.resumed(started.run)) == steps_of(whole)


@pytest.mark.slow
def test_numbers_that_are_never_finite_end_the_run(runs: Runs) -> None:
    for policy in ("skip", "rewind"):
        started = runs.train(
            ON_ROWS,
            processes(1),
            f"faults.on_non_finite={policy}",
            "optimizer.learning_rate=1e30",
            "checkpoint.every=4",
        )
        ended = started.wait()
        assert ended.code == 4 and "in a row" in ended.stderr, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_examples_named_do_not_depend_on_the_number_of_processes(runs: Runs, poisoned: tuple[str, ...]) -> None:
    details = []
    for count in (1, 3):
        started = runs.train(*poisoned, processes(count))
        assert started.wait().code == 4
        assert started.run is not None
        details.append(events(started.run, "fault")[0]["detail"].split("Examples")[1])
    assert details[0] == details[1]


@contextmanager
def small_disk(at: Path, options: str) -> Iterator[None]:
    """A real file system with these options at a directory; the test is skipped where that needs other rights."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but(2, among=(1, 2)))
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(runs: Runs, count: int) -> None:
    settings = (processes(count), ON_ROWS, "train.max_steps=12")
    uninterrupted = runs.trained(*settings)
    run = stopped(runs, *settings, step=2)
    (step,) = checkpoints(run).steps()
    directory = run / "checkpoints"
    directory.rename(run / "before")
    directory.mkdir()
    size = sum(file.stat().st_size for file in (run / "before").rglob("*") if file.is_file()) // 1024
    with small_disk(directory, f"size={int(size * 1.5) + 32}k"):
        subprocess.run(["cp", "-r", *(run / "before").iterdir(), directory], check=True)
        ended = runs.resume(run, "checkpoint.every=4").wait()
        assert ended.code == 0, ended.stdout + ended.stderr
        assert [path.name for path in directory.iterdir()] == [f"step-{step:08d}"]
        assert checkpoints(run).find_latest()[0] is not None
    faults = events(run, "fault")
    assert faults and all("No space left on device" in fault["detail"] for fault in faults)
    assert all(fault["kind"] == "checkpoint" and fault["action"] == "continue" for fault in faults)
    assert [fault["step"] for fault in faults] == [n for n in (4, 8, 12) if n > step]
    assert ended.stdout.count("No space left on device") == len(faults)
    assert column(run, "loss") == column(uninterrupted, "loss")
    assert (run / "final" / "model.safetensors").is_file()


FULL, READ_ONLY = ("size=64k", "No space left on device"), ("ro", "Read-only file system")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "disk"), [(1, FULL), pytest.param(2, FULL, marks=pytest.mark.slow), (1, READ_ONLY)])
def test_a_disk_that_takes_no_checkpoint_ends_the_run_with_its_weights(
    runs: Runs, count: int, disk: tuple[str, str]
) -> None:
    run, ended = without_checkpoints(runs, processes(count), ON_ROWS, "train.max_steps=12", disk=disk[0])
    assert ended.code == 3, ended.stdout + ended.stderr
    assert f"3 checkpoints in a row could not be written to {run / 'checkpoints'}, and none was written" in ended.stderr
    assert disk[1] in ended.stderr and "Traceback" not in ended.stderr
    assert "checkpoint.on_failure" in ended.stderr
    assert [fault["action"] for fault in events(run, "fault")] == ["continue", "continue", "stop"]
    assert len(column(run, "loss")) == 6, "what is left is not trained"
    weights = run / "weights-step-6"
    assert f"the weights of step 6 are in {weights}" in ended.stderr and (weights / "model.safetensors").is_file()
    assert not (run / "final").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_checkpoints_if_it_is_told_to(runs: Runs) -> None:
    settings = (processes(1), ON_ROWS, "train.max_steps=12", "checkpoint.on_failure=continue")
    run, ended = without_checkpoints(runs, *settings)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert (run / "final" / "model.safetensors").is_file() and len(events(run, "fault")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "nowhere"])
def test_weights_that_the_run_directory_does_not_take_go_to_the_copies(
    runs: Runs, tmp_path: Path, copies: bool
) -> None:
    """Or the message says that they could not be saved anywhere."""
    places = tmp_path / "one", tmp_path / "two"
    for place in places:
        place.mkdir()
    settings = (processes(1), ON_ROWS, "train.max_steps=12")
    with small_disk(places[0], "ro"), nullcontext() if copies else small_disk(places[1], "ro"):
        run, ended = without_checkpoints(
            runs, *settings, more=(f"checkpoint.copies=[{places[0]}, {places[1]}]",), blocks_weights=True
        )
    assert ended.code == 3 and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
    weights = places[1] / run.name / "weights-step-6"
    if copies:
        assert f"the weights of step 6 are in {weights}" in ended.stderr and (weights / "model.safetensors").is_file()
    else:
        assert "the weights of step 6 could not be saved anywhere else either" in ended.stderr
    failed = [fault["detail"] for fault in events(run, "fault") if fault["kind"] == "export"]
    assert len(failed) == (2 if copies else 3)
    assert "weights-step-6 could not be written: Not a directory" in failed[0]
    assert all("could not be written: Read-only file system" in detail for detail in failed[1:])


def without_checkpoints(
    runs: Runs, *settings: str, disk: str = "size=64k", more: tuple[str, ...] = (), blocks_weights: bool = False
) -> tuple[Path, Finished]:
    """A run from its first step on, whose disk for checkpoints takes none; nor its directory the weights."""
    run = stopped(runs, *settings, step=2)
    directory = run / "checkpoints"
    directory.rename(run / "before")
    directory.mkdir()
    if blocks_weights:
        (run / ".weights-step-6.tmp-1").write_text("")  # a file where an earlier attempt has its directory
    with small_disk(directory, disk):
        return run, runs.resume(run, "checkpoint.every=2", *more).wait()


@pytest.mark.slow
def test_a_model_that_cannot_be_written_is_told_with_the_checkpoint_that_there_is(runs: Runs) -> None:
    settings = (processes(1), ON_ROWS, "train.max_steps=12", "checkpoint.every=4")
    uninterrupted = runs.trained(*settings)
    started = runs.train(*settings)
    assert started.run is not None
    wait_for((started.run / "checkpoints" / "step-00000004").exists, every=0.002)
    for process in descendants(started.pid):
        # As a quota: what is larger than so many bytes cannot be written.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    ended = started.wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    newest = checkpoints(started.run).steps()[-1]
    assert newest < 12
    assert "final could not be written: File too large; the training is done, but" in ended.stderr
    assert f"its newest checkpoint is of step {newest}: free disk space, then --resume" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert column(runs.resumed(started.run), "loss") == column(uninterrupted, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_no_more_open_files_cost_checkpoints_or_end_the_run_in_words(runs: Runs, count: int) -> None:
    settings = (processes(count), ON_ROWS, "train.max_steps=60", "checkpoint.every=4")
    uninterrupted = runs.trained(*settings)
    started = runs.train(*settings)
    assert started.run is not None
    started.wait_for_step(1)
    for process in descendants(started.pid):
        with suppress(ProcessLookupError):  # only the standard streams, which are open
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, 3))
    ended = started.wait()
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said and re.search("open files|files open", said), said
    assert ended.code in (0, 3, 4), said
    resumed = started.run if ended.code == 0 else runs.resumed(started.run)
    assert column(resumed, "loss") == column(uninterrupted, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_disk_that_fills_and_then_a_stop_is_one_message(runs: Runs, tmp_path: Path, count: int) -> None:
    """The whole run lies on the disk, with its logs and events."""
    directory = tmp_path / "disk"
    directory.mkdir()
    with small_disk(directory, "size=4096k"):
        settings = (processes(count), ON_ROWS, "train.max_steps=3000", f"logging.run_directory={directory}/run")
        started = runs.train(*settings)
        started.run = directory / "run"
        started.wait_for_step(3)
        with pytest.raises(OSError, match="No space left"), (directory / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 1024)
        started.kill(signal.SIGTERM)
        ended = started.wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    said = [line for line in ended.stderr.splitlines() if line and not line.startswith("stopping: ")]
    assert said[0].startswith("error: the run was to stop, but the checkpoint of step "), ended.stderr
    assert "No space left on device" in said[0] and str(directory / "run" / "checkpoints") in said[0]
    assert "Traceback" not in ended.stderr and "Logging error" not in ended.stderr and len(said) <= 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_run_whose_output_cannot_be_written_goes_on(runs: Runs, tmp_path: Path) -> None:
    settings = (processes(1), ON_ROWS, "train.max_steps=3")
    expected = runs.trained(*settings)
    command = ("-m", "trainwright", "train", str(TINY), *settings, f"logging.run_directory={tmp_path / 'run'}")
    with started(*command, "logging.observers.tensorboard=false", cwd=tmp_path, output=Path("/dev/full")) as process:
        assert process.wait(PATIENCE) == 0
    assert column(tmp_path / "run", "loss") == column(expected, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but(2, among=(1, 2)))
def test_a_run_whose_directory_is_deleted_ends_with_words(runs: Runs, count: int) -> None:
    started = runs.train(processes(count), ON_ROWS, "train.max_steps=3000", "checkpoint.every=5")
    started.wait_for_step(8)
    assert started.run is not None
    moved = started.run.rename(started.run.with_name(f"{started.run.name}-moved"))
    ended = started.wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    assert f"{started.run}/events.jsonl is gone: the run's directory was deleted or moved" in ended.stderr
    assert "log: " not in ended.stderr  # it is gone, too
    assert "Traceback" not in ended.stderr
    assert not started.run.exists(), "it is not made again without what was in it"
    assert checkpoints(moved).find_latest()[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but(2, among=(1, 2)))
def test_a_stop_whose_checkpoint_fails_does_not_end_as_if_saved(runs: Runs, count: int) -> None:
    settings = (processes(count), ON_ROWS, "train.max_steps=3000")
    run = stopped(runs, *settings, step=2)
    (step,) = checkpoints(run).steps()
    started = runs.resume(run)
    started.wait_for_step(step + 3)
    # A file where the directories of later checkpoints would be written.
    directory = (run / "checkpoints").rename(run / "before")
    (run / "checkpoints").touch()
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    assert "the run was to stop, but the checkpoint of step" in ended.stderr
    assert (
        f"the checkpoint of step {step} is valid" in ended.stderr and "stopped after a checkpoint" not in ended.stderr
    )
    assert [fault["action"] for fault in events(run, "fault")] == ["stop"]
    (run / "checkpoints").unlink()
    directory.rename(run / "checkpoints")
    assert checkpoints(run).steps() == [step]
    again = runs.resume(run)
    wait_for(lambda: len(events(run, "start")) == 3 or again.ended)
    again.kill(signal.SIGTERM)
    assert again.wait().code == 75
    assert events(run, "start")[-1]["resumed_from"] == step


def test_a_worker_that_a_signal_ends_is_named(runs: Runs) -> None:
    import psutil

    started = runs.train(processes(2), ON_ROWS, "train.max_steps=3000", "faults.restarts=off")
    started.wait_for_step(3)
    workers = {each.environ().get("RANK"): each for each in psutil.Process(started.pid).children(recursive=True)}
    victim = workers.get("1") or max(workers.values(), key=lambda worker: worker.pid)
    victim.send_signal(signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 5, ended.stdout + ended.stderr
    assert "was ended by an external SIGTERM" in ended.stderr and "rank" in ended.stderr.splitlines()[0]
    assert "Traceback" not in ended.stderr and "gloo" not in ended.stderr


def test_a_killed_worker_ends_the_run_with_its_rank(runs: Runs) -> None:
    import psutil

    started = runs.train(processes(2), ON_ROWS, "train.max_steps=1000", "faults.restarts=off")
    started.wait_for_step(3)
    workers = psutil.Process(started.pid).children(recursive=True)
    ranks = {worker.environ().get("RANK"): worker for worker in workers}
    victim = ranks.get("1") or max(workers, key=lambda worker: worker.pid)
    os.kill(victim.pid, signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 5
    assert "killed" in ended.stderr and "rank" in ended.stderr and "Traceback" not in ended.stderr
