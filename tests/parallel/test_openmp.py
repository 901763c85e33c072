"""Threads that compute together, on cores that other programs use."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading, time
import torch
from trainwright.parallel.openmp import limit_spinning

limit_spinning()
values, end = torch.zeros(2**20), time.monotonic() + float(sys.argv[1])
most = 0
while time.monotonic() < end and most < 2:
    values.add_(1.0)
    most = max(most, sum(thread.name == "openmp" for thread in threading.enumerate()))
print(most)
"""


def _threads(seconds: float, **variables: str) -> int:
    """Return how many threads watch and limit spinning in a process that computes with two threads."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**inherited, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", **variables}
    command = [sys.executable, "-c", _PROGRAM, str(seconds)]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_one_thread_and_the_users_own_setting_are_left_alone() -> None:
    assert _threads(0.0, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") == 0
    assert _threads(0.0, GOMP_SPINCOUNT="10") == 0
    assert _threads(1.0) >= 1


@pytest.mark.slow
def test_threads_are_added_while_other_programs_use_the_cores() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert _threads(60.0) >= 2
    finally:
        for process in busy:
            process.kill()
            process.wait()
