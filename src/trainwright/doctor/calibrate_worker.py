"""Measure cases in all processes of a setting at once, and fit curves to the samples.

Runs in a process of ``calibrate``, or of the quick measurement.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainwright.doctor.calibrate_cases import CalibrationCase, Run
from trainwright.doctor.undisturbed import Stopwatch, Timed, choose_quantile
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, MachineError
from trainwright.machine.measured.calibration import FORMS, Curve, TimedSample
from trainwright.machine.vendors import look_up_processor
from trainwright.parallel.openmp import limit_spinning
from trainwright.parallel.world import World, join, leave
from trainwright.run.process import keep_freed_memory
from trainwright.run.shutdown.stop import stop_requested

_UNDISTURBED = 0.2  # quantile of the calls; slower ones waited for something else
_LAUNCHES, _CHAINS = 100, 5  # kernels in a chain, each launched by the host; chains, the fastest of which counts
_MOST_ROUNDS = 12
_MOST_CALLS = 200
_FEWEST_TYPICAL = 3  # calls
_JOINT = 4  # factor on the slot, because processes that wait for each other have irregular times
_CACHE = 2**27  # bytes; larger than the caches of a processor
_TOO_BUSY = (
    "this machine is too busy to measure: one round exceeds its time limit; stop other programs, and measure again"
)


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    ``slot``: seconds per case and round, in which at least one call is made. ``fewest``: cases of the first round
    without which a setting is of no use; None: all. ``waits``: these are measured however long they take.
    """

    slot: float = 0.02
    fewest: int | None = None
    waits: bool = True


Cases = Mapping[str, Iterable[CalibrationCase]]  # by part


def measure(
    cases_of: Callable[[World], Cases], device_type: str, ends: tuple[float, float], effort: Effort, output: Path
) -> int:
    """Run a worker; rank 0 writes samples by curve to ``output``.

    Args:
        ends: time.monotonic() at which measuring ends, and at which it fails.

    Raises:
        MachineError: the machine is too busy to finish a first round.
    """
    torch.manual_seed(0)
    keep_freed_memory()
    limit_spinning()
    world = join(device_type)
    try:
        parts = cases_of(world)
        cases = [(part, case) for part, of_part in parts.items() for case in of_part]
        measurements: dict[str, Any] = {"samples": {}, "parts": dict.fromkeys(parts, 0.0)}
        case_times = _measure_cases(world, cases, ends, effort, measurements["parts"])
        for case, time_of_case in case_times:
            row = {"sizes": case.sizes, "seconds": time_of_case.seconds / case.amount, "held_out": case.held_out}
            row["disturbed"] = time_of_case.is_disturbed
            measurements["samples"].setdefault(case.curve, []).append(row)
        disturbances = sum(time_of_case.is_disturbed for _, time_of_case in case_times)
        measurements |= {"disturbed": disturbances / max(1, len(case_times)), "number": len(case_times)}
        measurements["overlap"] = measure_overlap(world) if effort.fewest is None else 0.0
        launches = world.gather_floats([_measure_launch_seconds(world.device)])
        measurements["launch"] = statistics.mean(row[0] for row in launches)
        if world.is_main:
            output.write_text(json.dumps(measurements), encoding="utf-8")
    except _Stopped:
        return EXIT_STOPPED
    finally:
        leave()
    return EXIT_FINISHED


class _Stopped(Exception):
    pass


def _measure_cases(
    world: World,
    cases: Sequence[tuple[str, CalibrationCase]],
    ends: tuple[float, float],
    effort: Effort,
    parts: dict[str, float],
) -> list[tuple[CalibrationCase, Timed]]:
    """Return each case with its seconds, the mean over the ranks, without those for which there was no time.

    Cases are timed in rounds over all of them, so that a disturbance by other programs does not affect only a few; for
    most cases the best round is used. Slots are short on a slow machine. ``parts``: the time of each part is added.
    """
    rounds: list[list[Timed]] = [[] for _ in cases]
    built: dict[int, Run] = {}
    clock = Stopwatch()
    fewest = len(cases) if effort.fewest is None else effort.fewest
    for number in range(_MOST_ROUNDS):
        for index, (part, case) in enumerate(cases):
            # Rank 0's clock decides for all ranks. This also synchronizes them.
            start = time.monotonic()
            past = [float(world.is_main and start > end) for end in ends]
            late, over, stop = world.sum([*past, float(stop_requested())])
            if stop:
                raise _Stopped
            required = effort.waits and not number and index < fewest
            if late and not required:
                break
            if over:
                raise MachineError(_TOO_BUSY)
            try:
                run = built.get(index) or case.build()
                if case.typical:
                    built[index] = run
                slot = 0.0 if late or not number else effort.slot
                rounds[index].append(_time(world, clock, case, run, slot))
            except RuntimeError:  # a precision that this GPU does not support
                if world.device.type == "cpu" or case.joint:
                    raise
            parts[part] += time.monotonic() - start
    if not all(rounds[:fewest]) and world.device.type == "cpu":
        return []
    local = [_choose_round(case, times) for (_, case), times in zip(cases, rounds, strict=True)]
    ranks = world.gather_floats([value for sample in local for value in sample])
    results = []
    for index, (_, case) in enumerate(cases):
        seconds, waits = ([row[2 * index + part] for row in ranks] for part in (0, 1))
        if math.isfinite(mean := statistics.mean(seconds)):
            results.append((case, Timed(mean, max(waits))))
    return results


