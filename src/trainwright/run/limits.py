"""Limits of the system, other than of memory and devices, that runs need higher: raised or reported at their start."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright.errors import MachineError

_SHARED = Path("/dev/shm")
# Files that a process opens for its libraries, those that a launcher needs for each worker, and the connections of a
# rank to each other rank: measured with gloo, and doubled.
_FILES, _FILES_A_WORKER, _FILES_A_RANK = 128, 16, 8
_SHARED_BYTES = 2**20  # locks and queues of the launcher; NCCL takes more and says so itself


def check_limits(local: int = 1, world: int = 1) -> None:
    """Raise limits where possible for ``local`` of ``world`` processes, and check the others.

    Raises:
        MachineError: naming the limit, and how to change it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = count_needed_files(local, world)
    if soft != resource.RLIM_INFINITY and soft < required_files:
        new_limit = required_files if hard == resource.RLIM_INFINITY else min(required_files, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
            soft = new_limit
    files = None if soft == resource.RLIM_INFINITY else soft
    if (problem := check_process_limits(files, _count_free_bytes(_SHARED), local, world)) is not None:
        raise MachineError(problem)


@contextmanager
def open_files_in_words() -> Iterator[None]:
    """Raise MachineError if a file cannot be opened because too many are open already."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        whose = "this process" if error.errno == errno.EMFILE else "the machine"
        raise MachineError(
            f"{whose} reached the limit of open files at {error.filename or 'a connection'}; raise the limit (ulimit "
            "-n), then --resume this run"
        ) from error


def count_needed_files(local: int, world: int) -> int:
    """Return the number of files that a process may need to open, for ``local`` of ``world`` processes."""
    return _FILES + _FILES_A_WORKER * local + _FILES_A_RANK * world


def check_process_limits(files: int | None, shared: int | None, local: int, world: int) -> str | None:
    """Return a message about the limit that is too low for this number of processes, or None.

    Args:
        files: the limit of open files of a process; None without a limit.
        shared: bytes free in /dev/shm; None if it does not exist.
    """
    count = count_needed_files(local, world)
    if files is not None and files < count:
        return (
            f"the limit of open files is {files} (ulimit -n), but a run of {world} process{'es' * (world > 1)} needs "
            f"{count}; raise it: `ulimit -n {max(1024, count)}`, or nofile in /etc/security/limits.conf, or docker "
            "run --ulimit nofile=65536"
        )
    if shared is not None and shared < _SHARED_BYTES:
        return (
            f"{_SHARED} has {shared:,} bytes free, but processes need {_SHARED_BYTES:,} to communicate; remove files "
            "left there by ended programs, or give the container more (docker run --shm-size=1g)"
        )
    return None


def _count_free_bytes(directory: Path) -> int | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
