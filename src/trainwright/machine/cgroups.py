"""Resource limits of this process's control groups, the lowest of its own group and all its ancestors; and kills.

See Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# v1 has a number near 2**63 for no limit.
_NO_LIMIT = 2**60


def read_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes of this process and others in its groups; None without a limit."""
    return min((limit for limit, _ in _iterate_memory_limits(root)), default=None)


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Return the unused bytes of the limits; cached file pages count as unused, as they are freed on demand."""
    return min((max(0, limit - usage) for limit, usage in _iterate_memory_limits(root)), default=None)


def read_cpu_limit(root: Path = Path("/")) -> float | None:
    """Return the mean number of cores that the groups may use; None without a limit."""
    limits = []
    for group, version in iterate_groups("cpu", root):
        if version == 2:
            quota, _, period = read_text(group / "cpu.max").partition(" ")
        else:
            quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def iterate_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's groups, its own first and then its ancestors, each with its version.

    A container may see its own group at the top of the mount, regardless of its path.
    """
    mounts = list(_iterate_mounts(root))
    for line in read_text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        version = 2 if not fields[1] else 1
        if version == 1 and controller not in fields[1].split(","):
            continue
        for mount, inside, options in mounts:
            if (options is None) == (version == 2) and (version == 2 or controller in (options or ())):
                yield from ((group, version) for group in _iterate_chain(root, mount, inside, fields[2]))


def _iterate_chain(root: Path, mount: str, inside: str, path: str) -> Iterator[Path]:
    """Yield the existing directories from a group up to the top of its mount."""
    top = root / mount.lstrip("/")
    try:
        below = PurePosixPath(path).relative_to(inside)
    except ValueError:
        below = PurePosixPath()
    group = top / below
    while True:
        if group.is_dir():
            yield group
        if group == top or ".." in below.parts:
            return
        group = group.parent


def _iterate_mounts(root: Path) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    """Yield where control groups are mounted, the group shown there, and the controllers; None for v2 (proc(5))."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) > 4 and kinds and kinds[0] in ("cgroup", "cgroup2"):
            options = tuple(kinds[-1].split(",")) if kinds[0] == "cgroup" else None
            yield fields[4], fields[3], options


def _iterate_memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that has one, and its used bytes that cannot be freed on demand."""
    for group, version in iterate_groups("memory", root):
        limit = read_text(group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
        if not limit.isdigit() or int(limit) >= _NO_LIMIT:
            continue
        usage = read_text(group / ("memory.current" if version == 2 else "memory.usage_in_bytes")).strip()
        prefix = "" if version == 2 else "total_"
        pairs = map(str.split, read_text(group / "memory.stat").splitlines())
        statistics = dict(pair for pair in pairs if len(pair) == 2)
        files = sum(int(statistics.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
        yield int(limit), max(0, int(usage) - files) if usage.isdigit() else 0


def read_text(path: Path) -> str:
    """Return the content of a file; empty if it does not exist or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


_MACHINE_COUNTERS = Path("/proc/vmstat")


def count_memory_kills() -> int:
    """Return how many processes the kernel has killed for memory in this process's cgroup, which its children share.

    Without a cgroup that counts them, those of the whole machine; 0 if the kernel does not report it. Only a change is
    meaningful: a SIGKILL from elsewhere looks the same and is not counted.
    """
    names = {1: "memory.oom_control", 2: "memory.events"}
    files = [group / names[version] for group, version in iterate_groups("memory")]
    return next((count for count in map(_read_memory_kills, (*files, _MACHINE_COUNTERS)) if count is not None), 0)


def _read_memory_kills(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
