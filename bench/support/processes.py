"""Whole processes, measured from outside: the same ruler for every contender.

CPU time is the kernel's account of the process and all its descendants. Memory is looked at several times a
second: the peak resident set of the largest process, which no look can miss, and the proportional set size of the
others alive at that moment, in which a page shared by two processes counts half for each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Usage:
    """What a finished process took; times in seconds, memory in bytes."""

    exit_code: int
    wall_seconds: float
    user_seconds: float
    system_seconds: float
    others_seconds: float  # CPU time of everything else on the machine meanwhile: near 0 when it was quiet
    peak_memory: int  # all processes of the tree together
    peak_memory_largest: int  # the largest single process

    @property
    def cpu_seconds(self) -> float:
        return self.user_seconds + self.system_seconds


def run_measured(command: Sequence[str], *, env: Mapping[str, str], log: Path) -> Usage:
    """Run ``command`` to its end with its output in ``log``, and say what it took.

    ``env`` is laid over the present environment. The process and its children end with this one.
    """
    begin, busy = time.perf_counter(), busy_seconds()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    memory = _MemoryWatch(process.pid)
    # A signal that ends this process becomes an exception, so that it also ends the one it waits for.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        memory.start()
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        memory.stop()
    process.returncode = os.waitstatus_to_exitcode(status)
    return Usage(
        exit_code=process.returncode,
        wall_seconds=time.perf_counter() - begin,
        user_seconds=usage.ru_utime,
        system_seconds=usage.ru_stime,
        others_seconds=max(0.0, busy_seconds() - busy - usage.ru_utime - usage.ru_stime),
        peak_memory=memory.total,
        peak_memory_largest=memory.largest,
    )


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class _MemoryWatch(threading.Thread):
    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.total = 0
        self.largest = 0
        self._root = root
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            peaks = {pid: peak_rss(pid) for pid in process_tree(self._root)}
            largest = max(peaks, key=lambda pid: peaks[pid])
            others = sum(proportional_set(pid) for pid in peaks if pid != largest)
            self.total = max(self.total, peaks[largest] + others)
            self.largest = max(self.largest, peaks[largest])

    def stop(self) -> None:
        self._ended.set()
        self.join()


def busy_seconds() -> float:
    """CPU time that all cores of the machine have spent on anything since it started."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = dict(zip(names, map(int, Path("/proc/stat").read_text().split()[1:9]), strict=True))
    return sum(ticks[name] for name in names if name not in ("idle", "iowait")) / os.sysconf("SC_CLK_TCK")


def process_tree(root: int) -> list[int]:
    """``root`` and its living descendants."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            # The name of the program, in brackets, may itself hold blanks and brackets.
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended between the two looks
        children.setdefault(parent, []).append(int(directory.name))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree


def peak_rss(pid: int) -> int:
    """Bytes: the largest resident set of a process so far; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return kibibytes[0] * 1024 if kibibytes else 0


def proportional_set(pid: int) -> int:
    """Bytes: the resident set of a process, shared pages divided by those who share them; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return kibibytes[0] * 1024 if kibibytes else 0
