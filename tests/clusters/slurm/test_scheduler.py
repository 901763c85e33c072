"""What sbatch is given and what its answers mean, without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainwright as tw
from tests.support.fake_slurm import commands
from tests.support.runs import ON_ROWS, TINY
from trainwright.clusters.slurm import scheduler
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


NODE = "CoresPerSocket=32 CPUAlloc=0 CPUEfctv=56 CPUTot=64 Gres=gpu:8(S:0-1) Partitions=gpu,low OS=Linux 5.4 State=IDLE"
PARTITIONS = "PartitionName=gpu Default=YES MaxCPUsPerNode={}\nPartitionName=low Default=NO MaxCPUsPerNode=8"


@pytest.mark.parametrize(
    ("sinfo", "nodes", "limit", "partition", "gpus", "cpus"),
    [
        ("gpu*|64|gpu:a100:2,gpu:v100:6", "", "", None, 4, 32),
        ("gpu*|32|gpu:4\ngpu*|64|gpu:8", "", "", None, 8, 64),
        ("gpu*|32|gpu:4\ngpu*|64|gpu:8", "", "", None, 4, 32),
        ("gpu*|32|gpu:4\ngpu*|64|(null)", "", "", None, 8, 32),  # none has enough
        ("gpu*|64|(null)", "", "", None, 8, None),
        ("gpu*|64+|gpu:8\nlow|16|gpu:8", "", "", None, None, 64),
        ("", f"NodeName=n1 {NODE}", "UNLIMITED", None, None, 56),
        ("", f"NodeName=n1 {NODE}", "UNLIMITED", None, 4, 28),
        ("", f"NodeName=n1 {NODE}", "32", None, None, 32),
        ("", f"NodeName=n1 {NODE}", "UNLIMITED", "low", None, 8),
        ("", f"NodeName=n1 {NODE.replace('CPUEfctv=56 ', '')}", "UNLIMITED", "gpu", None, 64),
    ],
)
def test_a_job_asks_for_the_cpus_that_a_node_gives_it(
    sinfo: str,
    nodes: str,
    limit: str,
    partition: str | None,
    gpus: int | None,
    cpus: int | None,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = PARTITIONS.format(limit) if nodes else ""
    scontrol = f'case $2 in node) echo "{nodes}";; partition) echo "{shown}";; esac'
    commands(here, monkeypatch, sinfo=f'echo "{sinfo}"', scontrol=scontrol)
    assert scheduler.count_cpus_per_node(partition, gpus) == cpus


@pytest.mark.parametrize("cpus", [None, 64])
def test_a_refused_number_of_cpus_that_nobody_wrote_is_named(
    cpus: int | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "echo 'sbatch: error: CPU count per node can not be satisfied' >&2; exit 1"
    commands(here, monkeypatch, sbatch=refused, squeue="", sinfo='echo "gpu*|64|(null)"')
    with pytest.raises(RequestError) as error:
        tw.submit(TINY, ON_ROWS, to="slurm", cpus_per_node=cpus)
    assert ("--cpus-per-task=64 was chosen from what Slurm says" in str(error.value)) is (cpus is None)
