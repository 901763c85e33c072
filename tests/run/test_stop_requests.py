"""A run stops for the file `stop` in its directory, and early enough before a deadline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.commands import environment, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from tests.support.workers import by_hand, start_workers
from trainwright.errors import RequestError, Stopped
from trainwright.run.shutdown.exit_code import refuse_stopped
from trainwright.run.shutdown.requests import (
    Deadline,
    StopRequests,
    choose_deadline,
    choose_earliest,
    estimate_write_seconds,
    forget_stops,
    stop_was_requested,
)

LONG = (ON_ROWS, "train.max_steps=400", "optimizer.schedule=constant", "evaluate.every=null", "checkpoint.every=null")


def requests(run: Path, deadline: float | None, state_bytes: int = 0) -> tuple[StopRequests, list[str]]:
    """Requests at the time 1,000 of a clock that stands still, and what they do."""
    done: list[str] = []
    given = None if deadline is None else Deadline(deadline, "six")
    return StopRequests(run, given, state_bytes, lambda: done.append("stop"), done.append, lambda: 1000.0), done


def test_a_file_is_a_request_once(tmp_path: Path) -> None:
    found, done = requests(tmp_path, None)
    assert not found.look() and not done
    (tmp_path / "stop").touch()
    assert found.look() and stop_was_requested(tmp_path) and not (tmp_path / "stop").exists()
    assert done == [done[0], "stop"] and str(tmp_path / "stop") in done[0]
    assert not found.look()
    forget_stops(tmp_path, seconds_before=0.0)
    assert not stop_was_requested(tmp_path) and not list(tmp_path.iterdir())


def test_a_launch_that_has_waited_for_another_one_knows_that_it_was_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "stop.taken").touch()
    assert forget_stops(tmp_path, seconds_before=60.0) and stop_was_requested(tmp_path, within=60.0)
    os.utime(tmp_path / "stop.taken", (0, 0))
    assert stop_was_requested(tmp_path) and not stop_was_requested(tmp_path, within=60.0)
    assert not forget_stops(tmp_path, seconds_before=60.0) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["stop", "checkpoint"])
def test_what_is_asked_while_a_launch_begins_is_kept(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.touch()
    forget_stops(tmp_path, seconds_before=60.0)
    assert file.exists() and stop_was_requested(tmp_path) == (name == "stop")
    then = file.stat().st_mtime - 120
    os.utime(file, (then, then))
    forget_stops(tmp_path, seconds_before=60.0)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_requested_once_by_its_file(tmp_path: Path) -> None:
    found, done = requests(tmp_path, None)
    assert not found.look() and not found.take_save()
    (tmp_path / "checkpoint").touch()
    assert not found.look() and not list(tmp_path.iterdir())
    assert found.take_save() and not found.take_save() and not done


def test_a_deadline_ends_the_later_attempts_of_torchrun_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests(tmp_path, 1001.0)[0].look()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(Stopped, match="stopped before the next step: the run has to end by six; continue with"):
        refuse_stopped(tmp_path, 60.0, None, resumed=True)
    with pytest.raises(Stopped, match="the run has to end by seven; run the same command again"):
        refuse_stopped(tmp_path, 0.0, Deadline(1.0, "seven"), resumed=False)


def test_the_first_attempt_forgets_why_the_run_has_stopped_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requests(tmp_path, 1001.0)[0].look()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    refuse_stopped(tmp_path, 60.0, None, resumed=True)  # of another launch, which this one has waited for
    refuse_stopped(tmp_path, 0.0, None, resumed=True)
    assert not list(tmp_path.iterdir())


_AGES = """
import os
from trainwright.run.shutdown.exit_code import compute_launch_age
from trainwright.machine.usage import compute_process_age
ages = {"none": 0.0, "own": compute_process_age(), "launcher": compute_process_age(os.getppid())}
for number in (0, 1):
    print(min(ages, key=lambda name: abs(ages[name] - compute_launch_age(None, number))))
