"""What the watcher of hangs reads about processes from the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.commands import environment, wait_for
from trainwright.faults.hangs.watcher import Moving, ProcessState, count_moved_bytes, read_state

PTRACE_ATTACH, PTRACE_DETACH = 16, 17  # linux/ptrace.h

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture
def family() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process, and the one that it has started."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as parent:
        children = wait_for(psutil.Process(parent.pid).children)
        wait_for(lambda: children[0].name() == "sleep")
        yield psutil.Process(parent.pid), children[0]
        for process in (parent, *children):
            process.send_signal(signal.SIGKILL)


def state(process: psutil.Process) -> ProcessState:
    found = read_state(process.pid)
    assert found is not None
    return found


def test_a_process_that_is_stopped_alone_is_suspended(family: tuple[psutil.Process, psutil.Process]) -> None:
    _, worker = family
    assert not state(worker).suspended and not state(worker).paused
    worker.suspend()
    wait_for(lambda: state(worker).suspended)
    assert not state(worker).paused


def test_a_process_that_is_stopped_with_its_launcher_is_paused(family: tuple[psutil.Process, psutil.Process]) -> None:
    """Ctrl-Z in a terminal, or a scheduler that suspends a job."""
    for process in family:
        process.suspend()
    wait_for(lambda: state(family[1]).paused)
    assert not state(family[1]).suspended


def test_a_process_that_a_debugger_holds_is_paused(family: tuple[psutil.Process, psutil.Process]) -> None:
    worker, libc = family[1], ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, worker.pid, None, None):
        pytest.skip("this machine allows no debugger")
    wait_for(lambda: state(worker).paused)
    assert not state(worker).suspended
    os.waitpid(worker.pid, 0x40000000)  # __WALL: a tracer may wait for it
    libc.ptrace(PTRACE_DETACH, worker.pid, None, None)
    wait_for(lambda: not state(worker).paused)


def test_bytes_of_the_processes_that_a_worker_has_started_count() -> None:
    with subprocess.Popen(["sh", "-c", "dd if=/dev/zero of=/dev/null & wait"], stderr=subprocess.DEVNULL) as parent:
        children = wait_for(psutil.Process(parent.pid).children)
        before = count_moved_bytes(parent.pid)
        wait_for(lambda: count_moved_bytes(parent.pid) > before + 1000)
        for process in (*children, parent):
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "moves"),
    [
        # What the ledger of a rank does, ten times as often; and a slow disk.
        ("sample(); file.write('x' * 200)", False),
        ("file.write('x' * 20_000)", True),
    ],
)
def test_the_ledger_of_a_rank_is_not_taken_for_a_model_that_is_written(tmp_path: Path, what: str, moves: bool) -> None:
    code = (
        "import sys, time; from trainwright.machine.usage import UsageSampler\n"
        "sample, file = UsageSampler(), open(sys.argv[1], 'w', buffering=1)\n"
        f"file.write('begun\\n')\nwhile True: {what}; file.flush(); time.sleep(0.1)"
    )
    written = tmp_path / "written"
    with subprocess.Popen([sys.executable, "-c", code, str(written)], env=environment()) as process:
        try:
            wait_for(lambda: written.exists() and written.read_text())
            moving, found = Moving(), []
            assert moving(process.pid, 0.25), "nothing is known yet"
            for _ in range(12):
                time.sleep(0.25)
                found.append(moving(process.pid, 0.25))
            assert any(found) == moves
        finally:
            process.kill()


def test_the_thread_that_waited_longest_for_a_core_counts() -> None:
    def with_waits(waits: dict[int, float]) -> ProcessState:
        return ProcessState(suspended=False, paused=False, on_disk=False, used=0.0, waited=waits)

    now = with_waits({1: 5.0, 2: 9.0, 3: 7.0})
    assert now.measure_starvation(with_waits({1: 4.0, 2: 6.0})) == 3.0
    assert now.measure_starvation(with_waits({})) == 0.0


def test_all_threads_are_looked_at_only_if_asked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        main, every = read_state(os.getpid()), read_state(os.getpid(), closely=True)
    finally:
        done.set()
        thread.join()
    assert main is not None and every is not None
    if main.waited:  # this kernel counts
        assert set(main.waited) == {os.getpid()} and thread.native_id in every.waited
