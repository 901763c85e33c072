"""A run whose terminal or pipe is closed stops after a checkpoint like any other."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment, python, wait_for
from tests.support.runs import ON_ROWS, TINY, column, events

_STOPPED_BY_A_SIGNAL = """
import os, signal, sys
from trainwright.run.shutdown.stop import Stopping
with Stopping() as stopping:
    os.kill(os.getpid(), signal.{name})
    assert stopping.requested
with Stopping() as stopping, stopping.add_look(lambda: "asked to"):
    assert stopping.requested
print("still there")
"""

# As `nohup` starts a program: what the lines that follow send to themselves at a logout is ignored.
_NOHUP = """
import os, signal, sys
from pathlib import Path
from trainwright.run.shutdown.stop import Flags, Stopping, follow_launcher, follow_signals, stop_requested
from trainwright.run.process import run_in_child
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def log_out():
    os.kill(os.getpid(), signal.SIGHUP)
"""
_UNDER_NOHUP = {
    "a preparation": "with Stopping() as stopping: run_in_child(log_out, Path('log'), stopping)",
    "a worker of another launcher": "follow_signals(); log_out(); assert not stop_requested()",
    "a program that a worker starts": "follow_launcher(Flags(), print); assert os.system('kill -HUP $$') == 0",
}


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_stop_is_taken_with_nobody_to_read_that(name: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", _STOPPED_BY_A_SIGNAL.format(name=name)]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=write, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stdout) == (0, "still there\n")


@pytest.mark.parametrize("what", _UNDER_NOHUP)
def test_nothing_ends_at_a_logout_under_nohup(what: str, tmp_path: Path) -> None:
    ended = python("-c", f"{_NOHUP}\n{_UNDER_NOHUP[what]}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_closing_the_terminal_stops_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = (
        "train.max_steps=400",
        "train.step_policies=['tests.support.slow_steps:SlowSteps']",
        "checkpoint.every=null",
    )
    settings = (ON_ROWS, f"logging.run_directory={run}", "evaluate.every=null", "parallel.num_processes=2", *slow)
    command = [sys.executable, "-m", "trainwright", "train", str(TINY), *settings]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, environment(TRAINWRIGHT_CACHE=str(tmp_path / "cache")))
    try:
        os.set_blocking(terminal, False)
        wait_for(lambda: _read(terminal) and (run / "events.jsonl").exists() and column(run, "step")[1:])
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.killpg(pid, signal.SIGKILL)
        raise
    assert code == 75
    assert events(run, "checkpoint")[-1]["step"] == column(run, "step")[-1]


def _read(terminal: int) -> bool:
    """Read what was written, so that writing never waits."""
    with contextlib.suppress(BlockingIOError):
        os.read(terminal, 1 << 20)
    return True
