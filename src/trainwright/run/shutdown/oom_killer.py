"""Influence which process the kernel kills when memory runs out, and detect by its counters that it killed one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainwright.machine.cgroups import groups

_MACHINE_COUNTERS = Path("/proc/vmstat")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_SCORE_OF_WORKERS = 500  # of 1000, the score of a process that uses all memory


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed for memory in this process's cgroup, which its children share.

    Without a cgroup that counts them, those of the whole machine; 0 if the kernel does not report it. Only a change is
    meaningful: a SIGKILL from elsewhere looks the same and is not counted.
    """
    for file in (*_cgroup_files(), _MACHINE_COUNTERS):
        if (count := _memory_kills(file)) is not None:
            return count
    return 0


def raise_oom_score(score: int = _SCORE_OF_WORKERS) -> None:
    """Have the kernel kill this process before others, so that its launcher survives to report it (proc(5)).

    Raising the score needs no privileges; a higher score is kept.
    """
    with suppress(OSError, ValueError):
        if int(_OOM_SCORE.read_text(encoding="ascii")) < score:
            _OOM_SCORE.write_text(str(score), encoding="ascii")


def _cgroup_files() -> Iterator[Path]:
    """Yield the counters of this process's memory cgroup, or of the nearest ancestor that has them."""
    for group, version in groups("memory"):
        yield group / ("memory.events" if version == 2 else "memory.oom_control")


def _memory_kills(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
