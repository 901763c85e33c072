"""Measure this machine: the speed of training's operations, in one process and in several at once."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainwright.errors import MachineError, Stopped, TrainwrightError
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, ProcessRates, versions
from trainwright.run.process import preload_libraries
from trainwright.run.shutdown.stop import Stopping

SECONDS = 50.0  # in total, including imports and starting processes
LIMIT = 57.0  # seconds after which a machine is too busy to be measured; with the final work it stays below a minute


def calibrate(
    machine: Machine,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda text: None,
    limit: float = LIMIT,
) -> Calibration:
    """Measure ``machine``, which must be this one, in about ``seconds``.

    Args:
        limit: seconds after which it fails if not even one round is complete.
        say: called with each line of progress.

    Raises:
        MachineError: a measuring process failed, or the machine is too busy.
        Stopped: a stop was requested.
    """
    parts: dict[str, float] = {}
    counts = process_counts(machine)
    settings = []
    disturbed: list[float] = []
    begin = time.monotonic()
    with Stopping("stopping") as stopping, tempfile.TemporaryDirectory(prefix="trainwright-calibrate-") as work:
        preload_libraries()
        parts["imports"] = time.monotonic() - begin
        for number, count in enumerate(counts):
            threads = None if machine.gpus else _threads(machine, count)
            say(f"measuring {_described(count, threads)}")
            started = time.monotonic()
            end = started + max(0.0, begin + seconds - started) / (len(counts) - number)
            measurements = _in_processes(
                machine, count, threads, (end, begin + limit), Path(work) / str(count), stopping
            )
            disturbed.append(measurements["disturbed"])
            settings.append(_setting(machine, count, threads, measurements))
            measured = sum(measurements["parts"].values())
            for part, taken in {**measurements["parts"], "starting": time.monotonic() - started - measured}.items():
                parts[part] = parts.get(part, 0.0) + taken
    return Calibration(
        machine=machine.describe(),
        measured=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(machine),
        settings=tuple(settings),
        parts=parts,
        disturbance=statistics.mean(disturbed),
    )


def process_counts(machine: Machine) -> tuple[int, ...]:
    """Return the numbers of processes to measure: one, the maximum, and on a CPU up to two in between."""
    if machine.gpus:
        return tuple(sorted({1, len(machine.gpus)}))
    doublings = [2**power for power in range(machine.cpu_cores.bit_length())]
    between = doublings[1:-1] if doublings[-1] == machine.cpu_cores else doublings[1:]
    third = len(between) // 3
    return tuple(
        sorted({1, *(between if len(between) < 3 else (between[third], between[-1 - third])), machine.cpu_cores})
    )


def _described(count: int, threads: int | None) -> str:
    processes = f"{count} process{'es' * (count > 1)}"
    if threads is None:
        return f"{processes}, one on each GPU" if count > 1 else "one process on one GPU"
    return f"{processes} of {threads} thread{'s' * (threads > 1)}"


def _threads(machine: Machine, processes: int) -> int:
    """Return the threads per process as in training: a share of the cores, unless OMP_NUM_THREADS is set."""
    own = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(own) if own.isdigit() and int(own) > 0 else max(1, machine.cpu_cores // processes)


def _in_processes(
    machine: Machine, count: int, threads: int | None, ends: tuple[float, float], work: Path, stopping: Stopping
) -> dict[str, Any]:
    from trainwright.doctor.calibrate_worker import measure
    from trainwright.run.supervisor import launch

    output = work / "samples.json"
    work.mkdir()
    with _environment(OMP_NUM_THREADS=threads):
        try:
            launch(
                functools.partial(measure, machine.device, ends, output),
                processes=count,
                logs=work / "logs",
                stopping=stopping,
            )
        except TrainwrightError as error:
            raise MachineError(f"measuring failed in one of {count} processes: {error}") from error
    if stopping.requested:
        raise Stopped("stopped; the measurement was not finished, and nothing was saved")
    measurements: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return measurements


def _setting(machine: Machine, count: int, threads: int | None, measurements: dict[str, Any]) -> ProcessRates:
    from trainwright.doctor.calibrate_fits import curve_of
    from trainwright.doctor.calibrate_passes import exchange, in_step, split

    samples, passes, sharded = split(measurements["samples"])
    curves = {name: curve_of(name, rows) for name, rows in samples.items()}
    alone = ProcessRates(count, threads, curves, launch=measurements["launch"], overlap=measurements["overlap"])
    steps = replace(alone, in_step={precision: in_step(alone, precision, rows) for precision, rows in passes.items()})
    return replace(steps, exchange=exchange(steps, machine, sharded)) if sharded else steps


@contextmanager
def _environment(**variables: int | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
