"""What the kernel counts about a process and its machine, and NVML about a GPU, and what follows between two looks."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.machine.cgroups import read_text
from trainwright.machine.measured.contention import CpuContention

# Fields of /proc/<pid>/stat after the name of the program (proc_pid_stat(5)).
_PAGE_FAULTS, _USER, _SYSTEM, _RESIDENT, _DISK = 9, 11, 12, 21, 39
# Of /proc/stat: user, nice, system, idle, iowait, irq, softirq (proc_stat(5)).
_IDLE, _WAITING, _COUNTED = 3, 4, 7
_PRESSURE = ("cpu", "io", "memory")
_MOST_CORES = 8  # of more, evenly chosen ones are read
_MOST_PROCESSES = 256
# Without a known base clock, of the highest clock, which few cores reach at once.
_BASE_CLOCK = 0.6


@dataclass(frozen=True)
class Counters:
    """The counters at one moment.

    Attributes:
        wall: seconds on the host's clock.
        counts: by name; those that the kernel does not count are left out. Times are in seconds.
        processes: seconds of the processors that each process of the run has used.
        heat: for each processor, how often and for how many seconds heat has slowed it down.
        delays_are_counted: whether the kernel counts for which time each process waits for disks.
    """

    wall: float
    counts: Mapping[str, float]
    processes: Mapping[str, float]
    heat: Mapping[str, tuple[int, float]]
    contention: CpuContention
    delays_are_counted: bool = False

    @classmethod
    def now(
        cls, parent: int | None = None, root: Path = Path("/"), wall: float | None = None, *, all_threads: bool = True
    ) -> Counters:
        """Read the counters of the kernel.

        Args:
            parent: the process whose children are of the same run; None: only this process is.
            root: the directory of /proc and /sys.
            wall: the time, if not now.
            all_threads: see `CpuContention.now`.
        """
        proc = root / "proc"
        return cls(
            wall=time.monotonic() if wall is None else wall,
            counts={**dict(_read_machine_counters(proc)), **dict(_read_process_counters(proc))},
            processes=dict(_read_cpu_seconds(proc, parent)),
            heat=dict(_read_heat(root)),
            contention=CpuContention.now(root, all_threads=all_threads),
            delays_are_counted=read_text(proc / "sys/kernel/task_delayacct").strip() == "1",
        )

    def since(self, before: Counters) -> dict[str, float]:
        """Return what happened since ``before``; what is not counted is left out.

        ``waited``, ``throttled``, ``stolen``: see `CpuContention.since`. ``cpu``: cores that this process used on
        average, ``other_cores``: those that other programs used, ``host_cpu``: the used share of all cores. ``asleep``
        and ``disk``: parts of the time for which the main thread slept, and for which it waited for disks, as far as
        that is known. ``pressure_cpu``, ``pressure_io``, ``pressure_memory``: parts of the time for which some process
        of the machine waited for these (Documentation/accounting/psi.rst). ``faults``: pages that this process had to
        read from disk, by second. ``swap_in``, ``swap_out``, ``read``, ``written``: bytes by second, the first two of
        the whole machine. ``heat``: part of the time for which heat slowed down the processor that it slowed down most,
        and ``heat_events``: how often.
        """
        wall = max(self.wall - before.wall, 1e-6)
        more = {
            name: max(0.0, count - before.counts[name]) for name, count in self.counts.items() if name in before.counts
        }
        usage = self.contention.since(before.contention)
        if "own" in more:
            usage["cpu"] = more["own"] / wall
        if more.get("all"):
            usage["host_cpu"] = more["busy"] / more["all"]
        if "busy" in more and self.processes:
            local = sum(max(0.0, spent - before.processes.get(name, 0.0)) for name, spent in self.processes.items())
            usage["other_cores"] = max(0.0, more["busy"] - local) / wall
        if {"ran", "queued"} <= more.keys():
            usage["asleep"] = max(0.0, 1 - (more["ran"] + more["queued"]) / wall)
        for name in ("faults", "swap_in", "swap_out", "read", "written"):
            if name in more:
                usage[name] = more[name] / wall
        for name in (f"pressure_{kind}" for kind in _PRESSURE):
            if name in more:
                usage[name] = min(1.0, more[name] / wall)
        hotter = [(now, before.heat[unit]) for unit, now in self.heat.items() if unit in before.heat]
        if hotter:
            usage["heat_events"] = max(now[0] - first[0] for now, first in hotter)
            usage["heat"] = min(1.0, max(now[1] - first[1] for now, first in hotter) / wall)
        if (disk := self._compute_disk_share(more, usage, wall)) is not None:
            usage["disk"] = disk
        return usage

    def _compute_disk_share(self, more: Mapping[str, float], usage: Mapping[str, float], wall: float) -> float | None:
        if self.delays_are_counted and "disk" in more:
            return min(1.0, more["disk"] / wall)
        # Otherwise it waited for as long as anything did, if it slept for so long.
        machine = usage["pressure_io"] if "pressure_io" in usage else more.get("waiting", -1.0) / wall
        return None if machine < 0.0 or "asleep" not in usage else min(machine, usage["asleep"], 1.0)


def _read_machine_counters(proc: Path) -> Iterator[tuple[str, float]]:
    ticks = [int(word) for word in read_text(proc / "stat").partition("\n")[0].split()[1 : 1 + _COUNTED]]
    if len(ticks) == _COUNTED:
        yield "busy", (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / _read_ticks_per_second()
        yield "waiting", ticks[_WAITING] / _read_ticks_per_second()
        yield "all", sum(ticks) / _read_ticks_per_second()
    for kind in _PRESSURE:
        some = read_text(proc / "pressure" / kind).partition("\n")[0]
        total = some.rpartition("total=")[2]
        if some.startswith("some ") and total.isdigit():
            yield f"pressure_{kind}", int(total) / 1e6
    swap_pages = _parse_numbers(read_text(proc / "vmstat"), ("pswpin", "pswpout"))
    for name, ours in (("pswpin", "swap_in"), ("pswpout", "swap_out")):
        if name in swap_pages:
            yield ours, swap_pages[name] * os.sysconf("SC_PAGE_SIZE")


def _read_process_counters(proc: Path) -> Iterator[tuple[str, float]]:
    if fields := _read_stat(proc / "self"):
        yield "own", _compute_seconds(fields)
        yield "faults", int(fields[_PAGE_FAULTS])
        yield "disk", int(fields[_DISK]) / _read_ticks_per_second()
    numbers = read_text(proc / "self/schedstat").split()
    if len(numbers) > 1:
        yield "ran", int(numbers[0]) / 1e9
        yield "queued", int(numbers[1]) / 1e9
    bytes_ = _parse_numbers(read_text(proc / "self/io"), ("read_bytes:", "write_bytes:"))
    for name, ours in (("read_bytes:", "read"), ("write_bytes:", "written")):
        if name in bytes_:
            yield ours, bytes_[name]


def _read_cpu_seconds(proc: Path, parent: int | None) -> Iterator[tuple[str, float]]:
    """Yield the seconds of the processors that each process of the run on this machine has used so far."""
    processes: list[int | str] = ["self"] if parent is None else [*_list_children(proc, parent)] or ["self"]
    for process in processes:  # grows
        if fields := _read_stat(proc / str(process)):
            yield str(process), _compute_seconds(fields)
        if len(processes) < _MOST_PROCESSES:
            processes += _list_children(proc, process)


def _list_children(proc: Path, process: int | str) -> Sequence[int]:
    number = os.getpid() if process == "self" and proc == Path("/proc") else process
    return [int(word) for word in read_text(proc / str(process) / "task" / str(number) / "children").split()]


def _read_stat(process: Path) -> list[str]:
    fields = read_text(process / "stat").rpartition(")")[2].split()
    return fields if len(fields) > _DISK else []


def _compute_seconds(fields: Sequence[str]) -> float:
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _read_ticks_per_second()


def read_memory(root: Path = Path("/")) -> Iterator[tuple[str, int]]:
    """Yield the bytes of ``memory`` that this process has, and of ``host_memory_free``."""
    if fields := _read_stat(root / "proc/self"):
        yield "memory", int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE")
    free = read_text(root / "proc/meminfo").partition("MemAvailable:")[2].split(maxsplit=1)
    if free and free[0].isdigit():
        yield "host_memory_free", int(free[0]) * 1024


def _parse_numbers(content: str, names: Sequence[str]) -> dict[str, int]:
    numbers = {}
    content = f"\n{content}"
    for name in names:
        value = content.partition(f"\n{name} ")[2].partition("\n")[0].strip()  # the file is long, and read often
        if value.isdigit():
            numbers[name] = int(value)
    return numbers


def _read_heat(root: Path) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield how often and for how many seconds heat has slowed processors down, where that is counted (x86, Intel)."""
    for core in list_core_directories(root):
        for unit in ("core", "package"):
            file = f"{core}/thermal_throttle/{unit}_throttle"
            count = read_text(Path(f"{file}_count")).strip()
            milliseconds = read_text(Path(f"{file}_total_time_ms")).strip()
            if not count.isdigit():
                return  # it is counted for all or for none
            yield f"{core.name} {unit}", (int(count), int(milliseconds) / 1e3 if milliseconds.isdigit() else 0.0)


