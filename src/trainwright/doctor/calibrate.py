"""Measure this machine: the speed of training's operations, in one process and in several; and show that as a table."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.errors import MachineError, Stopped, TrainwrightError
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, Curve, ProcessRates, read_versions, summarize_errors
from trainwright.run.process import preload_libraries
from trainwright.run.shutdown.stop import Stopping
from trainwright.utils.text import format_bytes

if TYPE_CHECKING:
    from trainwright.doctor.calibrate_worker import Cases, Effort
    from trainwright.parallel.world import World


SECONDS = 50.0  # in total, including imports and starting processes
LIMIT = 57.0  # seconds after which a machine is too busy to be measured; with the final work it stays below a minute


class ProcessSetting(NamedTuple):
    """A number of processes at once, and their threads; None on GPUs."""

    processes: int
    threads: int | None


def calibrate(
    machine: Machine, seconds: float = SECONDS, say: Callable[[str], None] = lambda text: None, limit: float = LIMIT
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
    counts = choose_process_counts(machine)
    settings = [ProcessSetting(count, None if machine.gpus else _choose_threads(machine, count)) for count in counts]
    begin = time.monotonic()
    with Stopping("stopping") as stopping:
        preload_libraries()
        from trainwright.doctor.calibrate_worker import Effort

        parts["imports"] = time.monotonic() - begin
        measuring = Measuring(machine.device, _build_cases, Effort(), stopping, say)
        measurements = measuring.run(settings, begin + seconds, begin + limit)
    for name in ("starting", *measurements[0]["parts"]):
        parts[name] = sum(measurement["parts"].get(name, 0.0) for measurement in measurements)
    return Calibration(
        machine=machine.describe(),
        measured=format_current_time(),
        versions=read_versions(machine),
        settings=tuple(_fit_rates(machine, *pair) for pair in zip(settings, measurements, strict=True)),
        parts=parts,
        disturbance=statistics.mean(measurement["disturbed"] for measurement in measurements),
    )


class Measuring:
    """Measure cases in settings one after the other, each in processes of its own.

    Args:
        cases_of: returns the cases of a setting by part; called in its processes.
    """

    def __init__(
        self,
        device: str,
        cases_of: Callable[[ProcessSetting, World], Cases],
        effort: Effort,
        stopping: Stopping,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._device, self._cases_of, self._effort, self._stopping, self._say = device, cases_of, effort, stopping, say

    def run(self, settings: Sequence[ProcessSetting], end: float, limit: float) -> list[dict[str, Any]]:
        """Return what the processes of each setting measured until ``end``; they fail after ``limit``."""
        measurements = []
        effort = self._effort
        for number, setting in enumerate(settings):
            self._say(f"measuring {_describe_setting(setting)}")
            start = time.monotonic()
            end_of_setting = start + max(0.0, end - start) / (len(settings) - number)
            if effort.fewest is not None:  # the second setting has all cores; the block is measured there
                effort = replace(effort, waits=number < 2)
            measurement = self._measure_in_processes(setting, (end_of_setting, limit), effort)
            measurement["parts"]["starting"] = time.monotonic() - start - sum(measurement["parts"].values())
            measurements.append(measurement)
        return measurements

    def _measure_in_processes(
        self, setting: ProcessSetting, ends: tuple[float, float], effort: Effort
    ) -> dict[str, Any]:
        from trainwright.doctor.calibrate_worker import measure
        from trainwright.run.supervisor import launch

        count = setting.processes
        with (
            tempfile.TemporaryDirectory(prefix="trainwright-calibrate-") as work,
            _set_environment(OMP_NUM_THREADS=setting.threads),
        ):
            output = Path(work) / "samples.json"
            cases_of = functools.partial(self._cases_of, setting)
            entry = functools.partial(measure, cases_of, self._device, ends, effort, output)
            try:
                launch(entry, processes=count, logs=Path(work) / "logs", stopping=self._stopping)
            except TrainwrightError as error:
                raise MachineError(f"measuring failed in one of {count} processes: {error}") from error
            if self._stopping.requested:
                raise Stopped("stopped; the measurement was not finished, and nothing was saved")
            measurements: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return measurements


def _build_cases(setting: ProcessSetting, world: World) -> Cases:
    from trainwright.doctor.calibrate_cases import build_operation_cases
    from trainwright.doctor.calibrate_passes import iterate_pass_cases
    from trainwright.doctor.calibrate_worker import iterate_collective_cases

    return {
        **build_operation_cases(world.device),
        "passes": iterate_pass_cases(world),
        "collectives": iterate_collective_cases(world),
    }


def choose_process_counts(machine: Machine) -> tuple[int, ...]:
    """Return the numbers of processes to measure: one, the maximum, and on a CPU up to two in between."""
    if machine.gpus:
        return tuple(sorted({1, len(machine.gpus)}))
    doublings = [2**power for power in range(machine.cpu_cores.bit_length())]
    between = doublings[1:-1] if doublings[-1] == machine.cpu_cores else doublings[1:]
    third = len(between) // 3
    some = between if len(between) < 3 else (between[third], between[-1 - third])
    return tuple(sorted({1, *some, machine.cpu_cores}))


def format_current_time() -> str:
    """Return the time in ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _describe_setting(setting: ProcessSetting) -> str:
    count, threads = setting
    processes = f"{count} process{'es' * (count > 1)}"
    if threads is None:
        return f"{processes}, one on each GPU" if count > 1 else "one process on one GPU"
    return f"{processes} of {threads} thread{'s' * (threads > 1)}"


