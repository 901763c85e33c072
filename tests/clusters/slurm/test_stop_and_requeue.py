"""Stops and requeues of jobs while they start and end, without a Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.fake_slurm import commands
from tests.support.runs import ON_ROWS, TINY
from trainwright.clusters.slurm import job_step

ENDED = "Slurm says that it is completing, as after scancel"
PREEMPTED = "PreemptTime=2026-03-01T06:12:00"


def begun(run: Path) -> Path:
    """Write what a run that has begun has, and was stopped."""
    (run / "slurm").mkdir(parents=True)
    (run / "recipe.yaml").write_text("task: sft\n")
    (run / "events.jsonl").write_text('{"event": "finish", "time": 1.0, "status": "stopped"}\n')
    return run


def test_a_stop_that_a_start_forgets_is_asked_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's start removes what is older than it, once; the job ends when it is asked after that."""
    run = begun(here / "runs" / "tiny")
    squeue = (
        f"if [ -e {run}/stop ]; then [ ! -e forgotten ] || exit 0; rm {run}/stop; touch forgotten; fi\n"
        f'echo "7|7|N/A|RUNNING|None|N/A|n1|trainwright:{run}"'
    )
    commands(here, monkeypatch, squeue=squeue, scontrol='echo "$@" >>changed')
    monkeypatch.setattr(job_step, "_ASK_SECONDS", 0.01)
    assert tw.stop("runs/tiny", timeout=20) == "stopped"
    assert (here / "forgotten").exists() and (here / "changed").read_text() == "update JobId=7 Requeue=0\n"


def test_a_stop_that_was_taken_is_not_asked_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(here / "runs" / "tiny")
    squeue = (
        f"[ ! -e {run}/stop ] || mv {run}/stop {run}/stop.taken\n"
        f'[ "$(echo >>asked; wc -l <asked)" -gt 4 ] || echo "7|7|N/A|RUNNING|None|N/A|n1|trainwright:{run}"'
    )
    commands(here, monkeypatch, squeue=squeue, scontrol="")
    monkeypatch.setattr(job_step, "_ASK_SECONDS", 0.01)
    assert tw.stop("runs/tiny", timeout=20) == "stopped"
    assert (run / "stop.taken").exists() and not (run / "stop").exists()


@pytest.mark.parametrize("array", [None, "0,3-5:2%2"])
def test_a_stop_of_an_earlier_job_does_not_end_the_next_one(
    array: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is preempted before its start has forgotten what was asked before."""
    directory = here / "runs" / "tiny"
    elements = [directory / index for index in "0345"] if array else [directory]
    for run in elements:
        (begun(run) / "stop.taken").touch()
    if array:
        (directory / "recipe.yaml").write_text("task: sft\n")
    show = f'[ "$1" = show ] && echo JobState=RUNNING {PREEMPTED} || echo "$@" >>asked'
    commands(here, monkeypatch, sbatch="echo 7", squeue="", sinfo="", scontrol=show)
    assert tw.submit(TINY, ON_ROWS, to="slurm", array=array).job == "7"
    others = [directory / "4"] if array else []
    assert [run for run in elements if (run / "stop.taken").exists()] == others
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(elements[0]), "75"])
    with pytest.raises(SystemExit, match="75"):
        job_step.main()
    assert (here / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(("seconds", "requeued"), [(5, False), (400, True)])
def test_a_job_that_is_canceled_within_the_grace_of_a_preemption_is_not_requeued(
    seconds: int, requeued: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = f"$(date -d '-{seconds} seconds' +%Y-%m-%dT%H:%M:%S)"
    job = f"JobState=COMPLETING Reason=None Partition=low PreemptTime={preempted}"
    scontrol = f"""case "$1 $2" in
    "show config") echo "KillWait = 30 sec" ;;
    "show partition") echo "PartitionName=low GraceTime=300" ;;
    "show "*) echo "{job}" ;;
    *) echo "$@" >>asked ;;
    esac"""
    commands(here, monkeypatch, scontrol=scontrol)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), "75"])
    with pytest.raises(SystemExit, match="75"):
        job_step.main()
    assert (here / "asked").exists() == requeued


@pytest.mark.parametrize("code", ["75", "5", "137"])
def test_a_run_that_was_asked_to_stop_is_not_requeued_however_it_ended(
    code: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(here, monkeypatch, scontrol='[ "$1" = show ] && echo JobState=RUNNING || echo "$@" >>asked')
    (begun(here / "run") / "stop.taken").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), code, "--until-done"])
    with pytest.raises(SystemExit, match=code):
        job_step.main()
    assert not (here / "asked").exists()


@pytest.mark.parametrize(
    ("shown", "words", "reason"),
    [
        (f"JobState=COMPLETING Reason=None {PREEMPTED}", [], None),  # the grace is over
        (f"JobState=RUNNING Reason=None {PREEMPTED}", [], None),
        (f"JobState=COMPLETING Reason=None StartTime=2026-03-01T07:00:00 {PREEMPTED}", [], ENDED),
        ("JobState=COMPLETING Reason=None PreemptTime=None", ["--until-done"], ENDED),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None", ["--until-done"], None),
        (
            "JobState=RUNNING Reason=None PreemptTime=None",
            [],
            "it was not preempted, and was submitted without --until",
        ),
        ("", ["--until-done"], "Slurm does not know it"),
    ],
)
@pytest.mark.parametrize("answer", ["", "echo 'Job is pending execution for job 7' >&2; exit 1"])
def test_a_preempted_job_is_requeued_or_its_log_says_why_not(
    answer: str,
    shown: str,
    words: list[str],
    reason: str | None,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer is that of a Slurm that has put the job back itself."""
    scontrol = f'if [ "$1" = show ]; then echo "{shown}"; else echo "$@" >>asked; {answer or "true"}; fi'
    commands(here, monkeypatch, scontrol=scontrol)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(here / "run"), "75", *words])
    with pytest.raises(SystemExit, match="75"):
        job_step.main()
    said = " ".join(capsys.readouterr().err.split())
    if reason is None:
        assert (here / "asked").read_text() == "requeue 7\n" and "job 7 is requeued, as the run ended with" in said
    else:
        assert not (here / "asked").exists() and f"job 7 is not requeued: {reason}" in said
