"""What a quick measurement may have found, of processors with given rates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.doctor.calibrate_worker import build_curve
from trainwright.machine.measured.calibration import Calibration, Curve, ProcessRates

_WIDTHS = ((512, 512), (1024, 512), (512, 1024))
_TOKENS = (64, 256)


def measurement(
    rates: Mapping[tuple[int, int], float] | None = None, bf16: float = 2.0, disturbance: float = 0.0
) -> Calibration:
    """Of a machine with two cores.

    Args:
        rates: fp32 operations per second of each process, by the number of processes and threads.
        bf16: how many times as fast products in it are.
    """
    rates = {(1, 1): 1e11, (2, 1): 1e11, (1, 2): 1.9e11} if rates is None else rates
    settings = tuple(_setting(*place, rate, bf16) for place, rate in rates.items())
    return Calibration("a machine", "2026-01-01T00:00:00+00:00", {}, settings, {}, disturbance)


def _setting(processes: int, threads: int, rate: float, bf16: float) -> ProcessRates:
    curves: dict[str, Curve] = {}
    for precision, times in (("fp32", 1.0), ("bf16", bf16)):
        for layout in ("forward", "input", "weight"):
            sizes = [(m, n, k) for n, k in _WIDTHS for m in _TOKENS]
            name = f"product/{precision}/{layout}"
            curves[name] = build_curve(name, [_row(size, 2 * math.prod(size) / (rate * times)) for size in sizes])
        curves[f"loss/{precision}"] = build_curve(f"loss/{precision}", [_row((2**19,), 3e-3 / threads)])
    curves["traffic/fp32/copy"] = build_curve("traffic/fp32/copy", [_row((2**21,), 1e-4), _row((2**25,), 1e-2)])
    curves["optimizer"] = build_curve("optimizer", [_row((2**21,), 4e-3 / threads)])
    return ProcessRates(processes, threads, curves, launch=4e-6)


def _row(sizes: tuple[int, ...], seconds: float) -> dict[str, object]:
    return {"sizes": sizes, "seconds": seconds, "held_out": False}
