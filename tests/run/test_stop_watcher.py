"""A stop ends a launch in bounded time, whatever its workers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.commands import wait_for
from trainwright.run.shutdown.stop import BEFORE_FIRST_STEP, NEWEST, Stopping, StopWatcher, _is_suspended


class Killed(Exception):
    pass


class Launch:
    """A launcher's side with a clock of its own; its one worker is a real process that does nothing."""

    def __init__(self, pid: int) -> None:
        self.now = 0.0
        self.stopping = Stopping()
        self.stopping.kill = self._kill
        self.watcher = StopWatcher(self.stopping, lambda: {3: pid}, lambda: self.now)

    def _kill(self) -> None:
        raise Killed

    def look_until(self, end: float) -> None:
        while self.now < end:
            self.watcher.check()
            self.now += 0.5


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_nothing_is_done_before_a_stop_is_requested(worker: subprocess.Popen[bytes]) -> None:
    launch = Launch(worker.pid)
    launch.stopping.flags.fresh.value = 1
    os.kill(worker.pid, signal.SIGSTOP)
    wait_for(lambda: _is_suspended(worker.pid))
    launch.look_until(1000)
    assert _is_suspended(worker.pid)


def test_workers_that_take_long_for_their_checkpoint_are_left_alone(worker: subprocess.Popen[bytes]) -> None:
    launch = Launch(worker.pid)
    launch.stopping.flag.value = 1
    launch.look_until(10_000)


def test_workers_with_nothing_to_save_are_killed_after_a_moment(worker: subprocess.Popen[bytes]) -> None:
    launch = Launch(worker.pid)
    launch.stopping.flag.value = launch.stopping.flags.fresh.value = 1
    with pytest.raises(Killed):
        launch.look_until(60)
    assert 2 <= launch.now <= 20 and launch.stopping.resumes_from == BEFORE_FIRST_STEP


def test_one_that_stands_still_again_is_named_and_all_are_killed(
    worker: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    launch = Launch(worker.pid)
    launch.stopping.flag.value = 1
    os.kill(worker.pid, signal.SIGSTOP)
    wait_for(lambda: _is_suspended(worker.pid))
    while _is_suspended(worker.pid):
        launch.look_until(launch.now + 1)
        assert launch.now < 60
    os.kill(worker.pid, signal.SIGSTOP)
    wait_for(lambda: _is_suspended(worker.pid))
    with pytest.raises(Killed):
        launch.look_until(launch.now + 60)
    assert launch.stopping.killed and launch.stopping.resumes_from == NEWEST
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(f"rank 3 (process {worker.pid})" in line for line in said)
