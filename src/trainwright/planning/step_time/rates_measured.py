"""Rates from the quick measurement of a machine; missing ones are scaled nominal rates. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.machine.measured.calibration import (
    Calibration,
    Curve,
    Exchanged,
    InStep,
    ProcessRates,
    TimedSample,
    interpolated,
)

# Unmeasured curves, and the measured curve whose deviation from the nominal rate they share.
_LIKE = {
    "traffic/fp32": "traffic/fp32/elementwise",
    "traffic/bf16": "traffic/bf16/elementwise",
    "product/fp16": "product/fp32",
    "attention/fp16": "attention/fp32",
    "traffic/fp16": "traffic/bf16",
    "loss/fp16": "loss/fp32",
    "collective": "collective/all_reduce",
}
# Launch seconds of a small kernel on the machine where the nominal host time was measured.
_LAUNCH = 2e-6
# Factors of kernels in a step relative to the same kernels in a loop: typical factors of calibrations
# (doctor/calibrate_passes.py). Products several times as fast as in fp32 depend more on memory, as their data is not in
# the caches: 1.1 as fast, 1.4 to 1.9 at 6.5 times the rate (AMX).
_IN_STEP = InStep(products=1.1, attention=1.1, traffic=2.5)
_FAST, _FAST_PRODUCTS = 6.5, 1.5

Nominal = Callable[[int, int | None], ProcessRates]


def measured_setting(measured: Calibration, nominal: Nominal, processes: int, threads: int | None) -> ProcessRates:
    """Return the rates of each of ``processes`` with ``threads`` threads, all running at once.

    Each curve is that of the nearest setting in which it was measured; otherwise it is nominal, scaled by the deviation
    of nominal rates in that setting.
    """
    by_distance = sorted(measured.settings, key=lambda setting: distance(setting, processes, threads))
    rates = nominal(processes, threads)
    curves = {name: _nearest_curve(name, rates, by_distance, nominal) for name in rates.curves}
    launch = by_distance[0].launch if by_distance[0].launch > 0 else rates.launch
    exchange = rates.exchange if by_distance[0].exchange == Exchanged() else by_distance[0].exchange
    if not rates.in_step:
        return replace(rates, curves=curves, launch=launch, exchange=exchange)
    in_step = {
        precision: replace(_IN_STEP, products=_products(measured, precision), host=fitted.host * launch / _LAUNCH)
        for precision, fitted in rates.in_step.items()
    }
    return replace(rates, curves=curves, launch=launch, in_step=in_step, exchange=exchange)


def _products(measured: Calibration, precision: str) -> float:
    """Return the factor of the time of products in a step."""
    fastest, plain = peak(measured, precision), peak(measured, "fp32")
    if fastest is None or plain is None:
        return _IN_STEP.products
    share = min(1.0, max(0.0, math.log(fastest / plain) / math.log(_FAST)))
    return _IN_STEP.products + share * (_FAST_PRODUCTS - _IN_STEP.products)


def distance(setting: ProcessRates, processes: int, threads: int | None) -> tuple[float, float]:
    """Return the distance of a setting from these numbers of processes and threads, and that of the threads alone."""
    of_threads = abs(math.log((setting.threads or 1) / (threads or 1)))
    return abs(math.log(setting.processes / processes)) + of_threads, of_threads


def thread_counts(measured: Calibration | None, processes: int, cores: int) -> tuple[int, ...]:
    """Return the threads per process to try: all available, and fewer where they were measured."""
    share = max(1, cores // processes)
    settings = () if measured is None else measured.settings
    fewer = [s.threads for s in settings if s.processes == processes and s.threads and s.threads < share]
    return tuple(dict.fromkeys([share, *sorted(fewer, reverse=True)]))


def peak(measured: Calibration, precision: str) -> float | None:
    """Return the highest measured operations per second of all processes of a setting; None if none was measured."""
    rates = [
        2 * math.prod(sample.sizes) / sample.seconds * setting.processes
        for setting in measured.settings
        for name, curve in setting.curves.items()
        if name.startswith(f"product/{precision}/")
        for sample in curve.samples
    ]
    return max(rates, default=None)


@dataclass(frozen=True)
class _Factors:
    """Ratios of measured to nominal seconds by size: one for all sizes, or several to interpolate."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, measured: Curve, nominal: Curve) -> _Factors:
        ratios = sorted((s.sizes[0], s.seconds / nominal.seconds(*s.sizes)) for s in measured.samples)
        return cls(tuple((math.log(size), math.log(factor)) for size, factor in ratios))

    @property
    def typical(self) -> float:
        return math.exp(statistics.fmean(factor for _, factor in self.points))

    def at(self, size: float) -> float:
        return math.exp(interpolated(self.points, math.log(size)))


def _nearest_curve(name: str, rates: ProcessRates, by_distance: Sequence[ProcessRates], nominal: Nominal) -> Curve:
    curve = rates.curves[name]
    for near in by_distance:
        alike = name if name in near.curves else _stand_in(name, near.curves)
        if alike is None:
            continue
        real, typical = near.curves[alike], nominal(near.processes, near.threads).curves[alike]
        if alike == name and len(real.samples) >= len(real.coefficients) > 1:
            if (near.processes, near.threads) == (rates.processes, rates.threads):
                return real
            factor = _typical_seconds(curve, real) / _typical_seconds(typical, real)  # of another number of cores
            return replace(real, coefficients=tuple(c * factor for c in real.coefficients))
        scaled = _scaled(curve, _Factors.of(real, typical))
        exact = alike == name and curve.form == "table" and rates.processes == near.processes
        return _through(scaled, real.samples) if exact and rates.threads == near.threads else scaled
    return curve


def _through(curve: Curve, samples: Sequence[TimedSample]) -> Curve:
    """Return a table with the measured points included."""
    by_sizes = {sample.sizes: sample for sample in (*curve.samples, *samples)}
    return replace(curve, samples=tuple(by_sizes[sizes] for sizes in sorted(by_sizes)))


def _stand_in(name: str, curves: Mapping[str, Curve]) -> str | None:
    """Return the measured curve whose deviation from nominal rates applies to ``name``, or None."""
    prefix = next((prefix for prefix in _LIKE if name.startswith(prefix)), None)
    if prefix is None:
        return None
    other = _LIKE[prefix] if _LIKE[prefix] in curves else _LIKE[prefix] + name.removeprefix(prefix)
    return other if other in curves else None


def _typical_seconds(curve: Curve, sizes_of: Curve) -> float:
    return statistics.fmean(curve.seconds(*sample.sizes) for sample in sizes_of.samples)


def _scaled(curve: Curve, factors: _Factors) -> Curve:
    if curve.form != "table":
        return replace(curve, coefficients=tuple(c * factors.typical for c in curve.coefficients))
    samples = tuple(TimedSample(s.sizes, s.seconds * factors.at(s.sizes[0])) for s in curve.samples)
    return replace(curve, samples=samples)
