"""Run a program and wait for it: stop signals are passed on, and it does not outlive the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from trainwright.errors import RequestError
from trainwright.run.shutdown.exit_code import CODES_FILE, SHUTDOWN_TIMEOUT, read_exit_code
from trainwright.run.shutdown.stop import STOP_SIGNALS, signal_after_parent
from trainwright.utils.activity import begin_activity

# torchrun passes SIGTERM, SIGINT and SIGHUP on to its workers, and dies of the others, which Slurm may send to every
# process of a job: it ignores them here and is sent SIGTERM instead.
_STOPS_OF_LAUNCHERS: Mapping[int, int] = dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU), signal.SIGTERM)
_RANGE_OF_NODES = re.compile(r"--nnodes[= ]\d+:\d+")
# By default torchrun kills its workers 30 s after a signal, also while they write the last checkpoint.
_TIME_TO_STOP = {SHUTDOWN_TIMEOUT: "3600"}
_SEPARATE_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run_program(command: Sequence[str], **options: Any) -> int:
    """Run ``command`` to its end; return its exit code, or minus the signal that ended it.

    Stop signals are passed on, so that a run has time for a checkpoint. If this process is killed, the program gets
    SIGTERM (on Linux).

    Args:
        options: of ``subprocess.Popen``.

    Raises:
        FileNotFoundError: the program does not exist.
    """
    with pass_on_signals() as (programs, _):
        process = start_program(command, **options)
        programs.append(process)
        return process.wait()


def run_launcher(command: Sequence[str]) -> int:
    """Run another launcher to its end; return the exit code of the run whose processes it starts, or else its own.

    Raises:
        RequestError: there is no such program.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-") as directory:
        file = Path(directory) / "codes"
        with pass_on_signals(_STOPS_OF_LAUNCHERS) as (programs, _):
            try:
                variables = {**_build_environment(command), CODES_FILE: str(file)}
                programs.append(start_program(command, ignored=tuple(_STOPS_OF_LAUNCHERS), env=variables))
            except FileNotFoundError:
                raise RequestError(f"COMMAND: {command[0]}: program not found") from None
            code = programs[0].wait()
        return read_exit_code(file, code if code >= 0 else 128 - code)


def _build_environment(command: Sequence[str]) -> dict[str, str]:
    """Return the environment of a launcher, in which the user's own variables count.

    If torchrun's nodes may come and go, each round of its rendezvous is to have a store of its own: with the one that
    torch 2.13 shares between rounds, a node that comes later waits in vain for its address
    (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, ``next_rendezvous``).
    """
    words = " ".join([*command, f"--nnodes={os.environ.get('PET_NNODES', '')}"])
    return {**_TIME_TO_STOP, **(_SEPARATE_STORES if _RANGE_OF_NODES.search(words) else {}), **os.environ}


def start_program(command: Sequence[str], ignored: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
    """Start ``command``, which gets SIGTERM when this process dies in any way and ignores some signals."""
    if not sys.platform.startswith("linux"):
        return subprocess.Popen(command, **options)
    parent = os.getpid()

    def end_with_parent() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if signal_after_parent(signal.SIGTERM, parent):
            os._exit(1)

    return subprocess.Popen(command, preexec_fn=end_with_parent, **options)


@contextmanager
def pass_on_signals(
    sent: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[tuple[list[subprocess.Popen[Any]], list[int]]]:
    """While entered, pass stop signals to the programs in the first list and record them in the second one.

    ``sent``: the signals that programs get in the place of others. Outside the main thread signals cannot be handled,
    and stay as they are.
    """
    begin_activity("")  # the program has the terminal now
    programs: list[subprocess.Popen[Any]] = []
    signal_numbers: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signal_numbers.append(number)
        if number == signal.SIGINT and _is_in_foreground():
            return  # the terminal has already sent it to all of them
        for program in programs:
            program.send_signal(sent.get(number, number))

    in_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS} if in_main else {}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, pass_on)
    try:
        yield programs, signal_numbers
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Return whether a ctrl-C at the terminal goes to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
