"""What shows where a run hangs: the Python stack of every worker, and NCCL's last collectives of every rank.

Stacks are taken from outside, also if the interpreter is blocked. torch's flight recorder keeps the collectives
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html); `torchfrtrace` of torch compares the
files.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from trainwright.machine.usage import survives_signal

# Not used by the C library, Python, torch or schedulers; signals that stop a run have another meaning.
_STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
_STACKS_SECONDS, _READ_AGAIN = 2.0, 0.05
_PY_SPY_SECONDS = 10.0
_FRAMES = 12
# In the stack of the thread that trains.
_TRAINING = "run_worker.py"


def write_stacks_on_signal(logs: Path, rank: int) -> None:
    """Have this process write the stacks of its threads to a file when it gets the signal of `collect_stacks`.

    The handler is in C and needs no interpreter lock (`faulthandler`).
    """
    if _STACKS_SIGNAL is None:
        return
    with suppress(OSError):
        file = locate_stacks_file(logs, rank).open("a", encoding="utf-8")
        faulthandler.register(_STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def collect_stacks(pids: Mapping[int, int], logs: Path) -> dict[int, str]:
    """Return the stacks of the workers by rank, as far as they could be had. A suspended process writes none, but
    py-spy, if it is installed and allowed, can read it.
    """
    before = {rank: _read_size(locate_stacks_file(logs, rank)) for rank in pids}
    # The default action of a signal without a handler would end the process.
    reachable = [
        rank
        for rank, pid in pids.items()
        if _STACKS_SIGNAL is not None and survives_signal(pid, _STACKS_SIGNAL, ignored=False)
    ]
    for rank in reachable:
        with suppress(OSError):
            os.kill(pids[rank], _STACKS_SIGNAL)  # type: ignore[arg-type]
    deadline = time.monotonic() + _STACKS_SECONDS
    stacks: dict[int, str] = {}
    while len(stacks) < len(reachable) and time.monotonic() < deadline:
        time.sleep(_READ_AGAIN)
        read = {rank: _read(locate_stacks_file(logs, rank), before[rank]) for rank in reachable if rank not in stacks}
        time.sleep(_READ_AGAIN)  # until it has been written completely
        again = {rank: _read(locate_stacks_file(logs, rank), before[rank]) for rank in read}
        stacks |= {rank: text for rank, text in read.items() if text and text == again[rank]}
    for rank in pids.keys() - stacks.keys():
        if text := _run_py_spy(pids[rank]):
            stacks[rank] = text
            with suppress(OSError), locate_stacks_file(logs, rank).open("a", encoding="utf-8") as file:
                file.write(text)
    return stacks


def extract_training_thread(stacks: str) -> str:
    """Return the innermost frames of the thread that trains."""
    threads = [thread for thread in stacks.strip().split("\n\n") if thread.strip()]
    stack = next((thread for thread in threads if _TRAINING in thread), threads[-1] if threads else "")
    head, *frames = stack.splitlines() or [""]
    more = [f"  ... {len(frames) - _FRAMES} more"] if len(frames) > _FRAMES else []
    return "\n".join([head, *frames[:_FRAMES], *more])


def locate_stacks_file(logs: Path, rank: int) -> Path:
    """Return the file with the stacks of a rank."""
    return logs / f"rank-{rank}.stacks"


def _run_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, "dump", "--pid", str(pid), "--nonblocking"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False)
        return result.stdout if result.returncode == 0 else ""
    return ""


def _read_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path, since: int) -> str:
    try:
        return file.read_bytes()[since:].decode(errors="replace")
    except OSError:
        return ""


_MAX_COLLECTIVES = 2000  # collectives
_COLLECTIVES_SECONDS, _POLL_SECONDS = 4.0, 0.1
_COLLECTIVES_PREFIX = "nccl-rank-"  # torch appends the rank, and ".pipe" to the name of the pipe


def keep_collectives(logs: Path, pipes: Path | None) -> None:
    """Have torch keep the collectives of process groups that begin later in this process; the user's values stay.

    Args:
        pipes: directory of the pipes through which ``write_collectives`` asks for them.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": str(_MAX_COLLECTIVES),
        "TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _COLLECTIVES_PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if pipes is not None:
        settings["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(pipes / _COLLECTIVES_PREFIX)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def write_collectives(pipes: Path, ranks: Iterable[int], logs: Path) -> dict[int, int]:
    """Ask these ranks to write their collectives to the run's logs.

    Returns:
        When each one that was asked has written them before, as its file has it; ranks without NCCL have no pipe.
    """
    changed_before = {}
    for rank in ranks:
        with suppress(OSError):
            pipe = os.open(_locate_pipe(pipes, rank), os.O_WRONLY | os.O_NONBLOCK)
            try:
                changed_before[rank] = _read_file_state(logs, rank)[0]
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)
    return changed_before


def wait_for_collectives(logs: Path, changed_before: Mapping[int, int]) -> None:
    """Wait until the ranks have written what `write_collectives` has asked for, which may take torch a second.

    A rank may be suspended, so this does not wait for long.
    """
    end, before = time.monotonic() + _COLLECTIVES_SECONDS, dict[int, tuple[int, int]]()
    while changed_before and time.monotonic() < end:
        now = {rank: _read_file_state(logs, rank) for rank in changed_before}
        if now == before and all(now[rank][0] != changed_before[rank] for rank in changed_before):
            return
        before = now
        time.sleep(_POLL_SECONDS)


def _read_file_state(logs: Path, rank: int) -> tuple[int, int]:
    """Return when a rank's file was written, in nanoseconds, and its size."""
    try:
        status = (logs / f"{_COLLECTIVES_PREFIX}{rank}").stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def remove_pipes(pipes: Path, ranks: Iterable[int]) -> None:
    """Remove the pipes of ranks."""
    for rank in ranks:
        with suppress(OSError):
            _locate_pipe(pipes, rank).unlink()


def _locate_pipe(pipes: Path, rank: int) -> Path:
    return pipes / f"{_COLLECTIVES_PREFIX}{rank}.pipe"
