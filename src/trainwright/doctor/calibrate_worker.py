"""Measure the cases of a calibration, collectives too, in all processes of a setting at once."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.doctor.calibrate_cases import (
    CalibrationCase,
    Run,
    attention_cases,
    other_cases,
    product_cases,
    traffic_cases,
)
from trainwright.doctor.calibrate_passes import pass_cases
from trainwright.doctor.undisturbed import Stopwatch, Timed, undisturbed
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, MachineError
from trainwright.parallel.openmp import limit_spinning
from trainwright.parallel.world import World, join, leave
from trainwright.run.process import keep_freed_memory
from trainwright.run.shutdown.stop import stop_requested

_SLOT_SECONDS = 0.02  # seconds per case and round; at least one call is made
_UNDISTURBED = 0.2  # quantile of the calls; slower ones waited for something else
_LAUNCHES = 400
_MOST_ROUNDS = 12
_MOST_CALLS = 200
_FEWEST_TYPICAL = 3  # calls
_JOINT = 4  # factor on the slot, because processes that wait for each other have irregular times
_TOO_BUSY = (
    "this machine is too busy to measure: one round exceeds its time limit; stop other programs, and measure again"
)


def measure(device_type: str, ends: tuple[float, float], output: Path) -> int:
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
        parts = {
            "products": product_cases(world.device),
            "traffic": traffic_cases(world.device),
            "attention": attention_cases(world.device),
            "others": other_cases(world.device),
            "passes": pass_cases(world),
            "collectives": collective_cases(world),
        }
        cases = [(part, case) for part, made in parts.items() for case in made]
        measurements: dict[str, Any] = {"samples": {}, "parts": dict.fromkeys(parts, 0.0)}
        measured = _measured(world, cases, ends, measurements["parts"])
        for case, taken in measured:
            rows = measurements["samples"].setdefault(case.curve, [])
            rows.append({"sizes": case.sizes, "seconds": taken.seconds / case.amount, "held_out": case.held_out})
        measurements["disturbed"] = sum(taken.is_disturbed for _, taken in measured) / len(measured)
        measurements["overlap"] = measure_overlap(world)
        measurements["launch"] = statistics.mean(row[0] for row in world.gather_floats([_launch_seconds(world.device)]))
        if world.is_main:
            output.write_text(json.dumps(measurements), encoding="utf-8")
    except _Stopped:
        return EXIT_STOPPED
    finally:
        leave()
    return EXIT_FINISHED


class _Stopped(Exception):
    pass


def _measured(
    world: World, cases: list[tuple[str, CalibrationCase]], ends: tuple[float, float], parts: dict[str, float]
) -> list[tuple[CalibrationCase, Timed]]:
    """Return each case with its seconds, the mean over the ranks.

    Cases are timed in rounds over all of them, so that a disturbance by other programs does not affect only a few;
    for most cases the
    best round is used. The first round is always completed, with short slots on a slow machine. ``parts``: the time of
    each part is added to it.
    """
    rounds: list[list[Timed]] = [[] for _ in cases]
    built: dict[int, Run] = {}
    clock = Stopwatch()
    for number in range(_MOST_ROUNDS):
        for index, (part, case) in enumerate(cases):
            # Rank 0's clock decides for all ranks. This also synchronizes them.
            started = time.monotonic()
            past = [float(world.is_main and started > end) for end in ends]
            late, over, stopped = world.sum([*past, float(stop_requested())])
            if stopped:
                raise _Stopped
            if late and number:
                break
            if over:
                raise MachineError(_TOO_BUSY)
            run = built.get(index) or case.build()
            if case.typical:  # takes longer to build than to run
                built[index] = run
            rounds[index].append(_time(world, clock, case, run, 0.0 if late or not number else _SLOT_SECONDS))
            parts[part] += time.monotonic() - started
    own = [_of_rounds(case, times) for (_, case), times in zip(cases, rounds, strict=True)]
    ranks = world.gather_floats([value for one in own for value in one])
    results = []
    for index, (_, case) in enumerate(cases):
        seconds, waited = ([row[2 * index + part] for row in ranks] for part in (0, 1))
        results.append((case, Timed(statistics.mean(seconds), max(waited))))
    return results


def _of_rounds(case: CalibrationCase, times: list[Timed]) -> Timed:
    """Return the best, or the typical, of a case's rounds, preferring undisturbed ones."""
    clean = sorted(one for one in times if not one.is_disturbed) or sorted(times)
    return clean[int((0.25 if case.typical else 0.0) * len(clean))]


