"""A process whose peers do not come says for whom it waits, and where."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys

import pytest

from tests.support.commands import PATIENCE, environment
from tests.support.runs import TINY
from trainwright.run.group.peers import Waiting


def test_it_is_told_within_15_s_and_at_widening_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    waiting, told = Waiting("rank 1", 600, clock=lambda: now), []
    while now < 600:
        waiting.tell(lambda: "rank 0 at host:29500 (Connection refused)")
        if (said := capsys.readouterr().err) and not told:
            assert said == (
                "rank 1 has been waiting for rank 0 at host:29500 (Connection refused) for 10 s; --rendezvous-timeout "
                "ends this after 600 s\n"
            )
        told += [now] if said else []
        now += 0.5
    gaps = [after - before for before, after in itertools.pairwise(told)]
    assert told[0] <= 15 and 3 <= len(told) <= 6 and gaps == sorted(gaps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "address", "told"),
    [
        ("1", "127.0.0.1", "rank 1 has been waiting for rank 0 at 127.0.0.1:{port} (Connection refused)"),
        ("1", "node-0.nowhere.invalid", "rank 1 has been waiting for rank 0 at node-0.nowhere.invalid:{port} ("),
        ("0", "127.0.0.1", "rank 0 has been waiting for ranks 1, 2 at 127.0.0.1:{port}"),
    ],
)
def test_a_worker_alone_tells_whom_it_waits_for(rank: str, address: str, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    variables = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": port}
    command = [sys.executable, "-m", "trainwright.worker", str(TINY), "--rendezvous-timeout", "12"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 3
    assert told.format(port=port) in done.stderr
