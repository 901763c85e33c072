"""Variables and files around `trainwright train` that mean another run are refused or told, never passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import TINY, Runs
from trainwright.errors import RequestError
from trainwright.run.group.environment import list_ignored_settings, rank_from_variables, refuse_more_nodes
from trainwright.run.group.failure_report import should_report

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("more", "each"),
    [({}, 4), ({"SLURM_GPUS_ON_NODE": "2"}, 2), ({"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "3"}, 3)],
)
def test_a_plain_line_in_an_allocation_of_several_nodes(more: dict[str, str], each: int) -> None:
    with pytest.raises(RequestError, match=r"2 nodes, but this command trains on one; .*--nodes 1") as caught:
        refuse_more_nodes(["my recipe.yaml", "train.seed=1", "parallel.num_processes=1"], None, {**BATCH, **more})
    command = f"srun --nodes=2 --ntasks-per-node={each} python -m trainwright.worker 'my recipe.yaml' train.seed=1"
    assert f"`{command}`" in str(caught.value)


def test_an_allocation_that_is_used_as_it_is_meant() -> None:
    refuse_more_nodes([], None, {})
    refuse_more_nodes([], None, {**BATCH, "SLURM_JOB_NUM_NODES": "1"})
    refuse_more_nodes([], 1, BATCH)
    refuse_more_nodes([], 2, BATCH)
    refuse_more_nodes([], None, {**BATCH, "SLURM_STEP_ID": "0"})


def told(nodes: int | None = None, processes: int = 2, file: Path | None = None, **variables: str) -> list[str]:
    return list(list_ignored_settings(nodes, processes, file, variables))


def test_what_is_not_followed_is_told_with_what_would() -> None:
    assert told() == []
    (line,) = told(file=Path("/home/me/default_config.yaml"))
    assert "is not used: --accelerate-config /home/me/default_config.yaml" in line
    (line,) = told(MASTER_ADDR="head", MASTER_PORT="29511")
    assert "MASTER_ADDR is head, which is not used" in line and "--rendezvous head:29511" in line
    (line,) = told(SLURM_JOB_ID="7", SLURM_NTASKS="8")
    assert "for 8 tasks, and 2 processes start here: parallel.num_processes" in line
    assert told(2, MASTER_ADDR="head") == told(SLURM_JOB_ID="7", SLURM_NTASKS="2") == []
    assert told(MASTER_ADDR="head", RANK="0", WORLD_SIZE="1") == []


def test_the_command_says_it_and_refuses_it(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text("distributed_type: NO\n")
    dry = ("train", str(TINY), "parallel.num_processes=1", "--dry-run")
    finished = runs.command(*dry, HF_HOME=str(tmp_path), MASTER_ADDR="head").wait()
    assert finished.code == 0, finished.stderr
    notes = [line for line in finished.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and "default_config.yaml" in notes[0] and "MASTER_ADDR" in notes[1]
    finished = runs.command(*dry, **BATCH).wait()
    assert finished.code == 2 and "srun --nodes=2 --ntasks-per-node=4" in finished.stderr
    finished = runs.command(*dry, WORLD_SIZE="4").wait()
    assert finished.code == 3 and "WORLD_SIZE is 4 and RANK is not set" in finished.stderr


@pytest.mark.slow
def test_a_refusal_is_told_by_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert should_report(0, "this") and should_report(0, "this")
    assert not should_report(1, "this")
    assert should_report(2, "what rank 0 has not met") and not should_report(3, "what rank 0 has not met")


def test_ranks_are_known_where_nothing_else_is() -> None:
    assert rank_from_variables({"RANK": "3"}) == rank_from_variables({"RANK": "x", "SLURM_PROCID": "3"}) == 3
    assert rank_from_variables({}) == 0
