"""Nodes whose caches are their own: each is filled once, by one process of its node."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.counted_rows import COUNT, SECONDS
from tests.support.runs import TINY, Runs, Started, column, difference
from tests.support.workers import start_workers

SETTINGS = (
    "data.train=tests.support.counted_rows:SOURCE",
    "train.max_steps=3",
    "train.global_batch_size=4",
    "parallel.strategy=ddp",
)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def own_cache(directory: Path, node: int) -> dict[str, str]:
    return {"TRAINWRIGHT_CACHE": str(directory / f"cache-{node}"), COUNT: str(directory / f"count-{node}")}


def check(directory: Path, workers: list[Started], reference: Path) -> None:
    """Both nodes have prepared once, and the run is that of one process."""
    for worker in workers:
        ended = worker.wait()
        assert ended.code == 0, ended.stdout + ended.stderr
    assert [len((directory / f"count-{node}").read_text().splitlines()) for node in (0, 1)] == [1, 1]
    for node in (0, 1):
        prepared = [path for path in (directory / f"cache-{node}" / "datasets").iterdir() if path.suffix != ".lock"]
        assert len([path for path in prepared if (path / "about.json").exists()]) == 1
        assert not [path for path in prepared if path.name.startswith(".")]
    run = workers[0].run
    assert run is not None
    assert difference(column(run, "loss"), column(reference, "loss")) < 1e-6


@pytest.fixture
def reference(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COUNT, str(tmp_path / "count-reference"))
    return runs.trained(*SETTINGS[:-1], "parallel.num_processes=1")


@pytest.mark.slow
def test_each_node_of_our_launcher_fills_its_own_cache_once(
    runs: Runs, tmp_path: Path, port: int, reference: Path
) -> None:
    run = runs.new_directory("run")
    words = ("train", str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *SETTINGS)
    nodes = ("--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--num-processes", "4")
    workers = [runs.command(*words, *nodes, "--node-rank", str(node), **own_cache(tmp_path, node)) for node in (0, 1)]
    workers[0].run = run
    check(tmp_path, workers, reference)


@pytest.mark.slow
def test_each_node_of_another_launcher_fills_its_own_cache_once(
    runs: Runs, tmp_path: Path, port: int, reference: Path
) -> None:
    environments = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **own_cache(tmp_path, rank // 2),
            # The second node takes longer than processes wait for each other in a collective.
            SECONDS: str(15 * (rank // 2)),
        }
        for rank in range(4)
    ]
    check(tmp_path, start_workers(runs, environments, *SETTINGS, "parallel.timeout=10 s"), reference)
