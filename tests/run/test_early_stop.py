"""A stop signal that comes while the command still imports what it needs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment
from tests.support.runs import TINY

# The process sends itself the signal at the moment at which it begins to import a module.
_CODE = """
import os, runpy, sys
at, number = sys.argv[1], int(sys.argv[2])
sent = []
def hook(event, arguments):
    if event == "import" and arguments[0] == at and not sent:
        sent.append(True)
        os.kill(os.getpid(), number)
sys.addaudithook(hook)
module, sys.argv = sys.argv[3], sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def interrupted(at: str, number: signal.Signals, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", _CODE, at, str(int(number)), *command]
    return subprocess.run(arguments, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_training_that_has_not_begun_says_so(tmp_path: Path, number: signal.Signals) -> None:
    ended = interrupted("typer", number, "trainwright", "train", str(TINY), cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr == "stopped before the first step; nothing was kept; run the same command again\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_to_be_resumed_is_as_it_was(tmp_path: Path) -> None:
    command = ("trainwright", "train", str(TINY), "--resume", "run")
    ended = interrupted("pydantic", signal.SIGTERM, *command, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (75, "")
    unchanged = "stopped before the first step; the existing run was not changed"
    assert ended.stderr == f"{unchanged}; run the same command again\n"


def test_a_worker_of_another_launcher(tmp_path: Path) -> None:
    ended = interrupted("torch", signal.SIGTERM, "trainwright.worker", str(TINY), cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr == "stopped before the first step; nothing was changed; run the same command again\n"


def test_another_command_that_ctrl_c_ends_says_so(tmp_path: Path) -> None:
    ended = interrupted("pydantic", signal.SIGINT, "trainwright", "plan", str(TINY), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "trainwright plan: interrupted\n"


_AT_THE_END = """
import atexit, os, runpy, sys
number, module, sys.argv = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
atexit.register(lambda: os.kill(os.getpid(), number))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_end_does_not_change_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _AT_THE_END, str(int(number)), "trainwright", "train", "missing.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2, ended.stderr
    assert "missing.yaml" in ended.stderr and "Traceback" not in ended.stderr
