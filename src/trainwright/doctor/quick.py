"""Measure within about three seconds the rates that decide a plan, in a separate process that returns JSON.

Run by ``trainwright.machine.measured.quick``, which writes the request to standard input and reads the calibration from
standard output.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainwright.doctor import calibrate_cases
from trainwright.doctor.calibrate import Measuring, ProcessSetting, format_current_time
from trainwright.doctor.calibrate_cases import CalibrationCase
from trainwright.doctor.calibrate_worker import Cases, Effort, build_collective_case, build_curve
from trainwright.errors import TrainwrightError
from trainwright.machine.measured.calibration import Calibration, ProcessRates, to_json
from trainwright.machine.vendors import look_up_processor
from trainwright.models.linear_losses import linear_cross_entropy  # noqa: F401  (imported once for all)
from trainwright.parallel.world import World
from trainwright.run.shutdown.stop import Stopping

_LEAST_SECONDS = 2.0  # minimum time of measuring, regardless of imports
_AFTERWARDS = 0.2  # seconds for curves at the end
_LIMIT = 25.0  # seconds of measuring after which the machine is too busy
_OPERATIONS = {"cpu": 5e8, "gpu": 2e11}  # FLOPs of the largest product
_FEWEST, _MOST = {"cpu": 16, "gpu": 512}, {"cpu": 512, "gpu": 8192}  # tokens of a product
_ELEMENTS = {"cpu": (2**18, 2**22), "gpu": (2**22, 2**26)}
_UPDATED = {"cpu": 2**23, "gpu": 2**26}
_ATTENTION = {"cpu": (512, 4, 64), "gpu": (16384, 16, 128)}  # tokens, heads, head size
_LOGITS = {"cpu": 2**19, "gpu": 2**26}
_MESSAGES = (2**14, 2**22)  # bytes that are reduced over processes
_EFFORT = Effort(slot=0.004, fewest=16)  # the products of one matrix in two precisions, and the block


def main() -> None:
    """Measure what standard input requests, and write it as the JSON of a calibration."""
    request = json.load(sys.stdin)
    start = time.monotonic()
    import_seconds = start - request["begun"]
    end = start + max(_LEAST_SECONDS, request["seconds"] - _AFTERWARDS - import_seconds)
    settings = [ProcessSetting(1, None)] if request["device"] != "cpu" else choose_settings(request["cores"])
    with Stopping("stopping") as stopping:
        try:
            measuring = Measuring(request["device"], partial(_build_cases, request), _EFFORT, stopping)
            measurements = measuring.run(settings, end, start + _LIMIT)
        except TrainwrightError as error:
            sys.exit(str(error))
    pairs = [pair for pair in zip(settings, measurements, strict=True) if pair[1]["samples"]]
    rates = tuple(_fit_rates(setting, measurement, request["before"]) for setting, measurement in pairs)
    number = sum(measurement["number"] for _, measurement in pairs)
    disturbance = sum(measurement["disturbed"] * measurement["number"] for _, measurement in pairs) / max(1, number)
    parts = {"imports": import_seconds, "measuring": time.monotonic() - start}
    calibration = Calibration(request["machine"], format_current_time(), request["versions"], rates, parts, disturbance)
    json.dump(to_json(calibration), sys.stdout)


def _fit_rates(
    setting: ProcessSetting, measured: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> ProcessRates:
    """Return the setting, including earlier measurements of products and blocks of other shapes.

    Of a curve only undisturbed samples count, if there are any.
    """
    curves: dict[str, dict[tuple[float, ...], Mapping[str, Any]]] = {}
    for earlier in before:
        if (earlier["processes"], earlier["threads"]) == setting:
            for row in earlier["samples"]:
                curves.setdefault(row["curve"], {})[tuple(row["sizes"])] = {**row, "held_out": False}
    for name, rows in measured["samples"].items():
        undisturbed_rows = [row for row in rows if not row["disturbed"]] or rows
        curves.setdefault(name, {}).update((tuple(row["sizes"]), row) for row in undisturbed_rows)
    fitted_curves = {name: build_curve(name, list(samples.values())) for name, samples in curves.items()}
    return ProcessRates(*setting, fitted_curves, launch=measured["launch"])


def choose_settings(cores: int) -> list[ProcessSetting]:
    """Return the settings to measure on ``cores`` cores, the most important first in case time runs out.

    They are one process with one, all and two threads; as many processes as cores; and two processes that share the
    cores.
    """
    pairs = ((1, 1), (1, cores), (cores, 1), (min(2, cores), max(1, cores // 2)), (1, min(2, cores)))
    return [ProcessSetting(processes, threads) for processes, threads in dict.fromkeys(pairs)]


def _build_cases(request: Mapping[str, Any], setting: ProcessSetting, world: World) -> Cases:
    """Return the cases of a setting, the most important first in case time runs out.

    They are the model's own products, its block, and one or two sizes of the other operations of a step.
    """
    device = world.device
    kind = look_up_processor(device.type)
    cases: list[CalibrationCase] = []
    for number, (wide, narrow) in enumerate(request["widths"]):
        for precision in calibrate_cases.PRECISIONS[kind]:
            tokens = _OPERATIONS[kind] / (2 * wide * narrow)
            tokens = 2 ** int(math.log2(min(_MOST[kind], max(_FEWEST[kind], tokens))))
            for few in (tokens, max(_FEWEST[kind], tokens // 4)):
                cases += calibrate_cases.build_product_cases((few, wide, narrow), precision, device)
        # The factors of a step depend little on how the cores are shared.
        if not number and world.size == 1 and setting.threads == request["cores"]:
            cases += [calibrate_cases.build_block_case(curve, tuple(sizes)) for curve, sizes in request["block"]]
    small, large = _ELEMENTS[kind]
    for precision in ("fp32", "bf16"):
        cases += [calibrate_cases.build_traffic_case(precision, name, small, device) for name in calibrate_cases.KINDS]
        cases += calibrate_cases.build_attention_cases(
            precision, request["length"], device, _ATTENTION[kind], dense=True
        )
        cases.append(calibrate_cases.build_loss_case(precision, _LOGITS[kind], device))
    cases.append(calibrate_cases.build_traffic_case("fp32", "copy", large, device))
    cases.append(calibrate_cases.build_optimizer_case(_UPDATED[kind], device))
    if world.size > 1:
        cases += [build_collective_case(world, "all_reduce", size) for size in _MESSAGES]
    unique = {(case.curve, case.sizes): case for case in cases}
    return {"measuring": list(unique.values())}


if __name__ == "__main__":
    main()
