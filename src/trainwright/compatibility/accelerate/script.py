"""Run a user's own script as the body of a worker: started like `python SCRIPT`, stopped like ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, TrainwrightError
from trainwright.run.process import console
from trainwright.run.shutdown.stop import stop_requested

_POLL_SECONDS = 0.1
_SHOW_SECONDS = 2.0  # how long the console output may lag when the script has ended
_NOT_THE_SCRIPTS = (__file__, "<frozen runpy>", runpy.__file__)


class ScriptExit(TrainwrightError):
    """The script called sys.exit with a failure; the launch ends with the same code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(frozen=True)
class Script:
    """The script to run: a file or, as with `python -m`, a module; and its arguments."""

    target: str
    module: bool
    arguments: tuple[str, ...]


def run_script(script: Script) -> int:
    """Run the script as ``__main__`` in this worker; rank 0's output also goes to the console.

    Returns EXIT_FINISHED, or EXIT_STOPPED if it was interrupted. Raises what the script raises, and ScriptExit if it
    exits with a failure.
    """
    _act_on_stop()
    interrupted: BaseException | None = None
    with _shown(), contextlib.ExitStack() as ending:
        ending.callback(_run_exit_functions)
        try:
            _run(script)
        except SystemExit as exit_:
            _check_exit(exit_.code, script)
        except BaseException as error:
            if not stop_requested():
                raise _describe_error(error, script) from error.__cause__
            interrupted = error
    if interrupted is None:
        return EXIT_FINISHED
    # The interrupt, or a collective that the interrupted ranks have left: write it to the log alone.
    traceback.print_exception(interrupted)
    return EXIT_STOPPED


def _run(script: Script) -> None:
    sys.argv = [script.target, *script.arguments]
    first = os.getcwd() if script.module else str(Path(script.target).resolve().parent)
    if not sys.flags.safe_path:
        sys.path[0] = first
    if script.module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script.target, run_name="__main__")


def _check_exit(code: object, script: Script) -> None:
    if code is None or code == 0:
        return
    number = code & 0xFF if isinstance(code, int) else 1
    reason = "" if isinstance(code, int) else f": {code}"
    rank = os.environ.get("RANK", "0")
    raise ScriptExit(f"rank {rank}: {script.target} exited with code {number}{reason}", number)


def _describe_error(error: BaseException, script: Script) -> Exception:
    """Return the error for the launcher to report, with its traceback from the script's first line on."""
    if not isinstance(error, Exception):
        return RuntimeError(f"{script.target} ended by {type(error).__name__}")
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        inner = inner.tb_next
    return error.with_traceback(inner or error.__traceback__)


def _run_exit_functions() -> None:
    # A forked process would skip these at its end, and trackers rely on them to finish their runs.
    atexit._run_exitfuncs()


def _act_on_stop() -> None:
    """Interrupt the script once when the launch is asked to stop, by any signal to any process.

    A script that handles SIGTERM receives it; any other receives the KeyboardInterrupt of a ctrl-C.
    """
    due = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if due.is_set():  # otherwise a ctrl-C at the terminal, which the launcher also received and passes on
            due.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    ours = signal.getsignal(signal.SIGTERM)
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        while not stop_requested():
            time.sleep(_POLL_SECONDS)
        if signal.getsignal(signal.SIGTERM) is not ours:
            signal.pthread_kill(main, signal.SIGTERM)
        else:
            due.set()
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Copy what this process writes to its log to the console too, if it has one.

    A separate process copies, so that the last lines arrive even if this one is killed. After the context only the log
    is written: the launcher reports an error once.
    """
    stream = console()
    if stream is None:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.dup(1)
    read, write = os.pipe()
    copier = os.fork()
    if copier == 0:
        os.close(write)
        _copy(read, (log, stream.fileno()))
    os.close(read)
    for descriptor in (1, 2):
        os.dup2(write, descriptor)
    os.close(write)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        # A process that the script left running keeps the pipe open; do not wait for it.
        deadline = time.monotonic() + _SHOW_SECONDS
        while os.waitpid(copier, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.005)


def _copy(source: int, targets: tuple[int, ...]) -> None:
    """Copy until all writers have closed the pipe, then end this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    open_targets = list(targets)
    try:
        while data := os.read(source, 1 << 16):
            for target in tuple(open_targets):
                try:
                    rest = data
                    while rest:
                        rest = rest[os.write(target, rest) :]
                except OSError:  # the console is gone: continue with the log
                    open_targets.remove(target)
    finally:
        os._exit(0)
