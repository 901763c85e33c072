"""Stalls are counted inside collectives, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.commands import environment
from trainwright.engine.policies.stragglers import WINDOW, RankComparison

CHILD = """
import sys, time
from trainwright.utils.heartbeat import Heartbeat
from trainwright.observe.ledger import Stalls

own = Heartbeat(None)
own.phase("backward", 1)
with Stalls(own):
    if sys.argv[1] == "waits":
        own.enter("all_reduce", "", "", counted=True, same_shape=True)
    print("ready", flush=True)
    sys.stdin.readline()
    time.sleep(0.1)  # the thread wakes
    if sys.argv[1] == "waits":
        own.leave()
print(own.stalled)
"""
STOPS, SECONDS = 3, 0.4


@pytest.mark.parametrize("does", ["waits", "computes"])
def test_a_process_that_is_stopped_inside_a_collective_stalls(does: str) -> None:
    command = [sys.executable, "-c", CHILD, does]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(STOPS):
            time.sleep(0.1)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(SECONDS)
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        found = float(process.stdout.readline())
    assert found > STOPS * (SECONDS - 0.1) if does == "waits" else found == 0.0


def test_a_rank_whose_stalls_delay_the_others_is_named() -> None:
    comparison = RankComparison()
    found = None
    for step in range(80):
        still = 0.05 if step >= 40 else 0.0
        seconds = [[0.001, 0.02, 0.02, 0.002, 0.0], [0.001, 0.02, 0.02, 0.002, still * (1 + step % 2 / 10)]]
        if (straggler := comparison.add(seconds, 0.045 + still)) is not None:
            found = step, straggler
    assert found is not None
    step, straggler = found
    assert step < 40 + WINDOW + 4 and straggler.rank == 1 and straggler.phase == "exchange"
    assert straggler.gain == pytest.approx(0.05 / 0.095, rel=0.1)
