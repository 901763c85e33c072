"""Runs on a real Slurm: submitted, stopped by it in every way that a job is, and the same run as without."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from tests.support.slurm import Slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
SETTINGS = (ON_ROWS, "data.validation=null", "logging.tensorboard=false", "checkpoint.every=1000")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    found = Slurm(tmp_path_factory.mktemp("slurm"))
    yield found
    found.close()


def submit(slurm: Slurm, where: Path, *words: str) -> tuple[str, Path]:
    """Submit the tiny recipe; return the job and the run."""
    command = _trainwright("submit", str(TINY), *SETTINGS, "--to", "slurm", *words)
    lines = dict(line.split(" ", 1) for line in slurm.run(*command, cwd=where).splitlines()[-2:])
    return lines["job"], Path(lines["run"])


def wait_for_step(run: Path, step: int) -> None:
    wait_for(lambda: (run / "events.jsonl").exists() and len(events(run, "step")) >= step, every=0.2)


def log(run: Path) -> str:
    return "".join(file.read_text() for file in sorted((run / "slurm").glob("*.log")))


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
    assert f"{run}  {job}  " in slurm.run(*_trainwright("jobs"), cwd=tmp_path).replace("runs/mine", str(run))
    with pytest.raises(AssertionError, match=f"job {job} of {run} is in the queue already"):
        submit(slurm, tmp_path, *words)
    slurm.run("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    assert "stopped after a checkpoint" in log(run) and "requeued" not in log(run)
    again, same = submit(slurm, tmp_path, *words)
    assert again != job and same == run
    slurm.wait_for(again, "COMPLETED", "FAILED")
    assert len(events(run, "start")) == 2
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


def test_a_run_that_would_fail_again_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    words = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "train.max_steps=20", "--until-done")
    job, run = submit(slurm, tmp_path, *words, "parallel.num_processes=1", "--name", "nan")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert slurm.state(job) == "FAILED" and "requeued" not in log(run)
    assert "ExitCode=4:0" in slurm.run("scontrol", "show", "job", job)


def test_an_unknown_partition_is_refused_in_the_schedulers_words_and_ours(slurm: Slurm, tmp_path: Path) -> None:
    refused = "sbatch refuses the job, and nothing was submitted: .*[Ii]nvalid partition.*partitions here: high, low"
    with pytest.raises(AssertionError, match=refused):
        submit(slurm, tmp_path, "--partition", "nowhere")
    assert not [*(tmp_path / "runs").iterdir()] and not slurm.run("squeue", "--noheader")


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
        said = slurm.run(*(_trainwright(*words) if program == "trainwright" else (program, *words)), cwd=tmp_path)
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


def _trainwright(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "trainwright", *words
