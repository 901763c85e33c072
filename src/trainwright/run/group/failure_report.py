"""Report the failure of a rank once in the run, and end the others.

The process that succeeds in creating the file logs/first-failure reports it. All others are informed by their peers and
end too, even if they hang in a collective that will never complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainwright.engine.event_reader import read_log
from trainwright.engine.events import Fault, append_event
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING, RequestError
from trainwright.machine.cgroups import count_memory_kills
from trainwright.recipe.loading import load_recipe
from trainwright.run.group.peers import GONE, Message, Peers
from trainwright.run.observers.hooks import after_failure
from trainwright.run.shutdown.exit_code import record_exit_code
from trainwright.run.shutdown.failure import (
    build_error_record,
    describe_failure,
    is_follow_up,
    locate_error_file,
    record_exception,
)
from trainwright.utils.text import say

_FAILED = "failed"
_FIRST = "first-failure"
# How long a process whose connection broke waits for the reason; once informed, it has this long to end by itself.
_HEAR_SECONDS = 5.0


class FailureReport:
    """Report this rank's failure, and react to the failure of another.

    Args:
        report: called with the exit code and the message of either.
    """

    def __init__(
        self,
        rank: int,
        terminal: TextIO,
        peers: Peers | None,
        report: Callable[[int, str], None] = lambda code, message: None,
    ) -> None:
        self.rank = rank
        self.heard = threading.Event()
        self.text, self.exit_code = "", EXIT_TRAINING  # of the failure received
        self._killed_for_memory = count_memory_kills()
        self.terminal = terminal
        self._peers = peers
        self.report = report
        self._logs: Path | None = None
        self._interrupt: Callable[[], None] | None = None
        if peers is not None:
            peers.watch(self._hear)

    def begin(self, logs: Path) -> None:
        """Use the run's logs from now on. Rank 0 must have called `clear` before."""
        self._logs = logs

    def clear(self, logs: Path, ranks: int) -> None:
        """Remove what an earlier start of the run left. Rank 0 calls this before the others begin."""
        for path in (logs / _FIRST, *(locate_error_file(logs, rank) for rank in range(ranks))):
            path.unlink(missing_ok=True)

    def set_interrupt(self, interrupt: Callable[[], None] | None) -> None:
        """Call ``interrupt`` on a failure elsewhere, instead of ending the process; None restores the latter."""
        self._interrupt = interrupt

    def fail(self, error: BaseException) -> int:
        """Report this process's own exception; return the exit code of the run."""
        record = build_error_record(error)
        if self._logs is not None:
            record_exception(error)
            with contextlib.suppress(OSError):
                locate_error_file(self._logs, self.rank).write_text(json.dumps(record), encoding="utf-8")
        if is_follow_up(record) and self._peers is not None and self.heard.wait(_HEAR_SECONDS):
            return self.exit_code
        failure = describe_failure(self.rank, record, self._logs or Path("logs"))
        self.report(failure.exit_code, failure.message)
        if self._logs is not None or self.rank == 0:
            self._print(failure.message, own=True)
        self._record(failure.message)
        if self._peers is not None:
            self._peers.send(_FAILED, text=failure.message, exit_code=failure.exit_code)
        return failure.exit_code

    def _hear(self, message: Message) -> None:
        if message["kind"] not in (_FAILED, GONE) or self.heard.is_set():
            return
        peer, code = message["peer"], message.get("exit_code")
        self.exit_code = code if type(code) is int and 0 < code < 256 else self._choose_exit_code()
        self.text = str(message.get("text") or self._gone(peer))
        if self._logs is not None:
            self._print(self.text, own=False)
        self.report(self.exit_code, self.text)
        self._record(self.text)
        self.heard.set()
        if self._interrupt is not None:
            self._interrupt()
            return
        # In a separate thread: the connections must still be watched, to forward messages of others.
        timer = threading.Timer(_HEAR_SECONDS, _end, (self.exit_code,))
        timer.daemon = True
        timer.start()

    def _record(self, message: str) -> None:
        if self.rank == 0 and self._logs is not None:
            record_failure(self._logs.parent, message, waits=False)

    def _choose_exit_code(self) -> int:
        """Return the exit code for a rank that ended without a word: memory that ran out here will run out again."""
        return EXIT_TRAINING if count_memory_kills() > self._killed_for_memory else EXIT_FAULT

    def _gone(self, peer: int) -> str:
        log = f"; its log: {self._logs / f'rank-{peer}.log'}" if self._logs is not None else ""
        return (
            f"rank {peer} is gone: it was killed, crashed in native code, called os._exit, or its machine was lost{log}"
        )

    def _print(self, text: str, *, own: bool) -> None:
        if self._logs is not None and not self._is_first(own):
            return
        if self.terminal.isatty():
            self.terminal.write("\x1b[?25h\r")  # a progress bar may have hidden the cursor
        say(f"error: {text}", file=self.terminal)

    def _is_first(self, own: bool) -> bool:
        """Return whether this is the first report. If the disk does not allow to decide, the failed rank reports."""
        assert self._logs is not None
        try:
            os.close(os.open(self._logs / _FIRST, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:  # the disk is full, or the run directory no longer exists
            return own
        return True


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(record_exit_code(code))


_PREFIX = "trainwright-reported-"
# How long to wait for rank 0 to report; and how long a report counts as one of this start.
_WAIT_SECONDS, _VALID_SECONDS = 3.0, 20.0


def should_report(rank: int, what: str) -> bool:
    """Return whether this process reports `what`: rank 0, or the first of the others if rank 0 does not.

    The processes that a launcher starts on one machine have the same parent.
    """
    directory = Path(tempfile.gettempdir())
    digest = hashlib.sha256(f"{os.getuid()} {os.getppid()} {what}".encode()).hexdigest()[:20]
    marker = directory / f"{_PREFIX}{digest}"
    if rank == 0:
        _remove_old(directory)
        with suppress(OSError):
            marker.touch()
        return True
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        if _is_fresh(marker):
            return False
        time.sleep(0.1)
    try:
        marker.unlink(missing_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _is_fresh(marker: Path) -> bool:
    try:
        return time.time() - marker.stat().st_mtime < _VALID_SECONDS
    except OSError:
        return False


def _remove_old(directory: Path) -> None:
    for marker in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if marker.stat().st_uid == os.getuid() and not _is_fresh(marker):
                marker.unlink()


_RANK = re.compile(r"^rank (\d+)\b")


def record_failure(run: Path, message: str | None, *, waits: bool = True) -> None:
    """Record the failure that ended a run which had begun, and write its page again.

    Args:
        message: why it failed; None if it was killed on request.
        waits: for the page to be written, which a process that is about to be killed cannot.
    """
    history = read_log(run / "events.jsonl").everything
    events = [event for event in history if event["event"] != "notice"]
    start_event = next((event for event in reversed(events) if event["event"] == "start"), None)
    if start_event is None or events[-1]["event"] == "finish":
        return
    faults = [event for event in events[events.index(start_event) :] if event["event"] == "fault"]
    is_recorded = events[-1]["event"] == "fault" or any(fault["detail"] in (message or "") for fault in faults)
    if message is not None and not is_recorded:
        line = message.splitlines()[0] if message else "failed without a message"
        rank = _RANK.match(line)
        fault = Fault(kind="failure", rank=int(rank[1]) if rank else 0, detail=line, action="the run ends")
        with suppress(OSError):
            append_event(run / "events.jsonl", fault)
    with suppress(OSError, RequestError):
        settings = load_recipe(run / "recipe.yaml").logging.observers
        after_failure(run, settings, time.time() - start_event["time"], waits=waits)