def _time(world: World, clock: Stopwatch, case: CalibrationCase, run: Run, slot: float) -> Timed:
    """Return the seconds of one call, from ``slot`` seconds of calls after an uncounted one."""
    run()
    on_gpu = world.device.type == "cuda"
    clock.start()
    first = Timed(_on_gpu(run, 1), 0.0) if on_gpu else clock.time(run)
    once = first.seconds
    if case.joint:
        once, slot = world.broadcast(once), slot * _JOINT
    fewest = _FEWEST_TYPICAL if case.typical and slot else 1
    count = max(fewest, min(_MOST_CALLS, int(slot / max(once, 1e-7))))
    if on_gpu:
        return Timed(_on_gpu(run, count), 0.0)
    times = [first, *(clock.time(run) for _ in range(count - 1))]
    if case.joint:
        times = _over_ranks(world, times)
    return undisturbed(times, 0.5 if case.typical else _UNDISTURBED)


def _over_ranks(world: World, times: list[Timed]) -> list[Timed]:
    """Combine calls that all ranks make together: if one waits for a core, the others wait for it."""
    rows = world.gather_floats([value for one in times for value in one])
    return [
        Timed(statistics.mean(row[2 * n] for row in rows), max(row[2 * n + 1] for row in rows))
        for n in range(len(times))
    ]


def _on_gpu(run: Callable[[], object], count: int) -> float:
    """Return the mean seconds of ``count`` calls by the GPU's own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def _launch_seconds(device: torch.device) -> float:
    """Return the host seconds for launching one small kernel, from a chain of them forward and backward."""
    x, scale = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        y = x
        for _ in range(_LAUNCHES):
            y = y * scale  # one kernel forward, one backward
        torch.autograd.grad(y.sum(), x)
        times.append((time.perf_counter() - started) / (2 * _LAUNCHES))
        if device.type == "cuda":
            torch.cuda.synchronize()
    return min(times)


_BYTES = {"cpu": (2**16, 2**19, 2**22, 2**24, 2**26), "cuda": (2**14, 2**18, 2**22, 2**26, 2**29)}
_HELD_OUT_BYTES = {"cpu": (2**18, 2**21, 2**25), "cuda": (2**20, 2**24, 2**28)}
_OVERLAP_BYTES = {"cpu": 2**24, "cuda": 2**28}
_WIDTH = {"cpu": 512, "cuda": 4096}
_ROUNDS = 3


def collective_cases(world: World) -> Iterator[CalibrationCase]:
    """Yield the collectives that strategies use, by the bytes of the full tensor."""
    if world.size == 1:
        return
    kind = world.device.type
    for count, held_out in [(n, False) for n in _BYTES[kind]] + [(n, True) for n in _HELD_OUT_BYTES[kind]]:
        for name, build in _BUILDERS.items():
            yield CalibrationCase(f"collective/{name}", (count,), held_out, partial(build, world, count), joint=True)


def measure_overlap(world: World) -> float:
    """Return the share of an all-reduce that overlaps with matrix products of the same duration, from 0 to 1."""
    if world.size == 1:
        return 0.0
    reduce = _all_reduce(world, _OVERLAP_BYTES[world.device.type])
    width = _WIDTH[world.device.type]
    left = torch.randn(width, width, device=world.device)
    alone = min(_seconds(world, reduce) for _ in range(_ROUNDS))
    once = min(_seconds(world, lambda: torch.mm(left, left)) for _ in range(_ROUNDS))
    count = max(1, round(world.broadcast(alone / once)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, left)

    tensor = torch.zeros(_OVERLAP_BYTES[world.device.type] // 4, device=world.device)

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        assert work is not None
        work.wait()

    computing = min(_seconds(world, compute) for _ in range(_ROUNDS))
    together = min(_seconds(world, both) for _ in range(_ROUNDS))
    hidden = (alone + computing - together) / min(alone, computing)
    return min(1.0, max(0.0, float(world.broadcast(hidden))))


def _seconds(world: World, run: Callable[[], object]) -> float:
    run()
    _finish(world)
    started = time.perf_counter()
    run()
    _finish(world)
    return time.perf_counter() - started


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier()


def _all_reduce(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.all_reduce(tensor)


def _all_gather(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    full = part.new_empty(len(part) * world.size)
    return lambda: dist.all_gather_single(full, part)


def _reduce_scatter(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    full = part.new_zeros(len(part) * world.size)
    return lambda: dist.reduce_scatter_single(part, full)


def _broadcast(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.broadcast(tensor, src=0)


_BUILDERS: dict[str, Callable[[World, int], Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}
