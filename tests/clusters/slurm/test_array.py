"""Many starters at once: each run of an array is begun once, and one job is submitted for a run."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import claims
from tests.support.commands import PATIENCE, environment, wait_for
from tests.support.runs import TINY
from tests.support.slurm import Slurm, why_not
from tests.support.slurm_jobs import SETTINGS, trainwright

STARTERS = 4


@pytest.mark.parametrize("elements", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_each_element_is_begun_by_one_of_its_starters(elements: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(STARTERS)
    starters = [
        context.Process(target=_claim_all, args=(tmp_path / "sweep", elements, f"starter-{number}", barrier))
        for number in range(STARTERS)
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(PATIENCE * max(1, elements // 100))
    assert [starter.exitcode for starter in starters] == [0] * STARTERS
    claims.check(tmp_path / "sweep", elements)


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("elements", [30, pytest.param(1000, marks=pytest.mark.timeout(3600))])
def test_two_arrays_of_one_directory_begin_each_run_once(tmp_path: Path, elements: int) -> None:
    """On a real Slurm, with a worker that only begins the run."""
    slurm = Slurm(tmp_path / "slurm")
    try:
        worker = f"--wrap={sys.executable} -m tests.support.claims {tmp_path / 'sweep'} $SLURM_ARRAY_JOB_ID"
        options = (f"--array=0-{elements - 1}", "--output=/dev/null", "--ntasks=1", "--cpus-per-task=1")
        jobs = [slurm.run("sbatch", "--parsable", *options, worker, cwd=tmp_path) for _ in range(2)]
        assert len(set(jobs)) == 2
        for _ in range(max(1, elements // 100)):  # each may take its time
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not slurm.run("squeue", "--noheader"), every=0.5)
                break
        claims.check(tmp_path / "sweep", elements)
    finally:
        slurm.close()


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_of_many_that_submit_one_run_one_does(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path / "slurm")
    try:
        for node in slurm.nodes:  # so that no job ends meanwhile
            slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        command = trainwright("submit", str(TINY), *SETTINGS, "--to", "slurm", "--array", "0-999")
        submits = [
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment(**slurm.variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(STARTERS)
        ]
        said = [each.communicate(timeout=PATIENCE)[1] for each in submits]
        assert sorted(each.returncode for each in submits) == [0] + [2] * (STARTERS - 1), said
        assert sum("is in the queue already" in each for each in said) == STARTERS - 1, said
        assert len(slurm.run("squeue", "--noheader").splitlines()) == 1  # an array that waits is one line
    finally:
        slurm.close()


def _claim_all(sweep: Path, elements: int, who: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for element in range(elements):
        claims.claim(sweep, element, who)
