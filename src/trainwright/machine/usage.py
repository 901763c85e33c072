"""What a process, its machine and its GPU do now, for the ledger of a run."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainwright.machine.cgroups import read_text
from trainwright.machine.counters import Counters, list_core_directories, read_clocks, read_gpu_by_address, read_memory
from trainwright.machine.detect import detect
from trainwright.machine.measured.contention import count_usable_cores
from trainwright.machine.slowdowns import Slowdown, find_causes

# Of what happened since the last sample, what a sample has, with the digits that are kept.
_SINCE: dict[str, int | None] = {
    **dict.fromkeys(("cpu", "host_cpu", "other_cores"), 3),
    **dict.fromkeys(("waited", "throttled", "stolen", "disk"), 4),
    "faults": 2,
    **dict.fromkeys(("heat", "pressure_cpu", "pressure_io", "pressure_memory"), 4),
    **dict.fromkeys(("swap_in", "swap_out", "read", "written"), None),
}
# Drivers of the temperatures of processors (Documentation/hwmon, Documentation/driver-api/thermal).
_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_ZONES = re.compile(r"x86_pkg_temp|.*cpu.*")
_MOST_SENSORS = 4
_LARGEST = 1e18  # of a figure that is shown
_CPUINFO_BYTES = 8192  # of a file that is long where there are many cores


class UsageSampler:
    """Sample this process and its machine; takes less than a millisecond of a processor.

    Args:
        gpu: PCI address of the GPU of this process.
        parent: the process whose children are the ranks of this run on this machine; None: this is the only one.
        root: the directory of /proc and /sys.
    """

    def __init__(self, gpu: str | None = None, parent: int | None = None, root: Path = Path("/")) -> None:
        self._gpu, self._parent, self._root = gpu, parent, root
        self._before = self._read_counters()

    def __call__(self) -> dict[str, Any]:
        """Return what they do; what the system does not tell is left out.

        Memory is in bytes, ``clock`` in MHz, ``temperature`` in degrees Celsius; `gpu.asked` has those of the GPU, and
        `Counters.since` the others, which are of the time since the last call.
        """
        now = self._read_counters()
        since, self._before = now.since(self._before), now
        values: dict[str, Any] = {name: round(since[name], digits) for name, digits in _SINCE.items() if name in since}
        values |= read_memory(self._root)
        if (clock := _read_mean_clock(self._root)) is not None:
            values["clock"] = round(clock)
        if (heat := _read_temperature(self._root)) is not None:
            values["temperature"] = heat
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # by a run on the CPU from itself
        if self._gpu is not None and not is_hidden and (gpu := read_gpu_by_address(self._gpu)):
            values["gpu"] = gpu
        return values

    def _read_counters(self) -> Counters:
        return Counters.now(self._parent, self._root, all_threads=False)


def format_figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what the ranks of a run do in few characters; of several, the lowest and the highest value of each figure.

    ``use``, ``memory``, ``power`` and ``temperature`` of their GPUs; without GPUs, ``use`` of the processors (100% is
    one core) and resident ``memory``. What no sample has is left out.
    """
    gpus = [gpu for sample in samples if isinstance(gpu := sample.get("gpu"), Mapping)]
    total = max(_select_values(gpus, "total_memory"), default=0.0) / 2**30
    columns = {
        "use": ("used", "gpu ", 100, "%") if gpus else ("cpu", "cpu ", 100, "%"),
        "memory": ("memory", "", 2**-30, f"/{total:.0f} GiB" if total else " GiB"),
        "power": ("power", "", 1, " W"),
        "temperature": ("temperature" if gpus else "", "", 1, " °C"),  # that of the processors is not a rank's
    }
    return {
        name: f"{label}{_format_range([scale * value for value in values])}{unit}"
        for name, (field, label, scale, unit) in columns.items()
        if (values := _select_values(gpus or samples, field))
    }


