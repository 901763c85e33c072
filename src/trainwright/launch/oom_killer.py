"""Whether the kernel has killed a process because memory was at its end: by its own counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/vmstat")
_MOUNT = Path("/sys/fs/cgroup")


def kills() -> int:
    """How many processes the kernel has killed for memory in this process's cgroup, which its children share.

    Of the whole machine where there is no cgroup that counts them; 0 where the kernel does not say. Only a change is
    of use: somebody else's SIGKILL looks the same and is not counted.
    """
    for file in (*_cgroup_files(), _MACHINE):
        if (count := _count(file)) is not None:
            return count
    return 0


def _cgroup_files() -> Iterator[Path]:
    """The counters of this process's memory cgroup (cgroup-v2.rst and cgroup-v1/memory.rst in the kernel's documents).

    A container may see its own group at the top of the mount, whatever the path says.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            yield from (_MOUNT / "memory" / place / "memory.oom_control" for place in (inside, ""))
        elif not controllers:
            yield from (_MOUNT / place / "memory.events" for place in (inside, ""))


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
