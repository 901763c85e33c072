"""Tests in several processes, forked from the one that has collected them: what they import is imported once.

A process runs all tests of a file and then takes the next file that none has taken, so that they share what the file's
fixtures make. What becomes of a test is told to the first process, which shows and counts it as if it had run it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_NUMBER_BYTES = 4
_LOOK_SECONDS = 1.0
_REPORT, _WARNING, _FINISH = "report", "warning", "finish"  # what a process tells


class Processes:
    """Runs the tests in ``count`` processes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pids: dict[Connection, int] = {}
        self._left: dict[str, Any] = {}  # the tests that have not ended, with their places

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Fork the processes, and tell what they tell; nothing where there is no test to run."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, and removed in time
        self._left = {item.nodeid: item.location for item in session.items}
        files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
        numbers, into = os.pipe()
        os.write(into, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(len(files))))
        os.close(into)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for _ in range(min(self._count, len(files))):
                self._fork(session, files, numbers)
            while self._pids:
                wait(list(self._pids), _LOOK_SECONDS)
                for connection, pid in list(self._pids.items()):
                    # Not the end of what it tells: another process that it has forked may live on with the pipe.
                    has_ended = bool(os.waitpid(pid, os.WNOHANG)[0])
                    self._receive(session.config, connection)
                    if has_ended:
                        del self._pids[connection]
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
            for nodeid, location in self._left.items():
                why = "its process has ended, in this test or in one before it"
                report = pytest.TestReport(nodeid, location, {}, "failed", why, "call")
                session.config.hook.pytest_runtest_logreport(report=report)
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return True

    def _fork(self, session: pytest.Session, files: Sequence[Sequence[pytest.Item]], numbers: int) -> None:
        ours, its = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those that importing starts hold no lock
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                _run(session.config, files, numbers, its)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        its.close()
        self._pids[ours] = pid

    def _receive(self, config: pytest.Config, connection: Connection) -> None:
        with suppress(EOFError):
            while connection.poll():
                self._tell(config, *connection.recv())

    def _tell(self, config: pytest.Config, kind: str, values: Any) -> None:
        if kind == _REPORT:
            report = config.hook.pytest_report_from_serializable(config=config, data=values)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == _WARNING:
            config.hook.pytest_warning_recorded.call_historic(kwargs=values)
        else:
            config.hook.pytest_runtest_logfinish(**values)
            self._left.pop(values["nodeid"], None)


def _run(config: pytest.Config, files: Sequence[Sequence[pytest.Item]], numbers: int, to: Connection) -> None:
    """Run file after file in this process, which shows nothing itself."""
    from trainwright.run.shutdown.stop import signal_after_parent

    signal_after_parent(signal.SIGKILL, os.getppid())
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the first process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Teller(config, to))

    def left() -> Iterator[Sequence[pytest.Item]]:
        while number := os.read(numbers, _NUMBER_BYTES):
            yield files[int.from_bytes(number)]

    taken = left()
    file = next(taken, None)
    while file is not None:
        following = None
        for item, after in zip(file, [*file[1:], None], strict=True):
            if after is None:  # a file is taken when it can be run
                following = next(taken, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=after or (following and following[0]))
        file = following


class _Teller:
    """Sends the first process what happens in this one."""

    def __init__(self, config: pytest.Config, to: Connection) -> None:
        self._config, self._to = config, to

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._to.send((_FINISH, {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._to.send((_REPORT, data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: Any, nodeid: str, location: Any
    ) -> None:
        of = warning_message.category
        kind = of if of.__module__ == "builtins" else UserWarning  # others may not be there in the first process
        plain = warnings.WarningMessage(
            str(warning_message.message), kind, warning_message.filename, warning_message.lineno
        )
        values = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._to.send((_WARNING, values))
