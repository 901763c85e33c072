"""File systems and memory limits for one trial, in its own mount namespace; they end with its process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h
_CGROUPS = Path("/sys/fs/cgroup")
_BUSY_SECONDS = 5.0


@functools.cache
def mounts_refused() -> str | None:
    """Return why this process cannot mount file systems of its own; None if it can."""
    try:
        attempt = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"unshare: {error}"
    return None if attempt.returncode == 0 else f"no mounts of one's own: {attempt.stderr.strip()}"


def own_mounts() -> None:
    """Give this process and its future children a mount namespace of their own. It must have one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("--make-rprivate", "/")


def mount_disk(path: Path, size: int) -> None:
    """Mount an empty file system of this size in bytes."""
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))


def make_read_only(path: Path, read_only: bool = True) -> None:
    """Make the tree at `path` read-only, or writable again."""
    if read_only:
        _mount("--bind", str(path), str(path))
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                return _mount("-o", "remount,bind,ro", str(path))
            except subprocess.CalledProcessError:  # a process that was started meanwhile writes a file
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    else:
        subprocess.run(["umount", "--lazy", str(path)], check=True, capture_output=True)


def fill(path: Path, but: int = 0) -> None:
    """Write a file that fills its disk, except for `but` bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 9))
        if but:
            file.truncate(max(0, file.tell() - but))


def memory_cgroup_refused() -> str | None:
    """Return why a cgroup cannot limit memory here; None if it can."""
    for top, file in ((_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max")):
        probe = top / f"faults-{uuid.uuid4().hex[:8]}"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if (probe / file).exists():
                return None
        finally:
            probe.rmdir()
    return "no cgroup for memory can be made"


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[Path]:
    """Make a cgroup with this memory limit in bytes; a process joins it when its pid is written to the yielded file."""
    old = (_CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    group = (_CGROUPS / "memory" if old else _CGROUPS) / f"faults-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(size))
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def join(group: Path) -> None:
    """Move this process into a cgroup."""
    group.write_text(str(os.getpid()))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
