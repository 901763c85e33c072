"""`--resume auto`: the run of a name is started once, by one of its starters, and resumed afterwards."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from trainwright.errors import RequestError, Stopped
from trainwright.run import run_directory
from trainwright.run.request import build_request

SETTINGS = (ON_ROWS, "parallel.num_processes=1", "data.validation=null", "logging.observers.tensorboard=false")


def command(run: Path, steps: int) -> list[str]:
    return [
        "train",
        str(TINY),
        "--resume",
        "auto",
        *SETTINGS,
        f"logging.run_directory={run}",
        f"train.max_steps={steps}",
    ]


def test_the_same_command_starts_a_run_and_resumes_it(runs: Runs) -> None:
    run = runs.new_directory("run")
    (run / run_directory.SUBMITTED).mkdir(parents=True)
    (run / run_directory.SUBMITTED / "job.sbatch").touch()
    for steps in (2, 4):
        ended = runs.command(*command(run, steps)).wait()
        assert ended.code == 0, ended.stderr
    assert [event["resumed_from"] for event in events(run, "start")] == [None, 2]
    assert len(column(run, "loss")) == 4


def test_of_two_starters_one_trains(runs: Runs) -> None:
    run = runs.new_directory("run")
    starters = [runs.command(*command(run, 60)) for _ in range(2)]
    codes = sorted(each.wait().code for each in starters)
    assert codes[0] == 0 and codes[1] in (0, 2, 75)  # 0: it came when the run was finished, and trained nothing
    assert events(run, "start")[0]["resumed_from"] is None
    assert column(run, "step") == list(range(1, 61))


@pytest.mark.slow
def test_a_run_goes_on_when_the_lock_of_a_machine_that_was_lost_is_released(runs: Runs) -> None:
    """As by an NFS server, which keeps it for a while."""
    run = runs.new_directory("run")
    assert runs.command(*command(run, 2)).wait().code == 0
    with (run / ".lock").open("w") as file:
        file.write("node7 another-boot")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        started = runs.command(*command(run, 4))
        threading.Timer(20, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        ended = started.wait()
    assert ended.code == 0, ended.stderr
    assert len(column(run, "loss")) == 4


def test_a_start_that_is_refused_leaves_what_was_submitted(runs: Runs) -> None:
    run = runs.new_directory("run")
    (run / run_directory.SUBMITTED).mkdir(parents=True)
    ended = runs.command(*command(run, 2), "data.validation=100000").wait()
    assert ended.code == 2, ended.stderr
    assert [each.name for each in run.iterdir()] == [run_directory.SUBMITTED]


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RequestError, match=r"has no run, but other files \(notes\.txt\)"):
        run_directory.check_not_started(tmp_path)


def test_each_element_of_an_array_has_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory.choose_own_directory("auto", "tiny") == Path("runs/tiny")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert run_directory.choose_own_directory("auto", "tiny") == Path("runs/tiny/3")
    request = build_request(TINY, ["logging.run_directory=sweep"], "auto")
    assert (request.recipe.logging.run_directory, request.run, request.in_place) == ("sweep/3", None, True)


def test_a_run_that_another_process_has_begun_meanwhile_is_not_begun_again(tmp_path: Path) -> None:
    from types import SimpleNamespace
    from typing import Any, cast

    request = build_request(TINY, [f"logging.run_directory={tmp_path}"], "auto")
    (tmp_path / run_directory.RECIPE).write_text("task: sft\n")
    resolved = cast(Any, SimpleNamespace(recipe=request.recipe))
    with pytest.raises(Stopped, match="was begun by another process meanwhile"), request.open_directory(resolved):
        pass
