"""Jobs on nodes as clusters have them: apart, with other names, files and clocks, and with what is in the way."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import networks
from tests.support.runs import TINY, Runs, column, events
from tests.support.slurm import Slurm, why_not
from tests.support.slurm_jobs import SETTINGS, log, submit, trainwright, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
TWO_NODES = ("parallel.num_processes=2", "train.max_steps=6", "--nodes", "2")
NOBODY = 65534
ENDED = ("COMPLETED", "FAILED")
SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
# The plugin of a site that has accounts without a database; Slurm's own words are its answer.
ACCOUNTS = """
function slurm_job_submit(job, partitions, uid)
    if job.account ~= nil and job.account ~= "ours" then
        return slurm.ESLURM_INVALID_ACCOUNT
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end
"""
Start = Callable[..., Slurm]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Slurm with these settings; it is ended after the test."""
    started: list[Slurm] = []
    numbers = itertools.count()

    def begin(**settings: object) -> Slurm:
        started.append(Slurm(tmp_path / f"slurm-{next(numbers)}", **settings))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for each in started:
        each.close()


def same_as_undisturbed(runs: Runs, run: Path) -> None:
    undisturbed = runs.trained(*SETTINGS, "parallel.num_processes=2", "train.max_steps=6")
    assert column(run, "loss") == column(undisturbed, "loss")


@pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not()))
def test_nodes_with_networks_of_their_own_and_names_of_the_loopback_address(
    start: Start, runs: Runs, tmp_path: Path
) -> None:
    slurm = start(apart=True, loopback_names=True)
    job, run = submit(slurm, tmp_path, *TWO_NODES)
    slurm.wait_for(job, *ENDED)
    assert slurm.state(job) == "COMPLETED", log(run)
    assert events(run, "start")[0]["nodes"] == list(slurm.nodes)
    same_as_undisturbed(runs, run)


def test_a_run_directory_that_nodes_do_not_share_is_refused_in_words(start: Start, tmp_path: Path) -> None:
    where = tmp_path / "scratch"
    where.mkdir()
    slurm = start(unshared=where)
    job, run = submit(slurm, where, *TWO_NODES, "--until-done")
    slurm.wait_for(job, *ENDED)
    said = log(run)
    assert slurm.state(job) == "FAILED" and "is requeued" not in said
    assert f"does not see the run directory {run}, which node 0 created" in said, said
    assert "logging.run_directory" in said and "Traceback" not in said
    assert [each.name for each in run.iterdir()] == ["slurm"], "nothing is begun"


def test_two_jobs_at_once_meet_at_their_own_ports(start: Start, runs: Runs, tmp_path: Path) -> None:
    slurm = start()
    words = (*TWO_NODES, SLOW, "--cpus-per-node", "1")
    jobs = [submit(slurm, tmp_path, *words, "--name", name) for name in ("one", "two")]
    for job, run in jobs:
        slurm.wait_for(job, *ENDED)
        assert slurm.state(job) == "COMPLETED", log(run)
        same_as_undisturbed(runs, run)


def test_two_jobs_that_were_given_one_port_do_not_meet(
    start: Start, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as probe:
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    slurm = start(more={"STEP_SECONDS": "4"})
    words = (*TWO_NODES, SLOW, "--cpus-per-node", "1", "--name")
    first, run = submit(slurm, tmp_path, *words, "one")
    wait_for_step(run, 1)
    second, refused = submit(slurm, tmp_path, *words, "two")
    slurm.wait_for(second, *ENDED)
    said = log(refused)
    assert slurm.state(second) == "FAILED", said
    assert f"port {os.environ['MASTER_PORT']}" in said and "set MASTER_PORT to another one" in said, said
    assert "Traceback" not in said and not (refused / "events.jsonl").exists()
    slurm.wait_for(first, *ENDED)
    assert slurm.state(first) == "COMPLETED", log(run)
    same_as_undisturbed(runs, run)


def test_an_unknown_account_is_refused_in_the_schedulers_words_and_ours(start: Start, tmp_path: Path) -> None:
    plugins = tmp_path / "slurm-0" / "etc"
    plugins.mkdir(parents=True)
    (plugins / "job_submit.lua").write_text(ACCOUNTS)
    slurm = start(settings=["JobSubmitPlugins=lua"])
    with pytest.raises(AssertionError, match=r"sbatch refuses the job, and nothing was submitted: .*Invalid account"):
        submit(slurm, tmp_path, "--account", "theirs")
    assert not [*(tmp_path / "runs").iterdir()] and not slurm.run("squeue", "--noheader")


def test_a_full_disk_is_refused_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    slurm = start()
    full = tmp_path / "full"
    full.mkdir()
    fill = f"mount -t tmpfs -o size=64k none {full} && cd {full} && ! dd if=/dev/zero of=filled bs=1k 2>/dev/null"
    inside = ("unshare", "--mount", "--propagation", "private", "bash", "-c")
    words = trainwright("submit", str(TINY), *SETTINGS, "--to", "slurm")
    said = slurm.run(*inside, f'{fill}; "$@" 2>&1; echo "code $?"; find . -mindepth 1', "full", *words)
    message, _, left = said.partition("code ")
    assert "job.sbatch cannot be written: No space left on device" in message and "Traceback" not in message
    assert sorted(left.split()) == ["./filled", "./runs", "2"]
    assert not slurm.run("squeue", "--noheader")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_two_users_share_a_cache(runs: Runs) -> None:
    """What one has prepared is used by the other, who cannot write there."""
    place = Path(tempfile.mkdtemp(prefix="trainwright-users-"))
    place.chmod(0o755)
    (place / "home").mkdir()
    os.chown(place / "home", NOBODY, NOBODY)
    as_other = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    slurm = Slurm(place / "slurm", {"TRAINWRIGHT_CACHE": str(place / "cache"), "HOME": str(place / "home")})
    try:
        if slurm.code(*as_other, "srun", *trainwright("--version")):
            pytest.skip("another user cannot run this checkout")
        jobs = [submit(slurm, place, *TWO_NODES), submit(slurm, place / "home", *TWO_NODES, before=as_other)]
        for job, run in jobs:
            slurm.wait_for(job, *ENDED)
            assert slurm.state(job) == "COMPLETED", log(run)
            same_as_undisturbed(runs, run)
    finally:
        slurm.close()
        shutil.rmtree(place)
