"""The process that writes checkpoints in the background: it reads requests from its input and answers each.

Imports no torch: it needs a few megabytes, whatever the size of a checkpoint.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.engine.checkpoints.directories import finish, remove, write_synced

_PIECE = 8 * 2**20
_PR_SET_PDEATHSIG = 1
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_NICENESS = 10


def main(memory: int, parent: int) -> None:
    """Answer requests until the input ends.

    Args:
        memory: file descriptor of the memory with the bytes of the tensors.
        parent: process that this one ends with.
    """
    for name in _IGNORED:  # they reach the whole group of processes; the parent decides what follows
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _end_with(parent)
    os.nice(_NICENESS)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _JOBS[request.pop("job")](memory, **request)
        except OSError as error:
            answer = {"error": f"{error.strerror or error} ({error.filename or request.get('path', '')})"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _end_with(parent: int) -> None:
    """Have this process killed with its parent: after a resume it must not write to the same files."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _check_parent(parent)


def _check_parent(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def _part(memory: int, path: str, head: str, size: int) -> dict[str, Any]:
    """Write the first ``size`` bytes of the memory to a file after its head, read the file again, and compare."""
    written, digest = write_synced(Path(path), _pieces(memory, base64.b64decode(head), size))
    return {"size": written, "sha256": digest}


def _pieces(memory: int, head: bytes, size: int) -> Iterator[bytes | memoryview]:
    parent, offset = os.getppid(), 0
    buffer = memoryview(bytearray(_PIECE))
    yield head
    while offset < size:
        _check_parent(parent)
        count = os.preadv(memory, [buffer[: size - offset]], offset)
        if not count:
            raise OSError(f"the copy of the state in memory has {offset} of {size} bytes")
        yield buffer[:count]
        offset += count
    _check_parent(parent)


def _finish(memory: int, path: str, final: str, parts: list[dict[str, Any]], state: str, recipe: str) -> dict[str, Any]:
    finish(Path(path), Path(final), parts, state, recipe)
    return {}


def _remove(memory: int, path: str) -> dict[str, Any]:
    remove(Path(path))
    return {}


_JOBS: dict[str, Callable[..., dict[str, Any]]] = {"part": _part, "finish": _finish, "remove": _remove}