"""


@pytest.mark.parametrize(
    ("variables", "since"),
    [
        ({}, "own none"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, "launcher none"),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, "launcher launcher"),
    ],
)
def test_all_attempts_of_torchrun_are_one_launch(variables: dict[str, str], since: str) -> None:
    """This process, which has imported torch, is the launcher: the first run of a process, and the second one."""
    command = [sys.executable, "-c", _AGES]
    assert subprocess.check_output(command, env=environment(**variables), text=True).split() == since.split()


def test_a_time_limit_counts_from_the_begin_of_the_launch() -> None:
    now, later = choose_deadline(None, "1 h"), choose_deadline(None, "1 h", 3000.0)
    assert now is not None and later is not None and now.seconds - later.seconds == pytest.approx(3000.0, abs=60.0)


def test_a_deadline_leaves_time_for_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    # Before anything is measured: 3 s for the end, and 400 MB at 200 MB/s with a half more.
    assert requests(tmp_path, 1006.0, 400_000_000)[0].look()
    found, done = requests(tmp_path, 1006.1, 400_000_000)
    assert not found.look()
    found({"event": "step", "step_time": 1.0})
    assert found.look() and "six" in done[0]
    found({"event": "checkpoint", "seconds": 0.5})  # measured: less than assumed
    assert not found.look() and found.needed == pytest.approx(1.5 + 0.75 + 3)


def test_a_deadline_leaves_time_for_a_batch_of_an_evaluation_or_a_prompt(tmp_path: Path) -> None:
    now = [0.0]
    told: dict[str, object] = {"event": "progress"}
    found = StopRequests(tmp_path, None, 0, lambda: None, lambda line: None, lambda: now[0])

    def longest(*events: tuple[float, dict[str, object]]) -> float:
        for seconds, event in events:
            now[0] += seconds
            found(event)
        return (found.needed - 3) / 1.5

    assert longest((9.0, {"event": "phase"}), (2.0, told), (6.0, told), (1.0, told)) == 6.0
    assert longest((60.0, {"event": "step", "step_time": 4.0}), (0.0, {"event": "phase"}), (0.5, told)) == 6.0
    assert longest(*[(0.0, {"event": "phase"}), (0.5, told)] * 18) == 6.0
    assert longest((0.0, {"event": "phase"}), (0.5, told)) == 4.0  # the last 20 evaluations and generations count


def test_a_deadline_leaves_time_for_what_is_being_written_and_copied(tmp_path: Path) -> None:
    found, _ = requests(tmp_path, None)
    found({"event": "checkpoint", "seconds": 4.0, "blocked_seconds": 0.1})  # the one before may be written still
    assert found.needed == pytest.approx(4.0 + 1.5 * 4.0 + 3)
    found({"event": "checkpoint", "seconds": 4.0, "blocked_seconds": 4.0, "copy_seconds": 10.0})
    assert found.needed == pytest.approx(1.5 * 4.0 + 3 + 1.5 * 10.0)


def test_a_deadline_is_seen_while_the_data_is_prepared(runs: Runs) -> None:
    started = runs.train(*LONG, "--time-limit", "1 s")
    ended = started.wait()
    assert ended.code == 75, ended.stderr
    assert "stopping: the run has to end by" in ended.stderr and "nothing was kept" in ended.stderr
    assert started.run is not None and not list(started.run.glob("logs/rank-*.log"))


@pytest.mark.slow
def test_a_slow_disk_is_noticed_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = estimate_write_seconds(400_000_000, tmp_path)
    assert fast >= 2.0 and estimate_write_seconds(0, tmp_path) == 0.0
    assert estimate_write_seconds(400_000_000, tmp_path / "missing") == 2.0  # nothing can be tried: 200 MB/s
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.1)  # for a MiB
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    assert estimate_write_seconds(400_000_000, tmp_path) >= 0.1 * 400_000_000 / 2**20
    found, done = requests(tmp_path, 1040.0, 400_000_000)
    found.watch()
    wait_for(lambda: "stop" in done)
    assert found.needed >= 1.5 * 0.1 * 400_000_000 / 2**20
    assert [file.name for file in tmp_path.iterdir()] == ["stop.reason"]


@pytest.mark.slow
def test_a_run_writes_a_checkpoint_when_asked_and_goes_on(runs: Runs) -> None:
    settings = (*LONG, "parallel.num_processes=2")
    started = runs.train(*settings)
    started.wait_for_step(3)
    assert started.run is not None
    step = tw.checkpoint(started.run)
    assert step is not None and (started.run / "checkpoints" / f"step-{step:08d}").is_dir()
    started.wait_for_step(step + 3)
    assert tw.stop(started.run) == "stopped" and started.wait().code == 75
    assert step in [event["step"] for event in events(started.run, "checkpoint")]
    with pytest.raises(RequestError, match="not being trained here"):
        tw.checkpoint(started.run)


@pytest.mark.slow
def test_a_last_step_stops_the_run_after_it(runs: Runs) -> None:
    settings = (ON_ROWS, "train.max_steps=8", "evaluate.every=null", "parallel.num_processes=2")
    run = runs.new_directory("until")
    own = (f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    assert runs.command("train", str(TINY), *settings, *own, "--until", "step 5").wait().code == 75
    assert column(run, "step") == [1, 2, 3, 4, 5]
    for step in (5, 4):
        again = runs.resume(run, "--until", f"step {step}").wait()
        assert again.code == 2 and f"--until step {step}: {run} is at step 5 already" in again.stderr
    assert column(run, "step") == [1, 2, 3, 4, 5]
    runs.resumed(run)
    assert column(run, "loss") == column(runs.trained(*settings), "loss")


@pytest.mark.slow
def test_a_last_step_ends_a_run_whose_number_of_processes_may_change(runs: Runs) -> None:
    settings = (ON_ROWS, "train.max_steps=8", "evaluate.every=null", "parallel.num_processes={min: 1, max: 2}")
    started = runs.train(*settings, "--until", "step 2")
    assert started.wait().code == 75 and started.run is not None
    assert column(started.run, "step") == [1, 2]
    again = runs.resume(started.run, "--until", "step 2").wait()
    assert again.code == 2 and f"{started.run} is at step 2 already" in again.stderr
    assert column(started.run, "step") == [1, 2] and len(events(started.run, "start")) == 1


NOW = datetime(2026, 2, 28, 22, 30).astimezone()


def end(until: str | None, limit: str | None) -> tuple[str, str] | None:
    found = choose_earliest(until, limit, NOW)
    return None if found is None else (f"{found[0]:%d %H:%M}", found[1])


def test_a_deadline_is_the_earliest_of_all_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end(None, None) is None
    assert end(None, "2 h") == ("01 00:30", "--time-limit 2 h")
    assert end("2026-03-01T06:00", "2h") == ("01 00:30", "--time-limit 2h")
    assert end("2026-03-01T06:00", "1000 h") == ("01 06:00", "--until 2026-03-01T06:00")
    assert end("23:00", None) == ("28 23:00", "--until 23:00")
    assert end("22:30", None) == ("01 22:30", "--until 22:30")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW.timestamp()) + 600))
    assert end("23:00", "2 h") == ("28 22:40", "the time limit of Slurm job 7")


def test_an_older_slurm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 2026-02-28T22:40:00\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert end(None, None) == ("28 22:40", "the time limit of Slurm job 7")
    squeue.write_text("#!/bin/sh\necho NONE\n")  # no limit
    assert end(None, None) is None


def test_an_older_slurm_is_asked_for_the_end_of_the_element_of_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The element that starts last has the number of the array, whose first line is another element's."""
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$5" = 7_3 ] || echo 2026-02-28T23:10:00\necho 2026-02-28T22:40:00\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"JOB_ID": "7", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert end(None, None) == ("28 22:40", "the time limit of Slurm job 7_3")