def read_clocks(root: Path = Path("/")) -> Iterator[tuple[str, float]]:
    """Yield the fastest ``clock`` of this process's cores, and the lowest ``usual_clock`` of one that works, in MHz."""

    def number(core: Path, name: str) -> int:
        text = read_text(core / "cpufreq" / name).strip()
        return int(text) if text.isdigit() else 0

    clocks = ((number(core, "scaling_cur_freq"), core) for core in list_core_directories(root))
    now, core = max(clocks, default=(0, root))
    usual = number(core, "base_frequency") or _BASE_CLOCK * number(core, "cpuinfo_max_freq")
    if now and usual:
        yield "clock", now / 1000
        yield "usual_clock", usual / 1000


@functools.cache
def list_core_directories(root: Path) -> tuple[Path, ...]:
    """Return the directories of the cores that this process may use; of many, evenly chosen ones."""
    try:
        every = [file for file in (root / "sys/devices/system/cpu").iterdir() if re.fullmatch(r"cpu\d+", file.name)]
    except OSError:
        return ()
    every.sort(key=lambda file: int(file.name[3:]))
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        affinity = os.sched_getaffinity(0)
        every = [file for file in every if int(file.name[3:]) in affinity]
    return tuple(every[:: max(1, -(-len(every) // _MOST_CORES))])


def _read_ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")


# Reasons of a low clock (nvml.h, nvmlClocksEventReason...). An idle GPU (0x1) is not limited by anything.
POWER_LIMIT, POWER_BRAKE, HARDWARE, HEAT, HARDWARE_HEAT = 0x4, 0x80, 0x8, 0x20, 0x40
REASONS = {
    0x2: "a clock that somebody has set",
    POWER_LIMIT: "its power limit",
    HARDWARE: "a hardware slowdown",
    0x10: "the clocks of other GPUs",
    HEAT: "heat (driver)",
    HARDWARE_HEAT: "heat (hardware)",
    POWER_BRAKE: "the power brake of the machine",
    0x100: "the clock of its display",
}
# A clock is low below this part of the highest one; GPUs at full load run a little below it.
_LOW_CLOCK, _CLOCK_OF_FAULT = 0.8, 0.95


def read_gpu_by_address(address: str) -> dict[str, Any]:
    """Return what NVML tells about the GPU at a PCI address: see `read_gpu_state`. Empty without NVML or such a GPU."""
    try:
        import pynvml

        return read_gpu_state(pynvml, _open_gpu_handle(address))
    except Exception:  # of a library that is missing, damaged, or without a driver
        return {}


def read_gpu_state(library: Any, handle: Any) -> dict[str, Any]:
    """Return what a GPU tells, without what it does not tell.

    ``used`` is the share of the time in which it computed; ``memory`` and ``total_memory`` are in bytes,
    ``power`` is in watts, clocks are in MHz, ``temperature`` is in degrees Celsius; ``limited`` names what lowers its
    clock.
    """
    questions: dict[str, Callable[[], Any]] = {
        "used": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": lambda: library.nvmlDeviceGetMemoryInfo(handle).used,
        "total_memory": lambda: library.nvmlDeviceGetMemoryInfo(handle).total,
        "power": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clock": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        "highest_clock": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM),
        "temperature": lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
        "limited": lambda: describe_clock_reasons(read_clock_reasons(library, handle)),
    }
    return _collect_answers(library, questions)


def read_all_gpus() -> list[dict[str, Any]]:
    """Return what NVML tells about every GPU of this machine, see `read_gpu_state`; empty without NVML or a GPU.

    Each also has its ``name``, and its ``processes``: by pid, the bytes of its memory that they use, None where NVML
    does not tell.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # see `read_gpu_by_address`
        return []
    try:
        return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(library: Any, index: int) -> dict[str, Any]:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
    except library.NVMLError as error:
        return {"name": f"not readable: {error}"}
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: library.nvmlDeviceGetName(handle),
        "processes": lambda: {
            each.pid: each.usedGpuMemory for each in library.nvmlDeviceGetComputeRunningProcesses(handle)
        },
    }
    return read_gpu_state(library, handle) | _collect_answers(library, questions)


def _collect_answers(library: Any, questions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except (library.NVMLError, AttributeError):  # neither every GPU nor every release has each
            continue
    return answers


def read_clock_reasons(library: Any, handle: Any) -> int:
    """Return the bits of what lowers the clock of a GPU. Raises NVMLError if it does not tell."""
    try:
        bits = library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (library.NVMLError, AttributeError):  # older drivers and releases have the older name
        bits = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return int(bits)


def describe_clock_reasons(bits: int) -> list[str]:
    """Return in words what lowers the clock of a GPU."""
    return [words for bit, words in REASONS.items() if bits & bit]


def find_low_clock(state: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return by which part a GPU's clock is below its highest one, and why in words; None if nothing limits it.

    Args:
        state: see `read_gpu_state`.
    """
    now, highest, limits = state.get("clock"), state.get("highest_clock"), state.get("limited")
    if not now or not highest or limits == []:  # one that is idle lowers its clock by itself
        return None
    is_fault = any(REASONS[bit] in (limits or ()) for bit in (POWER_BRAKE, HARDWARE, HEAT, HARDWARE_HEAT))
    if now >= (_CLOCK_OF_FAULT if is_fault else _LOW_CLOCK) * highest:
        return None
    why = f", limited by {' and '.join(limits)}" if limits else ""
    heat = f", at {state['temperature']} °C" if "temperature" in state else ""
    return 1 - now / highest, f"the process's GPU runs at {now} of {highest} MHz{why}{heat}"


@functools.cache
def _open_gpu_handle(address: str) -> Any:
    import pynvml

    pynvml.nvmlInit()  # until the process ends
    return pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