def _choose_round(case: CalibrationCase, times: list[Timed]) -> Timed:
    """Return the best, or the typical, of a case's rounds, preferring undisturbed ones; NaN seconds without rounds."""
    usable = sorted(sample for sample in times if not sample.is_disturbed) or sorted(times)
    share = 0.25 if case.typical and not case.cold else 0.0
    return usable[int(share * len(usable))] if usable else Timed(math.nan, 0.0)


def _time(world: World, clock: Stopwatch, case: CalibrationCase, run: Run, slot: float) -> Timed:
    """Return the seconds of one call, from ``slot`` seconds of calls after an uncounted one."""
    run()
    if world.device.type != "cpu":
        count = _choose_call_count(case, slot, _measure_on_gpu(world.device, run, 1))
        return Timed(_measure_on_gpu(world.device, run, count), 0.0)
    clock.start()
    filler = torch.ones(_CACHE // 4) if case.cold else None

    def timed() -> Timed:
        if filler is not None:
            filler.mul_(1.0)  # in the caches, in place of the case's own tensors
        return clock.time(run)

    first = timed()
    seconds = first.seconds
    if case.joint:
        seconds, slot = world.broadcast(seconds), slot * _JOINT
    times = [first, *(timed() for _ in range(_choose_call_count(case, slot, seconds) - 1))]
    if case.joint:  # if one rank waits for a core, the others wait for it
        rows = world.gather_floats([value for sample in times for value in sample])
        times = [
            Timed(statistics.mean(row[2 * n] for row in rows), max(row[2 * n + 1] for row in rows))
            for n in range(len(times))
        ]
    return choose_quantile(times, 0.5 if case.typical and not case.cold else _UNDISTURBED)


def _choose_call_count(case: CalibrationCase, slot: float, seconds: float) -> int:
    fewest = 2 if case.cold else _FEWEST_TYPICAL if case.typical and slot else 1
    return max(fewest, min(_MOST_CALLS, int(slot / max(seconds, 1e-7))))


def _measure_on_gpu(device: torch.device, run: Callable[[], object], count: int) -> float:
    """Return the mean seconds of ``count`` calls by the GPU's own clock."""
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.accelerator.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _measure_launch_seconds(device: torch.device) -> float:
    """Return the host seconds for launching one small kernel, from a chain of them forward and backward."""
    x, scale = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    times = []
    for _ in range(_CHAINS):
        start = time.perf_counter()
        y = x
        for _ in range(_LAUNCHES):
            y = y * scale  # one kernel forward, one backward
        torch.autograd.grad(y.sum(), x)
        times.append((time.perf_counter() - start) / (2 * _LAUNCHES))
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return min(times)


_BYTES = {"cpu": (2**16, 2**19, 2**22, 2**24, 2**26), "gpu": (2**14, 2**18, 2**22, 2**26, 2**29)}
_HELD_OUT_BYTES = {"cpu": (2**18, 2**21, 2**25), "gpu": (2**20, 2**24, 2**28)}
_OVERLAP_BYTES = {"cpu": 2**24, "gpu": 2**28}
_WIDTH = {"cpu": 512, "gpu": 4096}
_ROUNDS = 3


def iterate_collective_cases(world: World) -> Iterator[CalibrationCase]:
    """Yield the collectives that strategies use, by the bytes of the full tensor."""
    processor = look_up_processor(world.device.type)
    fit_bytes, held_out = _BYTES[processor], _HELD_OUT_BYTES[processor]
    for count in (*fit_bytes, *held_out) if world.size > 1 else ():
        for name in _BUILDERS:
            yield build_collective_case(world, name, count, count in held_out)


def build_collective_case(world: World, name: str, count: int, held_out: bool = False) -> CalibrationCase:
    """Return a collective over a tensor of ``count`` bytes."""
    build = partial(_BUILDERS[name], world, count)
    return CalibrationCase(f"collective/{name}", (count,), build, held_out, joint=True)


def measure_overlap(world: World) -> float:
    """Return the share of an all-reduce that overlaps with matrix products of the same duration, from 0 to 1."""
    if world.size == 1:
        return 0.0
    reduce = _prepare_all_reduce(world, _OVERLAP_BYTES[look_up_processor(world.device.type)])
    width = _WIDTH[look_up_processor(world.device.type)]
    matrix = torch.randn(width, width, device=world.device)
    alone = min(_measure_seconds(world, reduce) for _ in range(_ROUNDS))
    once = min(_measure_seconds(world, lambda: torch.mm(matrix, matrix)) for _ in range(_ROUNDS))
    count = max(1, round(world.broadcast(alone / once)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    tensor = torch.zeros(_OVERLAP_BYTES[look_up_processor(world.device.type)] // 4, device=world.device)

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        assert work is not None
        work.wait()

    computing = min(_measure_seconds(world, compute) for _ in range(_ROUNDS))
    together = min(_measure_seconds(world, both) for _ in range(_ROUNDS))
    hidden = (alone + computing - together) / min(alone, computing)
    return min(1.0, max(0.0, float(world.broadcast(hidden))))


def _measure_seconds(world: World, run: Callable[[], object]) -> float:
    run()
    _finish(world)
    start = time.perf_counter()
    run()
    _finish(world)
    return time.perf_counter() - start


def _finish(world: World) -> None:
    if world.device.type != "cpu":
        torch.accelerator.synchronize()
    world.barrier()


def _prepare_all_reduce(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.all_reduce(tensor)


def _prepare_all_gather(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    full = part.new_empty(len(part) * world.size)
    return lambda: dist.all_gather_single(full, part)


def _prepare_reduce_scatter(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    full = part.new_zeros(len(part) * world.size)
    return lambda: dist.reduce_scatter_single(part, full)


def _prepare_broadcast(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.broadcast(tensor, src=0)


_BUILDERS: dict[str, Callable[[World, int], Run]] = {
    "all_reduce": _prepare_all_reduce,
    "all_gather": _prepare_all_gather,
    "reduce_scatter": _prepare_reduce_scatter,
    "broadcast": _prepare_broadcast,
}


Numbers = np.ndarray[Any, np.dtype[np.float64]]

# Form of a curve by the first part of its name; all others are tables.
_FORM = {"product": "product", "collective": "amount", "host": "amount", "loss": "amount", "data": "batch"}


def build_curve(name: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the curve ``name`` through the rows that are not held out.

    Each row has ``sizes``, ``seconds`` and ``held_out``.
    """
    samples = tuple(TimedSample(tuple(row["sizes"]), row["seconds"], row["held_out"]) for row in rows)
    form = _FORM.get(name.partition("/")[0], "table")
    if form == "table":
        return Curve(form, samples)
    return Curve(form, samples, fit_coefficients(form, [sample for sample in samples if not sample.held_out]))


def fit_coefficients(form: str, samples: Sequence[TimedSample]) -> tuple[float, ...]:
    """Return non-negative coefficients with the least sum of squared relative errors."""
    rows = np.array([[term / sample.seconds for term in FORMS[form](*sample.sizes)] for sample in samples])
    scale = rows.max(axis=0)
    coefficients = solve_non_negative(rows / scale, np.ones(len(samples)))
    return tuple(float(value) for value in coefficients / scale)


def solve_non_negative(rows: Numbers, targets: Numbers) -> Numbers:
    """Return the non-negative x [N] with the least squared error of ``rows`` [M, N] @ x from ``targets`` [M].

    See Lawson and Hanson 1974, ch. 23. With few unknowns, every set of non-zero ones is tried.
    """
    best, least = np.zeros(rows.shape[1]), float(np.square(targets).sum())
    for count in range(1, min(rows.shape) + 1):
        for columns in combinations(range(rows.shape[1]), count):
            coefficients, *_ = np.linalg.lstsq(rows[:, columns], targets, rcond=None)
            off = float(np.square(rows[:, columns] @ coefficients - targets).sum())
            if off < least and (coefficients >= 0).all():
                best, least = np.zeros(rows.shape[1]), off
                best[list(columns)] = coefficients
    return best
