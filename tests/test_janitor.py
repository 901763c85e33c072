"""Nothing that tests start outlives the pytest that started it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, all_gone, descendants, started, wait_for
from tests.support.janitor import MARK, marked

TESTS = """
import time

from tests.support.commands import started
from tests.support.runs import TINY


def test_it(runs, tmp_path):
    runs.train("train.max_steps=100000", "parallel.num_processes=2", "parallel.strategy=ddp")
    with started("-c", "import time; time.sleep(600)", cwd=tmp_path):
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes",
    [pytest.param((), id="alone"), pytest.param(("--processes", "2"), id="of several", marks=pytest.mark.slow)],
)
def test_a_pytest_that_is_killed_in_mid_launch_leaves_nothing_behind(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    settings = ("-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider")
    command = ("-m", "pytest", *settings, *processes, f"--basetemp={tmp_path / 'base'}", str(tmp_path / "test_it.py"))
    with started(*command, cwd=ROOT) as process:
        launcher = wait_for(lambda: _launcher(process.pid))
        wait_for(lambda: launcher.children())
        server = launcher.parent()
        assert server is not None
        mark, victim = server.environ()[MARK], server.parent()
        assert victim is not None and mark != os.environ[MARK]
        children = launcher.children()  # before the others are looked for: it may start more
        begun = [one for one in marked(mark) if one.pid != process.pid]
        assert launcher in begun
        assert {child for child in children if child.is_running()} <= set(begun)  # some have ended: they prepare
        os.kill(victim.pid, signal.SIGKILL)
        assert all_gone(begun)
        wait_for(lambda: not [one for one in marked(mark) if one.status() != psutil.STATUS_ZOMBIE])


def _launcher(pytest_process: int) -> psutil.Process | None:
    """The run that the test has started: a child of the process that forks."""
    for process in descendants(pytest_process):
        try:
            parent = process.parent()
            if parent is not None and "tests.support.fork_server" in parent.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None