def _select_values(samples: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (sample.get(name) for sample in samples)
    return [float(value) for value in values if isinstance(value, int | float) and abs(value) < _LARGEST]


def _format_range(values: Sequence[float]) -> str:
    ends = (f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in (min(values), max(values)))
    return "-".join(dict.fromkeys(ends))


def compute_process_age(pid: int | None = None) -> float:
    """Return the seconds since a process, this one without a ``pid``, was created."""
    try:
        text = Path(f"/proc/{pid or 'self'}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        creation_time = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started (proc_pid_stat(5))
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - creation_time)
    except (OSError, AttributeError):  # not Linux; there, psutil rounds no time to whole seconds
        return max(0.0, time.time() - psutil.Process(pid).create_time())


def _read_mean_clock(root: Path) -> float | None:
    """Return the mean clock of the processors in MHz."""
    texts = [read_text(core / "cpufreq/scaling_cur_freq").strip() for core in list_core_directories(root)]
    clocks = [int(text) / 1000 for text in texts if text.isdigit()]
    if not clocks:
        with suppress(OSError), open(root / "proc/cpuinfo", "rb") as file:
            clocks = [float(value) for value in re.findall(rb"cpu MHz\s*:\s*([\d.]+)\n", file.read(_CPUINFO_BYTES))]
    return sum(clocks) / len(clocks) if clocks else None


def _read_temperature(root: Path) -> float | None:
    """Return the highest temperature of the processors in degrees Celsius."""
    texts = [read_text(sensor).strip() for sensor in _list_sensors(root)]
    return max((int(text) / 1000 for text in texts if text.lstrip("-").isdigit()), default=None)


@functools.cache
def _list_sensors(root: Path) -> tuple[Path, ...]:
    """Return the files of the temperatures of processors; those of whole processors if there are such."""
    with suppress(OSError):
        sensors = sorted(_iterate_chip_sensors(root), key=lambda each: not each[0])
        of_processors = [file for is_whole, file in sensors if is_whole] or [file for _, file in sensors]
        return tuple((of_processors or list(_iterate_zones(root)))[:_MOST_SENSORS])
    return ()


def _iterate_chip_sensors(root: Path) -> Iterator[tuple[bool, Path]]:
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if read_text(chip / "name").strip() in _CHIPS:
            for file in sorted(chip.glob("temp*_input")):
                label = read_text(file.with_name(file.name.replace("_input", "_label"))).strip()
                yield label.startswith(("Package", "Tctl", "Tdie")), file


def _iterate_zones(root: Path) -> Iterator[Path]:
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        if _ZONES.fullmatch(read_text(zone / "type").strip()):
            yield zone / "temp"


@dataclass(frozen=True)
class OwnProcess:
    """This process of a run.

    Attributes:
        threads: that it computes with.
        processes: of the run on this machine.
        gpu: index of its GPU among those of this machine; None if it computes on the processor.
    """

    threads: int
    processes: int = 1
    gpu: int | None = None

    @property
    def parent(self) -> int | None:
        """The process whose children are the ranks on this machine; None if this is the only one."""
        return os.getppid() if self.processes > 1 else None

    @property
    def gpu_address(self) -> str | None:
        """The PCI address of its GPU, if there is one here."""
        if self.gpu is None:
            return None
        machine = detect()
        return machine.gpus[self.gpu].address if machine.is_here and self.gpu < len(machine.gpus) else None

    def counters(self) -> Counters:
        """Return what the kernel has counted."""
        return Counters.now(self.parent)

    def since(self, before: Counters) -> dict[str, float]:
        """Return what happened since then: see `Counters.since`, with what `find_causes` wants to know beside it."""
        fields = {"threads": self.threads, "processes": self.processes, "cores": count_usable_cores()}
        return {**fields, **self.counters().since(before)}

    def find_causes(
        self, before: Counters, *, elsewhere: float, planned_threads: float | None = None, sleeps: bool = True
    ) -> list[Slowdown]:
        """Return what has made this process slow since then, largest first.

        Args:
            elsewhere: seconds for which it waited for other ranks.
            planned_threads, sleeps: see `find_causes`.
        """
        address = self.gpu_address
        return find_causes(
            {**dict(read_clocks()), **self.since(before)},
            elsewhere=elsewhere / max(time.monotonic() - before.wall, 1e-6),
            planned_threads=planned_threads,
            sleeps=sleeps or self.gpu is not None,
            gpu=None if address is None else read_gpu_by_address(address),
        )


def survives_signal(pid: int, number: int, *, ignored: bool = True) -> bool:
    """Return whether a process catches a signal or, unless ``ignored`` is false, ignores it (proc(5)).

    Where that is unknown, return ``ignored``.
    """
    fields = ("SigCgt:", "SigIgn:") if ignored else ("SigCgt:",)
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ignored
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(fields)]
    return any(mask >> (number - 1) & 1 for mask in masks) if masks else ignored
