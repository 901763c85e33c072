"""One attempt at a run, in a job that is started again by its exit code, and whether another one is worth it.

    python -m trainwright.clusters.job_attempts RUN [--node-rank N] [--add CODE] [--count-in PLACE] -- WORDS

A run that its user asked to stop ends with 0, as the job is over; after several attempts in a row without a new
checkpoint the code is that of a run that would fail again. Other codes are those of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainwright.engine.checkpoints.manifest import list_checkpoints
from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_STOPPED, EXIT_TRAINING, MachineError, RequestError
from trainwright.machine.usage import compute_process_age
from trainwright.run.program import start_program
from trainwright.run.shutdown.requests import forget_stops, stop_was_requested
from trainwright.run.shutdown.stop import STARTS_AGAIN, STOP_SIGNALS
from trainwright.utils.paths import write_file
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.remote_store import RemoteStore


MOST_FAILURES = 3  # in a row, without a new checkpoint
_SIGNAL = 128  # a shell's code of a process that a signal ended is this and its number


def may_continue(code: int) -> bool:
    """Return whether a run that ended with this code may go on when it is started again."""
    return code in (EXIT_STOPPED, EXIT_FAULT) or code > _SIGNAL


def count_failures(run: Path, file: Path, count_in: str | None = None) -> int:
    """Return how often the run has now ended without a checkpoint that it did not have the time before; 0 after one.

    The count is kept in ``file``. Raises RequestError if it cannot be written.

    Args:
        count_in: a place of the run's copies, where the count is kept too: the next time may be on another machine.
    """
    if count_in is not None:
        with _open_remote_store(count_in, run) as store:
            _take(store.read_attempts(), file)
    newest = max(list_checkpoints(run / "checkpoints"), default=0)
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        step, failures = int(before["step"]), int(before["failures"])
    except (OSError, ValueError, KeyError, TypeError):
        step, failures = 0, 0
    failures = 0 if newest > step else failures + 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"step": newest, "failures": failures}) + "\n")
    except OSError as error:  # without a count there is no bound
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None
    if count_in is not None:
        with _open_remote_store(count_in, run) as store:
            store.write_attempts(file.read_text(encoding="utf-8"))
    return failures


def _take(text: str | None, file: Path) -> None:
    if text is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text)


@contextmanager
def _open_remote_store(where: str, run: Path) -> Iterator[RemoteStore]:
    """Yield the place of the run's copies. If it cannot be used, the count is that of this machine."""
    from trainwright.engine.checkpoints.remote_store import RemoteStore, name_in_stores

    try:
        store = RemoteStore(where, name_in_stores(run))
        with store.in_words():
            yield store
    except (RequestError, MachineError) as error:
        say(f"warning: attempts are counted on this machine only: {error}", file=sys.stderr)


MODULE = "trainwright.clusters.job_attempts"
RESTARTS = "TRAINWRIGHT_JOB_RESTARTS"  # how often the cluster has started the job again
# Operators set these for a process of torch; here is the command that starts such processes.
_OF_WORKERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PET_\w+")


def main() -> None:
    """Train; exit with the code that the cluster reads."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--add", type=int, default=0, help="is added to the codes that are worth another attempt")
    parser.add_argument("--count-in", help="where copies of the run are, if its directory may be lost with its machine")
    parser.add_argument("words", nargs="+")
    options = parser.parse_args()
    restarts = os.environ.get(RESTARTS)
    if restarts == "0" and options.node_rank == 0:  # of an earlier job
        forget_stops(options.run, compute_process_age())
    if restarts not in (None, "", "0") and stop_was_requested(options.run):
        say(f"{options.run} was asked to stop, and is not started again", file=sys.stderr)
        sys.exit(EXIT_FINISHED)
    code = choose_exit_code(options.run, options.node_rank, _run_training(options.words), options.count_in)
    sys.exit(code + options.add if may_continue(code) else code)


def choose_exit_code(run: Path, node_rank: int, code: int, count_in: str | None = None) -> int:
    """Return the exit code of an attempt at a run that has ended with ``code`` on a node.

    Args:
        count_in: the place of the run's copies, where attempts are counted too, as the next may be on another machine.
    """
    if code == EXIT_STOPPED and stop_was_requested(run, within=compute_process_age()):
        return EXIT_FINISHED
    if not may_continue(code):
        return code
    code = code if code == EXIT_STOPPED else EXIT_FAULT
    try:
        # All nodes end together, so each counts the same.
        if count_failures(run, run / f".attempts-node-{node_rank}.json", count_in) <= MOST_FAILURES:
            return code
        say(f"not again: {MOST_FAILURES} times in a row there was no new checkpoint of {run}", file=sys.stderr)
    except RequestError as error:
        say(f"not again: {error}", file=sys.stderr)
    return EXIT_TRAINING


def remove_process_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those that an operator sets for the processes of a node."""
    return {name: value for name, value in variables.items() if not _OF_WORKERS.fullmatch(name)}


def _run_training(words: Sequence[str]) -> int:
    """Run ``trainwright train`` to its end, and pass stop signals on; return its exit code.

    If this process is killed, the run stops after a checkpoint.
    """
    pending_signals: list[int] = []  # before there is a process

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            pending_signals.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    child: subprocess.Popen[bytes] | None = None
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, pass_on)
    command = [sys.executable, "-P", "-m", "trainwright", "train", *words]
    child = start_program(command, env={**remove_process_variables(os.environ), STARTS_AGAIN: "1"})
    for number in pending_signals:
        child.send_signal(number)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