def _choose_threads(machine: Machine, processes: int) -> int:
    """Return the threads per process as in training: a share of the cores, unless OMP_NUM_THREADS is set."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else max(1, machine.cpu_cores // processes)


def _fit_rates(machine: Machine, setting: ProcessSetting, measurements: dict[str, Any]) -> ProcessRates:
    from trainwright.doctor.calibrate_passes import fit_exchange, fit_step_factors
    from trainwright.doctor.calibrate_worker import build_curve

    samples = measurements["samples"]
    groups = {
        group: {name.partition("/")[2]: samples.pop(name) for name in list(samples) if name.startswith(f"{group}/")}
        for group in ("passes", "sharded")
    }
    curves = {name: build_curve(name, rows) for name, rows in samples.items()}
    alone = ProcessRates(*setting, curves, launch=measurements["launch"], overlap=measurements["overlap"])
    factors = {precision: fit_step_factors(alone, precision, rows) for precision, rows in groups["passes"].items()}
    steps = replace(alone, in_step=factors)
    sharded_rows = groups["sharded"]
    return replace(steps, exchange=fit_exchange(steps, machine, sharded_rows)) if sharded_rows else steps


@contextmanager
def _set_environment(**variables: int | None) -> Iterator[None]:
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


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_LAYOUTS = ("forward", "input", "weight")
_SHOWN_PRODUCT = {"cpu": (1024, 1024, 1024), "cuda": (8192, 4096, 4096)}
_SHOWN_BYTES, _SHOWN_LENGTHS = (2**20, 2**24, 2**28), (128, 512, 2048)
_OTHERS = (
    ("optimizer", "AdamW, million elements/s", 1e6),
    ("host_optimizer", "AdamW in the host's memory, million elements/s", 1e6),
    ("loss/fp32", "loss of fp32 logits, million/s", 1e6),
    ("loss/bf16", "loss of bf16 logits, million/s", 1e6),
    ("host/to", "host to GPU, GB/s", 1e9),
    ("host/from", "GPU to host, GB/s", 1e9),
)


def format_calibration(calibration: Calibration) -> Iterator[str]:
    """Yield the table: rates of each setting, each group with its error on held-out sizes."""
    total = sum(calibration.parts.values())
    yield f"{calibration.machine}, measured {calibration.measured} in {total:.0f} s: " + ", ".join(
        f"{part} {seconds:.0f}" for part, seconds in calibration.parts.items()
    )
    for setting in calibration.settings:
        yield ""
        threads = "" if setting.threads is None else f" of {setting.threads} thread{'s' * (setting.threads > 1)}"
        yield f"{setting.processes} process{'es' * (setting.processes > 1)}{threads}" + (
            ", all at once, each:" if setting.processes > 1 else ":"
        )
        yield from _format_operations(setting)
        yield from _format_collectives(setting)
        yield from _format_step_factors(setting)
    yield ""
    yield "error: median (worst) error of the curve for held-out sizes"
    yield f"all together: {summarize_errors(calibration.errors(''))}"
    yield f"other programs used the cores during {calibration.disturbance:.0%} of the measurements"


def _format_operations(setting: ProcessRates) -> Iterator[str]:
    shape = _SHOWN_PRODUCT["cpu" if setting.threads else "cuda"]
    title = f"matrix products, GFLOP/s at {' x '.join(map(str, shape))}"
    yield _format_row(title, ("x @ W^T", "dy @ W", "dy^T @ x"), "error", indent=2)
    operations = 2 * shape[0] * shape[1] * shape[2]
    for precision in _list_precisions(setting, "product"):
        curves = [setting.curves[f"product/{precision}/{layout}"] for layout in _LAYOUTS]
        rates = (f"{operations / curve.seconds(*shape) / 1e9:,.0f}" for curve in curves)
        yield _format_row(precision, rates, _format_errors(*curves))
    yield _format_row("read and written, GB/s", map(format_bytes, _SHOWN_BYTES), "error", indent=2)
    for precision in _list_precisions(setting, "traffic"):
        for kind in ("copy", "elementwise", "reduction"):
            curve = setting.curves[f"traffic/{precision}/{kind}"]
            rates = (f"{count / curve.seconds(count) / 1e9:.1f}" for count in _SHOWN_BYTES)
            yield _format_row(f"{precision} {kind}", rates, _format_errors(curve))
    yield _format_row("attention, ns per token and channel", (f"{n:,}" for n in _SHOWN_LENGTHS), "error", indent=2)
    for precision in _list_precisions(setting, "attention"):
        for direction in ("forward", "backward"):
            curve = setting.curves[f"attention/{precision}/{direction}"]
            times = (f"{curve.seconds(length) * 1e9:.3f}" for length in _SHOWN_LENGTHS)
            yield _format_row(f"{precision} {direction}", times, _format_errors(curve))
    for name, text, unit in _OTHERS:
        if (curve_or_none := setting.curves.get(name)) is not None:
            amount = max(sample.sizes[0] for sample in curve_or_none.samples)
            rate = f"{amount / curve_or_none.seconds(amount) / unit:,.1f}"
            yield _format_row(text, (rate, "", ""), _format_errors(curve_or_none), indent=2)
    batch = setting.curves["data"]
    microseconds = f"{batch.seconds(8, 1024) * 1e6:,.0f}"
    yield _format_row(
        "a batch of 8 sequences and 1,024 tokens, us", (microseconds, "", ""), _format_errors(batch), indent=2
    )
    yield f"  {'a small kernel, us':<46}{setting.launch * 1e6:>10.1f}"


def _format_collectives(setting: ProcessRates) -> Iterator[str]:
    if setting.processes == 1:
        return
    yield _format_row("collectives of all processes", ("alpha us", "GB/s", ""), "error", indent=2)
    for kind in _COLLECTIVES:
        curve = setting.curves[f"collective/{kind}"]
        alpha, beta = curve.coefficients
        cells = (f"{alpha * 1e6:.0f}", f"{1 / beta / 1e9:.2f}" if beta else "-", "")
        yield _format_row(kind, cells, _format_errors(curve))
    yield f"  {'share that overlaps with computation':<46}{setting.overlap:>10.0%}"


def _format_step_factors(setting: ProcessRates) -> Iterator[str]:
    if not setting.in_step:
        return
    yield _format_row("in a step, factor on times alone", ("products", "attention", "memory"), "error", indent=2)
    for precision, in_step in setting.in_step.items():
        factors = (f"{factor:.2f}" for factor in (in_step.products, in_step.attention, in_step.traffic))
        host = f"{precision}, and {in_step.host * 1e6:.0f} us more for each kernel"
        yield _format_row(host, factors, summarize_errors(in_step.errors))
    if setting.processes > 1:
        exchange = setting.exchange
        text = f"collectives, and {exchange.waited * 1e3:.1f} ms more for each"
        yield _format_row(text, (f"{exchange.factor:.2f}", "", ""), summarize_errors(exchange.errors))


def _format_row(text: str, values: Iterable[str], last: str, indent: int = 4) -> str:
    return f"{'':<{indent}}{text:<{48 - indent}}{''.join(f'{value:>10}' for value in values)}  {last}"


def _list_precisions(setting: ProcessRates, group: str) -> Sequence[str]:
    return list(dict.fromkeys(name.split("/")[1] for name in setting.curves if name.startswith(f"{group}/")))


def _format_errors(*curves: Curve) -> str:
    return summarize_errors(error for curve in curves for error in curve.errors)
