"""What sbatch is given and what its answers mean, without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainwright as tw
from tests.support.fake_slurm import commands
from tests.support.runs import ON_ROWS, TINY


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
