"""Files of /proc and /sys as the kernel shows them, for a machine and a process in a given state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright.machine.counters import Counters

TICKS = 100  # by second, of each core
CGROUP = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@dataclass(frozen=True)
class State:
    """Seconds since the machine started, counts, and bytes.

    Attributes:
        others: seconds of the processors that other programs used.
        ran, queued: of the main thread of this process, with the seconds for which it waited for a core.
        family: of other processes, by number: seconds of the processors, and the numbers of its children.
        pressure: seconds for which a process waited, by kind; None: the kernel does not count them.
        delay: seconds for which this process waited for disks; None: the kernel does not count them.
        heat: seconds for which heat slowed the processor down, and how often; None: not counted.
    """

    wall: float = 0.0
    cores: int = 2
    others: float = 0.0
    iowait: float = 0.0
    stolen: float = 0.0
    ran: float = 0.0
    queued: float = 0.0
    faults: int = 0
    swapped: int = 0
    family: Mapping[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    pressure: Mapping[str, float] | None = None
    delay: float | None = None
    periods: tuple[int, int] = (0, 0)
    heat: tuple[float, int] | None = None
    clock: tuple[int, int] | None = None  # now and base, in kHz

    def then(self, **changes: Any) -> State:
        """The state later."""
        return replace(self, **changes)

    def counters(self, root: Path, parent: int | None = None) -> Counters:
        """What is read from its files, which are written below a directory."""
        for name, text in self.files().items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return Counters.now(parent, root, self.wall)

    def files(self) -> dict[str, str]:
        """The files by name."""
        busy = self.ran + self.others + sum(seconds for seconds, _ in self.family.values())
        idle = self.cores * (1e6 + self.wall) - busy - self.iowait - self.stolen
        ticks = [round(seconds * TICKS) for seconds in (busy, 0, 0, idle, self.iowait, 0, 0, self.stolen, 0, 0)]
        schedule = f"{round(self.ran * 1e9)} {round(self.queued * 1e9)} 100\n"
        files = {
            "proc/stat": f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\nintr 1\n",
            "proc/vmstat": f"nr_free_pages 1\npswpin {self.swapped}\npswpout 0\npswpin_other 7\n",
            "proc/self/stat": _stat(self.ran, self.faults, self.delay or 0.0),
            "proc/self/schedstat": schedule,
            "proc/self/task/10/schedstat": schedule,
            "proc/self/io": "rchar: 5\nread_bytes: 4096\nwrite_bytes: 0\n",
            "proc/self/mountinfo": CGROUP,
            "proc/self/cgroup": "0::/run\n",
            "sys/fs/cgroup/run/cpu.stat": "usage_usec 1\nnr_periods {}\nnr_throttled {}\n".format(*self.periods),
            "proc/sys/kernel/task_delayacct": f"{int(self.delay is not None)}\n",
        }
        for process, (seconds, children) in self.family.items():
            files[f"proc/{process}/stat"] = _stat(seconds)
            files[f"proc/{process}/task/{process}/children"] = " ".join(map(str, children))
        for kind, seconds in (self.pressure or {}).items():
            some = f"avg10=0.00 avg60=0.00 avg300=0.00 total={round(seconds * 1e6)}"
            files[f"proc/pressure/{kind}"] = f"some {some}\nfull {some}\n"
        for core in range(self.cores):
            directory = f"sys/devices/system/cpu/cpu{core}"
            if self.heat is not None:
                for unit in ("core", "package"):
                    files[f"{directory}/thermal_throttle/{unit}_throttle_count"] = f"{self.heat[1]}\n"
                    files[f"{directory}/thermal_throttle/{unit}_throttle_total_time_ms"] = f"{self.heat[0] * 1e3:.0f}\n"
            if self.clock is not None:
                files[f"{directory}/cpufreq/scaling_cur_freq"] = f"{self.clock[0]}\n"
                files[f"{directory}/cpufreq/base_frequency"] = f"{self.clock[1]}\n"
        return files


def _stat(seconds: float, faults: int = 0, delay: float = 0.0) -> str:
    fields = ["0"] * 50
    fields[0], fields[9], fields[11], fields[39] = (
        "R",
        str(faults),
        str(round(seconds * TICKS)),
        str(round(delay * TICKS)),
    )
    return f"10 (a ) name) {' '.join(fields)}\n"
