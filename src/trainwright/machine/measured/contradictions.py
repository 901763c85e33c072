"""Detect impossible values of a measured machine: the measurement failed, or a file was written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import (
    Calibration,
    ProcessRates,
    calibration_file,
    current_calibration,
    save_calibration,
)

# No processor exceeds these limits.
_MOST_RATIO, _MOST_SLOWER = 64.0, 10.0  # rates of two precisions; several threads compared with one
_MOST_OPERATIONS, _MOST_BYTES = 1e17, 1e15  # per second


def save_if_reliable(calibration: Calibration, machine: Machine, root: Path | None = None) -> str | None:
    """Save a calibration of ``machine`` if it is usable; otherwise return why not, and what plans use instead."""
    unreliable_reason = calibration.unreliable_reason or next(contradictions(calibration), None)
    if unreliable_reason is None:
        save_calibration(calibration, calibration_file(machine, root))
        return None
    before = current_calibration(machine, root)
    stays = "plans use a quick measurement" if before is None else f"the one of {before.measured} is kept"
    return f"the measurement was discarded, because {unreliable_reason}: {stays}; measure again without other programs"


def contradictions(calibration: Calibration) -> Iterator[str]:
    """Yield impossible values with their keys; the measurement failed then."""
    for number, setting in enumerate(calibration.settings):
        for name, curve in setting.curves.items():
            key = f"settings.{number}.curves.{name}"
            for sample in curve.samples:
                if not (math.isfinite(sample.seconds) and sample.seconds > 0):
                    yield f"{key}: {sample.seconds} seconds for {_sizes(sample.sizes)}"
                elif name.startswith("product/") and 2 * math.prod(sample.sizes) / sample.seconds > _MOST_OPERATIONS:
                    yield f"{key}: {2 * math.prod(sample.sizes) / sample.seconds:.1e} operations per second"
                elif name.startswith("traffic/") and sample.sizes[0] / sample.seconds > _MOST_BYTES:
                    yield f"{key}: {sample.sizes[0] / sample.seconds:.1e} bytes per second"
            if not all(math.isfinite(c) and c >= 0 for c in curve.coefficients):
                yield f"{key}.coefficients: {', '.join(map(str, curve.coefficients))}"
        if not (math.isfinite(setting.launch) and setting.launch >= 0):
            yield f"settings.{number}.launch: {setting.launch}"
    yield from _against_each_other(calibration)


def _against_each_other(calibration: Calibration) -> Iterator[str]:
    for number, setting in enumerate(calibration.settings):
        rates = {precision: _rate(setting, precision) for precision in ("fp32", "tf32", "bf16", "fp16")}
        for one, other in permutations(rates, 2):
            if (rates[one] or 0.0) > _MOST_RATIO * (rates[other] or math.inf):
                times = f"{(rates[one] or 0) / (rates[other] or 1):.0f}"
                yield f"settings.{number}.curves: {one} is {times} times as fast as {other}"
    alone = {s.threads: _rate(s, "fp32") for s in calibration.settings if s.processes == 1 and s.threads}
    if (one_thread := alone.get(1)) is not None:
        for threads, rate in alone.items():
            if rate is not None and rate * _MOST_SLOWER < one_thread:
                yield f"settings: {threads} threads are {one_thread / rate:.0f} times as slow as one"


def _rate(setting: ProcessRates, precision: str) -> float | None:
    """Return the operations per second over all measured products; None without any."""
    curves = [curve for name, curve in setting.curves.items() if name.startswith(f"product/{precision}/")]
    samples = [sample for curve in curves for sample in curve.samples]
    seconds = sum(sample.seconds for sample in samples)
    return sum(2 * math.prod(sample.sizes) for sample in samples) / seconds if seconds > 0 else None


def _sizes(sizes: tuple[float, ...]) -> str:
    return " x ".join(f"{size:.0f}" for size in sizes)
