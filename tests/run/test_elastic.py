"""A run with a range of processes goes on with as many as there is room for, and stays the same run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.run.test_restarts import kill
from tests.support.commands import wait_for
from tests.support.ledgers import whole_ledger
from tests.support.runs import ON_ROWS, Runs, column, difference, events
from trainwright.engine.event_reader import read_log
from trainwright.errors import MachineError
from trainwright.recipe.checks import list_usable_processes
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.parallel import ProcessRange
from trainwright.run.launches import Elastic, build_device_limit
from trainwright.run.shutdown.stop import RESIZE_AT_CHECKPOINT, RESIZE_NOW, RESIZE_SAVING, Stopping
from trainwright.utils.text import format_ranges

RANGE = "parallel.num_processes={min: 1, max: 3}"
SETTINGS = (ON_ROWS, "data.validation=null", "checkpoint.every=4", "parallel.strategy=ddp")


def sizes(run: Path) -> list[int]:
    return [event["world_size"] for event in events(run, "start")]


def test_a_run_that_loses_slots_goes_on_with_fewer_processes_and_the_same_losses(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS, "parallel.num_processes=2", "train.max_steps=16")
    started = runs.train(*SETTINGS, "parallel.num_processes={min: 1, max: 2}", "train.max_steps=16")
    started.wait_for_step(5)
    run = started.run
    assert run is not None
    (run / "slots").write_text("1")
    kill(started, 1)
    ended = started.wait()
    assert ended.code == 0, ended.stderr
    assert "going on with 1 process instead of 2" in ended.stderr
    assert sizes(run) == [2, 1]
    assert difference(column(run, "loss"), column(undisturbed, "loss")) < 1e-5
    assert load_recipe(run / "recipe.yaml").parallel.num_processes == ProcessRange(min=1, max=2)


@pytest.mark.slow
def test_a_run_that_waits_for_slots_can_be_stopped_by_its_file(runs: Runs) -> None:
    started = runs.train(*SETTINGS, "parallel.num_processes={min: 1, max: 2}", "train.max_steps=100000")
    started.wait_for_step(2)
    run = started.run
    assert run is not None
    (run / "slots").write_text("0")
    kill(started, 0)  # which looks for the file while it trains
    (run / "stop").touch()
    ended = started.wait()
    assert ended.code == 75, ended.stderr
    assert "stopping: asked by" in ended.stderr
    assert sizes(run) == [2]


@pytest.mark.slow
def test_a_run_grows_and_shrinks_as_slots_change_and_when_it_is_resumed(runs: Runs) -> None:
    # With a larger learning rate, training amplifies the rounding of sums.
    settings = (*SETTINGS, "train.max_steps=700", "checkpoint.every=50", "optimizer.learning_rate=1e-6")
    undisturbed = runs.trained(*settings, "parallel.num_processes=1")
    started = runs.train(*settings, RANGE)
    run = started.run
    assert run is not None
    started.wait_for_step(5)
    for slots in (1, 2):
        (run / "slots").write_text(str(slots))
        wait_for(lambda slots=slots: sizes(run)[-1] == slots)  # type: ignore[misc]
    started.kill(signal.SIGTERM)
    assert started.wait().code == 75
    (run / "slots").unlink()
    runs.resumed(run)
    assert sizes(run) == [3, 1, 2, 3]
    assert not events(run, "restart")
    assert difference(column(run, "loss"), column(undisturbed, "loss")) < 1e-5
    ledger = whole_ledger(run, ranks=3)
    starts = [event["time"] for event in events(run, "start")]
    assert [each.lines[-1].launch for each in ledger] == [4, 3, 2]
    times = [event["time"] for event in read_log(run / "events.jsonl").everything]
    for rank, back in ((1, 2), (2, 3)):  # away since there was one process
        assert ledger[rank].seconds["stopped"] > max(time for time in times if time < starts[back]) - starts[1]


@pytest.mark.slow
def test_a_run_that_cannot_write_a_checkpoint_to_grow_goes_on_as_it_is(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.3")  # so that some steps take longer than a change has to last
    slow = ("train.max_steps=3000", "train.step_policies=['tests.support.slow_steps:SlowSteps']")
    # The third that is due in a row would end the run otherwise.
    how = ("checkpoint.background=true", "checkpoint.on_failure=continue")
    started = runs.train(*SETTINGS, "parallel.num_processes={min: 1, max: 2}", *how, *slow)
    run = started.run
    assert run is not None
    started.wait_for_step(2)
    (run / "slots").write_text("1")
    wait_for(lambda: sizes(run)[-1] == 1)
    started.wait_for_step(column(run, "step")[-1] + 2)
    # A file where the directories of checkpoints are written.
    (run / "checkpoints").rename(run / "before")
    (run / "checkpoints").touch()
    (run / "slots").unlink()
    started.wait_for_step(column(run, "step")[-1] + 20)
    assert sizes(run) == [2, 1] and {fault["action"] for fault in events(run, "fault")} == {"continue"}
    (run / "checkpoints").unlink()
    (run / "before").rename(run / "checkpoints")
    wait_for(lambda: sizes(run)[-1] == 2)
    started.kill(signal.SIGTERM)
    assert started.wait().code == 75


def test_more_processes_wait_for_a_checkpoint_and_fewer_do_not(tmp_path: Path) -> None:
    now, stopping = [0.0], Stopping()
    elastic = Elastic(tmp_path, (1, 2, 4), build_device_limit(lambda: None), stopping, lambda: now[0])
    slots, flag = tmp_path / "slots", stopping.flags.resize

    def flags(seconds: int) -> list[int]:
        found = []
        for _ in range(seconds):
            now[0] += 1
            elastic.check()
            found.append(flag.value)
        return found

    slots.write_text("3")
    assert elastic.first() == 2
    slots.write_text("9")
    assert flags(4) == [0, 0, RESIZE_AT_CHECKPOINT, RESIZE_AT_CHECKPOINT]
    assert flags(70)[-1] == RESIZE_SAVING  # not taken by a worker yet
    flag.value = RESIZE_AT_CHECKPOINT
    assert set(flags(70)) == {RESIZE_AT_CHECKPOINT}  # it could not be written
    slots.write_text("3")
    assert flags(3)[-1] == 0
    slots.write_text("4")
    assert flags(70)[-1] == RESIZE_SAVING
    assert elastic.next() == 4
    slots.write_text("1")
    assert flags(4) == [0, 0, RESIZE_NOW, RESIZE_NOW]
    slots.write_text("")  # it is being written
    assert elastic.available() == 4
    slots.write_text("0")
    with pytest.raises(MachineError, match="needs at least 1, and there are fewer"):
        elastic.first()
    stopping.flag.value = 1
    assert elastic.next() == 0


def test_only_numbers_that_keep_the_rest_of_the_recipe_are_used(tmp_path: Path) -> None:
    rest = "task: sft\ndata: {train: rows.jsonl}\nmodel: {name: m}\n"
    file = tmp_path / "recipe.yaml"

    def usable(text: str) -> str:
        file.write_text(rest + text)
        recipe = load_recipe(file)
        asked = recipe.parallel.num_processes
        assert isinstance(asked, ProcessRange)
        return format_ranges(list_usable_processes(recipe, asked), " to ")

    batch = "train: {max_steps: 1, global_batch_size: 8"
    assert usable(batch + "}\nparallel: {strategy: ddp, num_processes: {min: 2, max: 64}}") == "2 to 8"
    # Those without rows hold shards.
    assert usable(batch + "}\nparallel: {strategy: fsdp, num_processes: {min: 2, max: 64}}") == "2 to 64"
    accumulation = ", micro_batch_size: 1, gradient_accumulation_steps: 2}\n"
    assert usable(batch + accumulation + "parallel: {num_processes: {min: 1, max: 8}}") == "4 to 7"
    replicas = "}\nparallel: {strategy: fsdp, replicate_size: 2, num_processes: {min: 1, max: 8}}"
    assert usable(batch + replicas) == "4, 6, 8"
