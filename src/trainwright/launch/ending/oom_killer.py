"""Which process the kernel kills when memory is at its end, and whether it has killed one: by its own counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainwright.machine.cgroups import groups

_MACHINE = Path("/proc/vmstat")
_SCORE = Path("/proc/self/oom_score_adj")
_FIRST = 500  # of 1000, which is a process with all memory there is


def kills() -> int:
    """How many processes the kernel has killed for memory in this process's cgroup, which its children share.

    Of the whole machine where there is no cgroup that counts them; 0 where the kernel does not say. Only a change is
    of use: somebody else's SIGKILL looks the same and is not counted.
    """
    for file in (*_cgroup_files(), _MACHINE):
        if (count := _count(file)) is not None:
            return count
    return 0


def be_killed_first(score: int = _FIRST) -> None:
    """Have the kernel end this process before others, so that its launcher is left to say what happened (proc(5)).

    Raising the score needs no rights; where it is higher already it stays.
    """
    with suppress(OSError, ValueError):
        if int(_SCORE.read_text(encoding="ascii")) < score:
            _SCORE.write_text(str(score), encoding="ascii")


def _cgroup_files() -> Iterator[Path]:
    """Yield the counters of this process's memory cgroup; that of the next one above where it has none."""
    for group, version in groups("memory"):
        yield group / ("memory.events" if version == 2 else "memory.oom_control")


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