def test_a_limit_is_counted_by_the_clock_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sdiag tells its time; the clock of this node is two minutes behind it."""
    sdiag = tmp_path / "sdiag"
    sdiag.write_text('#!/bin/sh\necho "sdiag output at Sat Feb 28 22:32:00 2026 ($(($(date +%s) + 120)))"\n')
    sdiag.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW.timestamp()) + 600))
    found = choose_earliest(None, None, NOW)
    assert found is not None and "this node's clock is" in found[1] and "behind the scheduler's" in found[1]
    assert (found[0] - NOW).total_seconds() == pytest.approx(600 - 120, abs=10)


def test_a_stop_that_takes_longer_than_the_grace_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    found = StopRequests(tmp_path, None, 0, lambda: None, told.append, warn=lambda needed: f"{needed:g} s")
    found({"event": "checkpoint", "seconds": 9.0})  # before any step: of an earlier launch's end
    for _ in range(2):
        found({"event": "step", "step_time": 2.0})
        found({"event": "checkpoint", "seconds": 4.0})
    wait_for(lambda: told)
    assert told == ["warning: 12 s"]


def test_no_change_of_the_system_s_time_moves_a_deadline() -> None:
    first, later = choose_deadline(None, "1 h"), choose_deadline(None, "2 h")
    assert first is not None and later is not None
    assert later.seconds - first.seconds == pytest.approx(3600, abs=60)


@pytest.mark.parametrize(
    ("until", "limit", "said"),
    [
        ("2001-01-01T00:00", None, "--until: 2001-01-01T00:00 is in the past"),
        ("soon", None, "--until: expected a date and time such as"),
        (None, "soon", "--time-limit: expected a time such as 4 h or 90 min, not 'soon'"),
        (None, "99999999999999 h", "--time-limit: expected a time"),
    ],
)
def test_what_is_no_time_is_refused(until: str | None, limit: str | None, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        choose_earliest(until, limit, NOW)


@pytest.mark.slow
def test_a_run_is_stopped_by_name_and_goes_on(runs: Runs) -> None:
    started = runs.train(*LONG, "parallel.num_processes=2")
    assert started.run is not None
    started.wait_for_step(3)
    assert tw.stop(started.run) == "stopped"
    finished = started.wait()
    assert finished.code == 75 and "asked by" in finished.stdout + finished.stderr
    step = events(started.run, "step")[-1]["step"]
    assert 3 <= step < 400 and list(tw.Run(started.run).checkpoints) == [step]
    with pytest.raises(RequestError, match="is not being trained"):
        tw.stop(started.run)
    (started.run / "stop").touch()  # left over, of no launch
    resumed = runs.resume(started.run)
    resumed.wait_for_step(step + 1)
    assert tw.stop(started.run) == "stopped" and resumed.wait().code == 75
    steps = column(started.run, "step")
    assert steps == [*range(1, len(steps) + 1)] and len(steps) > step


@pytest.mark.slow
def test_a_run_ends_within_its_time(runs: Runs) -> None:
    started = runs.train("--time-limit", "6 s", *LONG, "train.max_steps=100000", "parallel.num_processes=1")
    finished = started.wait()
    assert finished.code == 75 and "--time-limit 6 s" in finished.stdout + finished.stderr


@pytest.mark.slow
def test_ranks_of_another_launcher_stop_together(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    workers = start_workers(runs, by_hand(2, port), *LONG)
    run = workers[0].run
    assert run is not None
    workers[0].wait_for_step(3)
    assert tw.stop(run) == "stopped"
    assert [worker.wait().code for worker in workers] == [75, 75]
