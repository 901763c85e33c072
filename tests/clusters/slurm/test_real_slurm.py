"""Runs on a real Slurm: submitted, stopped by it in every way that a job is, and the same run as without."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, wait_for
from tests.support.runs import Runs, column, events
from tests.support.slurm import Slurm, why_not
from tests.support.slurm_jobs import SETTINGS, log, submit, trainwright, wait_for_step
from trainwright.clusters.slurm import scheduler

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    found = Slurm(tmp_path_factory.mktemp("slurm"))
    yield found
    found.close()


def same_losses(runs: Runs, run: Path, processes: int, steps: int, *settings: str) -> None:
    assert events(run, "finish")[-1]["status"] == "finished"
    undisturbed = runs.trained(*SETTINGS, f"parallel.num_processes={processes}", f"train.max_steps={steps}", *settings)
    assert column(run, "loss") == column(undisturbed, "loss")


def test_a_run_of_several_jobs_within_a_time_limit_is_the_run_of_one(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    steps = 150
    words = (SLOW, f"train.max_steps={steps}", "parallel.num_processes=1", "--time", "1:00", "--until-done")
    job, run = submit(slurm, tmp_path, *words)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert slurm.state(job) == "COMPLETED", log(run)
    starts = events(run, "start")
    assert len(starts) >= 2 and all(each["resumed_from"] for each in starts[1:])
    assert (starts[0]["job"], starts[0]["nodes"], starts[0]["launcher"]) == (
        job,
        [starts[0]["nodes"][0]],
        "trainwright",
    )
    assert log(run).count(f"job {job} is requeued, as the run ended with exit code 75") == len(starts) - 1
    assert log(run).count("stopping: the run has to end by") == len(starts) - 1  # the log is appended to
    same_losses(runs, run, 1, steps)


def test_a_run_longer_than_the_time_limit_in_several_jobs_is_the_run_of_one(
    slurm: Slurm, runs: Runs, tmp_path: Path
) -> None:
    """None is requeued, and what is not needed never starts."""
    steps = 150
    words = (SLOW, f"train.max_steps={steps}", "parallel.num_processes=1", "--time", "1:00", "--jobs", "5")
    first, run = submit(slurm, tmp_path, *words)
    numbers = [str(int(first) + later) for later in range(5)]
    assert re.search(rf"runs/tiny +{first} ", slurm.run(*trainwright("jobs"), cwd=tmp_path))
    wait_for(lambda: not slurm.run("squeue", "--noheader"), every=0.3)
    starts = events(run, "start")
    used = len(starts)
    assert 2 <= used < 5, log(run)
    assert [each["job"] for each in starts] == numbers[:used] and all(each["resumed_from"] for each in starts[1:])
    assert [slurm.state(each) for each in numbers] == ["FAILED"] * (used - 1) + ["COMPLETED"] + ["CANCELLED"] * (
        5 - used
    )
    assert "is requeued" not in log(run)
    same_losses(runs, run, 1, steps)


def test_several_jobs_end_with_an_error_that_would_come_again_and_with_a_stop(slurm: Slurm, tmp_path: Path) -> None:
    words = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "train.max_steps=20", "--jobs", "3")
    first, run = submit(slurm, tmp_path, *words, "parallel.num_processes=1", "--name", "nan")
    wait_for(lambda: not slurm.run("squeue", "--noheader"), every=0.3)
    assert [slurm.state(str(int(first) + later)) for later in range(3)] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert len(events(run, "start")) == 1
    words = (SLOW, "train.max_steps=200", "parallel.num_processes=1", "--jobs", "3", "--name", "asked")
    first, run = submit(slurm, tmp_path, *words)
    wait_for_step(run, 2)
    assert slurm.run(*trainwright("stop", "runs/asked"), cwd=tmp_path) == "runs/asked: stopped"
    assert not slurm.run("squeue", "--noheader") and len(events(run, "start")) == 1


def test_two_nodes_survive_a_preemption_and_a_requeue_by_hand(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    steps = 40
    job, run = submit(slurm, tmp_path, SLOW, f"train.max_steps={steps}", "parallel.num_processes=2", "--nodes", "2")
    wait_for_step(run, 5)
    urgent = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--wrap=sleep 1", cwd=tmp_path)
    slurm.wait_for(urgent, "COMPLETED")
    wait_for(lambda: len(events(run, "start")) == 2, every=0.2)
    wait_for_step(run, events(run, "start")[-1]["resumed_from"] + 3)
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    starts = events(run, "start")
    assert len(starts) == 3 and all(each["resumed_from"] for each in starts[1:]), log(run)
    assert starts[0]["world_size"] == 2
    same_losses(runs, run, 2, steps)


def test_a_run_that_its_file_asks_to_stop_is_not_requeued(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    words = (SLOW, "train.max_steps=30", "parallel.num_processes=1", "--until-done", "--name", "asked")
    job, run = submit(slurm, tmp_path, *words)
    wait_for_step(run, 3)
    (run / "stop").touch()
    slurm.wait_for(job, "FAILED", "COMPLETED", "PENDING")
    assert slurm.state(job) == "FAILED"
    assert f"job {job} is not requeued: {run / 'stop'} asked the run to stop" in log(run)
    job, again = submit(slurm, tmp_path, *words)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert again == run
    same_losses(runs, run, 1, 30)


def test_what_a_user_cancels_stays_canceled_and_the_same_submission_resumes_it(
    slurm: Slurm, runs: Runs, tmp_path: Path
) -> None:
    words = (SLOW, "train.max_steps=30", "parallel.num_processes=1", "--until-done", "--name", "mine")
    job, run = submit(slurm, tmp_path, *words)
    wait_for_step(run, 3)
    row = slurm.run(*trainwright("jobs"), cwd=tmp_path).splitlines()[-1]
    # The run, its job, its state, at which of its steps it is, goodput, and when it is expected to end.
    assert re.fullmatch(rf"runs/mine +{job} +running +\d+/30 +\d+% +\d{{4}}-\d\d-\d\d \d\d:\d\d", row), row
    shown = slurm.run("squeue", "--noheader", "--format=%k|%j", f"--jobs={job}")
    assert shown == f"trainwright:{run}|mine" and events(run, "start")[0]["job"] == job
    with pytest.raises(AssertionError, match=f"job {job} of {run} is in the queue already"):
        submit(slurm, tmp_path, *words)
    slurm.run("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    assert "stopped after a checkpoint" in log(run) and f"job {job} is not requeued" in log(run)
    again, same = submit(slurm, tmp_path, *words)
    assert again != job and same == run
    slurm.wait_for(again, "COMPLETED", "FAILED")
    assert len(events(run, "start")) == 2
    assert re.search(rf"^runs/mine +{again} +finished +30/30 ", slurm.run(*trainwright("jobs"), cwd=tmp_path), re.M)
    (shown,) = json.loads(slurm.run(*trainwright("runs", "--name", "mine", "--json"), cwd=tmp_path))
    assert shown["job"] == again
    same_losses(runs, run, 1, 30)


def test_each_element_of_an_array_trains_its_own_run(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    words = (
        "train.seed={element}",
        "train.max_steps=4",
        "parallel.num_processes=1",
        "--array",
        "0-2",
        "--name",
        "sweep",
    )
    job, sweep = submit(slurm, tmp_path, *words)
    elements = [sweep / str(element) for element in range(3)]
    wait_for(lambda: all((each / "final").is_dir() for each in elements) and slurm.state(job) == "COMPLETED", every=0.3)
    for element, run in enumerate(elements):
        assert events(run, "start")[0]["job"] == f"{job}_{element}"
        same_losses(runs, run, 1, 4, f"train.seed={element}")


def test_after_a_fault_the_element_that_has_the_number_of_its_array_is_requeued_alone(
    slurm: Slurm, runs: Runs, tmp_path: Path
) -> None:
    """Slurm gives the element that starts last the number of the array."""
    words = (SLOW, "train.max_steps=30", "parallel.num_processes=1", "checkpoint.every=5", "--array", "0-1")
    job, pair = submit(slurm, tmp_path, *words, "--name", "pair")
    for element in ("0", "1"):
        wait_for_step(pair / element, 7)
    tasks = slurm.tasks(job)
    (last,) = {_environment(each)["SLURM_ARRAY_TASK_ID"] for each in tasks}
    min(tasks, key=lambda each: each.create_time()).kill()
    wait_for(lambda: all(events(pair / each, "finish") for each in ("0", "1")), every=0.3)
    assert f"job {job}_{last} is requeued" in log(pair)
    assert {each: len(events(pair / each, "start")) for each in ("0", "1")} == {"0": 1, "1": 1, last: 2}, log(pair)
    for element in ("0", "1"):
        same_losses(runs, pair / element, 1, 30, "checkpoint.every=5")


def test_stop_ends_the_elements_of_an_array_that_run_and_that_wait(slurm: Slurm, tmp_path: Path) -> None:
    words = (SLOW, "train.max_steps=200", "parallel.num_processes=1", "--array", "0-9%1", "--name", "many")
    job, many = submit(slurm, tmp_path, *words)
    wait_for_step(many / "0", 2)
    assert slurm.run(*trainwright("stop", "runs/many/5"), cwd=tmp_path) == "runs/many/5: canceled"
    assert len(slurm.run("squeue", "--noheader", "--array", f"--jobs={job}").splitlines()) == 9
    assert slurm.run(*trainwright("stop", "runs/many"), cwd=tmp_path) == "runs/many: 8 canceled, 1 stopped"
    assert not slurm.run("squeue", "--noheader") and events(many / "0", "finish")[-1]["status"] == "stopped"


def test_a_run_that_would_fail_again_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    words = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "train.max_steps=20", "--until-done")
    job, run = submit(slurm, tmp_path, *words, "parallel.num_processes=1", "--name", "nan")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert slurm.state(job) == "FAILED" and "requeued" not in log(run)
    assert "ExitCode=4:0" in slurm.run("scontrol", "show", "job", job)


def test_a_run_that_never_gets_to_a_checkpoint_is_not_started_for_ever(slurm: Slurm, tmp_path: Path) -> None:
    killed = "train.step_policies=['tests.support.slow_steps:KilledSteps']"
    words = (killed, "train.max_steps=20", "faults.restarts=0", "parallel.num_processes=1", "--until-done")
    job, run = submit(slurm, tmp_path, *words, "--name", "stuck")
    wait_for(lambda: slurm.state(job) == "FAILED", every=0.3)
    assert log(run).count(f"job {job} is requeued, as the run ended with exit code 5") == 3
    assert f"job {job} is not requeued: 3 times in a row there was no new checkpoint of {run}" in log(run)
    starts = [line for line in (run / "events.jsonl").read_text().splitlines() if '"event": "start"' in line]
    assert len(starts) == 4


def test_the_grace_of_jobs_is_that_of_slurm(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.variables.items():
        monkeypatch.setenv(name, value)
    found = [scheduler.read_grace(partition) for partition in (None, "low", "high", "high,low")]
    assert [each and (each.seconds, each.preempted) for each in found] == [(60, 80), (60, 80), (60, 60), (60, 60)]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "high")
    assert scheduler.check_job_grace(59) is None and "60 s after its first signal" in str(scheduler.check_job_grace(61))


def test_an_unknown_partition_is_refused_in_the_schedulers_words_and_ours(slurm: Slurm, tmp_path: Path) -> None:
    refused = "sbatch refuses the job, and nothing was submitted: .*[Ii]nvalid partition.*partitions here: high, low"
    with pytest.raises(AssertionError, match=refused):
        submit(slurm, tmp_path, "--partition", "nowhere")
    assert not [*(tmp_path / "runs").iterdir()] and not slurm.run("squeue", "--noheader")


def test_variables_of_sbatch_change_nothing_that_was_asked(slurm: Slurm, tmp_path: Path) -> None:
    """With SBATCH_EXPORT=NONE, a site's own, the job has none of the shell's variables but those of its file."""
    before = ("env", "SBATCH_EXPORT=NONE", "SBATCH_TIMELIMIT=1", "SBATCH_OUTPUT=/dev/null", "SBATCH_ARRAY_INX=0-1")
    words = ("train.max_steps=2", "parallel.num_processes=1", "--time", "10:00", "--name", "plain")
    job, run = submit(slurm, tmp_path, *words, before=before)
    assert " TimeLimit=00:10:00 " in slurm.run("scontrol", "show", "job", "--oneliner", job)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert "finished at step 2" in log(run)


def test_paths_with_spaces_and_shell_characters_are_paths(slurm: Slurm, tmp_path: Path) -> None:
    where = tmp_path / "a b'$(touch pwned) 100%j"
    where.mkdir()
    job, run = submit(slurm, where, "train.max_steps=2", "parallel.num_processes=1")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert run == where / "runs" / "tiny" and events(run, "finish"), log(run)
    assert "finished at step 2" in log(run) and not [*tmp_path.rglob("pwned")]


def test_a_killed_task_of_a_node_is_a_fault_and_the_run_goes_on(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    words = (
        SLOW,
        "train.max_steps=30",
        "parallel.num_processes=2",
        "checkpoint.every=5",
        "--nodes",
        "2",
        "--name",
        "two",
    )
    job, run = submit(slurm, tmp_path, *words)
    wait_for_step(run, 8)
    second = [each for each in psutil.process_iter() if _environment(each).get("SLURM_NODEID") == "1"]
    task = min((each for each in second if "train" in each.cmdline()), key=lambda each: each.create_time())
    assert _environment(task)["SLURM_JOB_ID"] == job
    task.kill()
    slurm.wait_for(job, "COMPLETED", "FAILED")
    starts = events(run, "start")
    assert [each["resumed_from"] for each in starts] == [None, starts[-1]["resumed_from"]], log(run)
    assert starts[-1]["resumed_from"] >= 5 and f"job {job} is requeued" in log(run)
    same_losses(runs, run, 2, 30, "checkpoint.every=5")


def test_the_guide_is_followed_in_order(slurm: Slurm, runs: Runs, tmp_path: Path) -> None:
    """Its first two sections; the job's number there is 12."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    page = (ROOT / "docs" / "slurm.md").read_text()
    lines = [line.strip() for line in page.partition("## Nodes")[0].splitlines() if line.startswith("    ")]
    fixed = (*SETTINGS, SLOW, "parallel.num_processes=1", "train.max_steps=60")
    job, run = "", tmp_path / "runs" / "tiny"
    for line in lines:
        program, *words = shlex.split(line)
        if words[:1] == ["submit"]:
            words += fixed
        words = [job if word == "12" else word for word in words]
        if words[0] == "stop":
            wait_for(lambda: len(events(run, "start")) == 2, every=0.3)
            wait_for_step(run, events(run, "start")[-1]["resumed_from"] + 3)
        said = slurm.run(*(trainwright(*words) if program == "trainwright" else (program, *words)), cwd=tmp_path)
        if words[0] == "submit" and "--print" not in words:
            job = said.splitlines()[-2].removeprefix("job ")
            wait_for_step(run, 5)
    assert said == "runs/tiny: stopped"
    assert not slurm.run("squeue", "--noheader"), "it is not requeued"
    again, same = submit(slurm, tmp_path, SLOW, "parallel.num_processes=1", "train.max_steps=60")
    assert same == run
    slurm.wait_for(again, "COMPLETED", "FAILED")
    assert all(each["resumed_from"] for each in events(run, "start")[1:]) and len(events(run, "start")) == 3
    same_losses(runs, run, 1, 60)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
