"""What sbatch is given and what its answers mean, without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainwright as tw
from tests.support.fake_slurm import commands
from tests.support.runs import ON_ROWS, TINY
from trainwright.errors import RequestError

SLOW = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


def test_a_job_has_no_variable_of_the_job_that_submits_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun of the new job would take them as its options."""
    commands(here, monkeypatch, sbatch="env >seen; echo 7", squeue="", sinfo="")
    own = {"CPU_BIND": "mask_cpu:0x1", "MEM_PER_NODE": "4000", "GPUS": "1", "ARRAY_TASK_ID": "3"}
    for name, value in {**own, "CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for job in (None, "5"):
        if job is not None:
            monkeypatch.setenv("SLURM_JOB_ID", job)
            (here / "runs").rename(here / "before")
        assert tw.submit(TINY, ON_ROWS, to="slurm").job == "7"
        passed = {line.partition("=")[0] for line in (here / "seen").read_text().splitlines()}
        kept = {"SLURM_CONF", *(f"SLURM_{name}" for name in own if job is None)}
        assert {name for name in passed if name.startswith("SLURM_")} == kept


@pytest.mark.parametrize("array", [None, "0-9"])
def test_a_job_that_a_slow_controller_has_taken_is_found(
    array: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = "N/A" if array is None else "$i"
    line = f"8|7|{index}|PENDING|Priority|N/A||trainwright:{here}/runs/tiny"
    sbatch = f'for i in 0 1; do echo "{line}" >>queue; done; {SLOW}'
    commands(here, monkeypatch, sbatch=sbatch, squeue="[ ! -e queue ] || cat queue", sinfo="")
    made = tw.submit(TINY, ON_ROWS, to="slurm", array=array)
    assert made.job == ("8" if array is None else "7")
    assert (here / "runs/tiny/slurm/job.sbatch").read_text() == made.script


def test_a_job_that_a_slow_controller_may_have_taken_keeps_its_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(here, monkeypatch, sbatch=SLOW, squeue="", sinfo="")
    with pytest.raises(RequestError, match=r"^sbatch does not answer: .*timed out.*; the job may be in the queue"):
        tw.submit(TINY, ON_ROWS, to="slurm")
    assert (here / "runs/tiny/slurm/job.sbatch").exists()


def test_of_a_job_that_is_refused_nothing_is_left(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(here, monkeypatch, sbatch="echo 'sbatch: error: invalid account' >&2; exit 1", squeue="", sinfo="")
    with pytest.raises(RequestError, match=r"^sbatch refuses the job, and nothing was submitted: invalid account"):
        tw.submit(TINY, ON_ROWS, to="slurm")
    assert not (here / "runs/tiny").exists()
