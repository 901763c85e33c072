"""The GPUs of this machine, and the processes that train on it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from trainwright.machine.counters import read_all_gpus
from trainwright.machine.detect import detect
from trainwright.utils import text

_RECIPE, _LOG = "recipe.yaml", re.compile(r"(/.*)/logs/rank-(\d+)\.log")
_LONGEST_COMMAND = 30  # on a line of 80 columns


@dataclass(frozen=True)
class ProcessUse:
    """A rank of a run, or another program that uses a GPU.

    Attributes:
        command: with its arguments; "" if its process cannot be seen from here, as from within a container.
        run, rank: of a run; None for other programs.
        cpu: cores that it used on average.
        memory: resident bytes.
        gpus: bytes of the memory of each GPU that it uses by index; None where NVML does not tell.
    """

    pid: int
    command: str
    run: Path | None
    rank: int | None
    cpu: float | None
    memory: int | None
    gpus: Mapping[int, int | None]

    def columns(self, *, with_gpus: bool) -> list[str]:
        """Return the columns of ``trainwright gpus``."""
        amounts = [amount for amount in self.gpus.values() if amount is not None]
        of_gpus = [", ".join(map(str, self.gpus)), text.format_bytes(sum(amounts)) if amounts else ""]
        return [
            str(self.pid),
            *(of_gpus if with_gpus else ()),
            "" if self.cpu is None else f"{self.cpu:.2f} cores",
            "" if self.memory is None else text.format_bytes(self.memory),
            self._words(),
        ]

    def _words(self) -> str:
        if self.run is not None:
            base = Path.cwd()
            return f"rank {self.rank} of {self.run.relative_to(base) if self.run.is_relative_to(base) else self.run}"
        command = self.command or "not visible from here"
        return command if len(command) <= _LONGEST_COMMAND else f"{command[: _LONGEST_COMMAND - 1]}…"


def _format_columns(index: int, gpu: Mapping[str, Any]) -> list[str]:
    """Return the columns of a GPU; empty where it does not tell."""
    memory = f"{gpu['memory'] / 2**30:.1f} of {gpu['total_memory'] / 2**30:.1f} GiB" if "total_memory" in gpu else ""
    return [
        str(index),
        f"{gpu['used']:.0%}" if "used" in gpu else "",
        memory,
        f"{gpu['power']:.0f} W" if "power" in gpu else "",
        f"{gpu['temperature']} °C" if "temperature" in gpu else "",
        gpu.get("name", ""),
    ]


@dataclass(frozen=True)
class MachineUse:
    """What the GPUs of this machine do now, and the processes that use them or train; ``gpus``: see `read_all_gpus`."""

    gpus: Sequence[Mapping[str, Any]]
    processes: Sequence[ProcessUse]

    def values(self) -> dict[str, Any]:
        """Return everything as plain values."""
        gpus = [{name: value for name, value in gpu.items() if name != "processes"} for gpu in self.gpus]
        processes = [
            {**asdict(process), "run": None if process.run is None else str(process.run)} for process in self.processes
        ]
        return {"gpus": gpus, "processes": processes}

    def format_gpu_lines(self, width: int | None = None) -> Iterator[str]:
        """Yield the lines of the GPUs, see `text.format_table`."""
        if self.gpus:
            head = ["GPU", "USE", "MEMORY", "POWER", "TEMP", "NAME"]
            rows = (_format_columns(index, gpu) for index, gpu in enumerate(self.gpus))
            yield from text.format_table([head, *rows], width)
        else:
            machine = detect()
            of_cpu = f": {machine.describe()}" if machine.is_here and not machine.gpus else ""
            yield f"no NVIDIA GPU can be read here; runs train on the CPU{of_cpu}"

    def format_process_lines(self, width: int | None = None) -> Iterator[str]:
        """Yield the lines of the processes."""
        if self.processes:
            yield ""
            of_gpus = ["GPU", "GPU MEMORY"] if self.gpus else []
            head = ["PID", *of_gpus, "CPU", "RESIDENT", "PROCESS"]
            rows = (process.columns(with_gpus=bool(self.gpus)) for process in self.processes)
            yield from text.format_table([head, *rows], width)
        else:
            yield "no run trains on this machine" + (", and no program uses a GPU" if self.gpus else "")


def measure_machine_use(seconds: float, gpus: Sequence[Mapping[str, Any]] | None = None) -> MachineUse:
    """Return what the GPUs of this machine and the ranks of runs do; CPU use is measured for ``seconds``.

    Args:
        gpus: what `read_all_gpus` has just returned; None: ask.
    """
    ranks, gpus = _find_ranks(), read_all_gpus() if gpus is None else gpus
    pids = {*ranks, *(pid for gpu in gpus for pid in gpu.get("processes", ()))}
    start = time.monotonic()
    before = {pid: _read_cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    elapsed = time.monotonic() - start
    processes = []
    for pid in sorted(pids, key=lambda pid: (pid not in ranks, ranks.get(pid), pid)):
        gpu_memory = {index: gpu["processes"][pid] for index, gpu in enumerate(gpus) if pid in gpu.get("processes", ())}
        run, rank = ranks.get(pid, (None, None))
        command, cpu, memory = "", None, None
        with suppress(psutil.Error):  # it has ended, belongs to another user, or is outside of this container
            command = " ".join(psutil.Process(pid).cmdline())
            memory = psutil.Process(pid).memory_info().rss
            first, now = before[pid], _read_cpu_seconds(pid)
            cpu = None if first is None or now is None else (now - first) / elapsed
        if gpu_memory or memory is not None:
            processes.append(ProcessUse(pid, command, run, rank, cpu, memory, gpu_memory))
    return MachineUse(gpus, processes)


def _read_cpu_seconds(pid: int) -> float | None:
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return None


def _find_ranks() -> dict[int, tuple[Path, int]]:
    """Return the run and the rank of each worker on this machine by pid: those that write its log.

    Only those of this user, except for root; none where there is no /proc.
    """
    ranks = {}
    for pid in psutil.pids():
        with suppress(OSError):
            log = _LOG.fullmatch(os.readlink(f"/proc/{pid}/fd/1"))
            if log and (run := Path(log[1])).joinpath(_RECIPE).is_file():
                ranks[pid] = run, int(log[2])
    # What a worker starts, as for loading data, writes to the same log.
    return {pid: rank for pid, rank in ranks.items() if ranks.get(_read_parent(pid)) != rank}


def _read_parent(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0
