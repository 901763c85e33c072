"""The Python stack of every worker, from outside: also if its interpreter is blocked."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Not used by the C library, Python, torch or schedulers; signals that stop a run have another meaning.
_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
_SECONDS, _READ_AGAIN = 2.0, 0.05
_PY_SPY_SECONDS = 10.0
_FRAMES = 12
# In the stack of the thread that trains.
_TRAINING = "run_worker.py"


def write_stacks_on_signal(logs: Path, rank: int) -> None:
    """Have this process write the stacks of its threads to a file when it gets the signal of `stacks_of`.

    The handler is in C and needs no interpreter lock (`faulthandler`).
    """
    if _SIGNAL is None:
        return
    with suppress(OSError):
        file = stacks_file(logs, rank).open("a", encoding="utf-8")
        faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=False)


def stacks_of(pids: Mapping[int, int], logs: Path) -> dict[int, str]:
    """Return the stacks of the workers by rank, as far as they could be had. A suspended process writes none, but
    py-spy, if it is installed and allowed, can read it.
    """
    before = {rank: _size(stacks_file(logs, rank)) for rank in pids}
    # The default action of a signal without a handler would end the process.
    asked = [rank for rank, pid in pids.items() if _SIGNAL is not None and _catches(pid, _SIGNAL)]
    for rank in asked:
        with suppress(OSError):
            os.kill(pids[rank], _SIGNAL)  # type: ignore[arg-type]
    deadline = time.monotonic() + _SECONDS
    found: dict[int, str] = {}
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(_READ_AGAIN)
        read = {rank: _read(stacks_file(logs, rank), before[rank]) for rank in asked if rank not in found}
        time.sleep(_READ_AGAIN)  # until it has been written completely
        found |= {
            rank: text for rank, text in read.items() if text and text == _read(stacks_file(logs, rank), before[rank])
        }
    for rank in pids.keys() - found.keys():
        if text := _py_spy(pids[rank]):
            found[rank] = text
            with suppress(OSError), stacks_file(logs, rank).open("a", encoding="utf-8") as file:
                file.write(text)
    return found


def training_thread(stacks: str) -> str:
    """Return the innermost frames of the thread that trains."""
    threads = [thread for thread in stacks.strip().split("\n\n") if thread.strip()]
    chosen = next((thread for thread in threads if _TRAINING in thread), threads[-1] if threads else "")
    head, *frames = chosen.splitlines() or [""]
    more = [f"  ... {len(frames) - _FRAMES} more"] if len(frames) > _FRAMES else []
    return "\n".join([head, *frames[:_FRAMES], *more])


def stacks_file(logs: Path, rank: int) -> Path:
    """Return the file with the stacks of a rank."""
    return logs / f"rank-{rank}.stacks"


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal (proc(5))."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, "dump", "--pid", str(pid), "--nonblocking"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False)
        return ended.stdout if ended.returncode == 0 else ""
    return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path, since: int) -> str:
    try:
        return file.read_bytes()[since:].decode(errors="replace")
    except OSError:
        return ""
