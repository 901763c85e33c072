"""The source of a plan's times: a calibration, a quick measurement, or datasheets.

What the quick measurement lacks are nominal rates, scaled by those that it has. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import (
    Calibration,
    Curve,
    Exchanged,
    InStep,
    ProcessRates,
    TimedSample,
    interpolate,
    load_current_calibration,
)
from trainwright.machine.measured.contention import measure_other_cores
from trainwright.machine.measured.own_runs import Correction, OwnRuns, read_own_runs
from trainwright.machine.measured.quick import (
    KINDS,
    Block,
    Kernel,
    MeasuredBlock,
    Passes,
    Shapes,
    measure_if_needed,
    select_nearest_block,
)
from trainwright.models.attention.kernels import Dtype
from trainwright.planning.errors import Errors, estimate_interval
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.trace.request import Device, TracedModel, TraceRequest, choose_row_kind
from trainwright.planning.trace.traced import list_parameters, size_model
from trainwright.planning.trace.units import BatchShape, Operation, SizedModel
from trainwright.planning.workload import Choice, MixedPrecision, Workload

_LOAD_SECONDS, _SMALL_LOAD = 0.1, 0.3  # for which the load is measured; cores


@dataclass(frozen=True)
class Basis:
    """The source of a plan's times.

    ``measurement``: with the block alone that is nearest to the model's; beside a calibration, which has none of this
    size, only its block counts. ``message``: message about a measurement made now. ``trouble``: why there is no
    measurement. ``runs``: this machine's own runs, which correct predictions. ``load``: what other programs that use
    the cores now cost, which the times do not include.
    """

    calibration: Calibration | None = None
    measurement: Calibration | None = None
    message: str | None = None
    trouble: str | None = None
    runs: OwnRuns = OwnRuns()  # noqa: RUF009
    load: str | None = None

    @property
    def kind(self) -> str:
        """The source of uncorrected predictions."""
        if self.calibration is not None:
            return "calibration"
        return "datasheet" if self.measurement is None else "measurement"


def build_basis(machine: Machine, workload: Workload, doing: Callable[[str], None] = lambda text: None) -> Basis:
    """Return the source of times for plans of ``workload`` on ``machine``, measured now if it is present and
    unmeasured.

    Args:
        doing: called with a message before an operation that takes a few seconds.
    """
    basis = _choose_basis(machine, workload, doing)
    if machine.device != "cpu" or machine.described_by is not None or not machine.is_here:
        return basis
    load = _describe_load(machine.cpu_cores)
    return replace(basis, load=load, message="\n".join(filter(None, (basis.message, load))) or None)


def _describe_load(cores: int) -> str | None:
    """Return what the programs that use the cores of this machine now cost; None if it is little."""
    load = measure_other_cores(_LOAD_SECONDS)
    if load < _SMALL_LOAD:
        return None
    # A thread shares its core with another program, and all others wait for it.
    slower = 1 + max(min(load, 1.0), load / cores)
    return (
        f"the plan assumes that all {cores} cores are free; other programs use {load:.1f} of them now, with which a "
        f"step takes about {slower:.1f} times as long"
    )


def _choose_basis(machine: Machine, workload: Workload, doing: Callable[[str], None]) -> Basis:
    calibration, runs = load_current_calibration(machine), read_own_runs(machine)
    calibrated = calibration is not None and not calibration.is_disturbed
    if calibrated and machine.device != "cpu":
        return Basis(calibration, runs=runs)
    shapes = collect_shapes(workload)
    quick = measure_if_needed(machine, shapes, doing)
    measurement = quick.calibration
    if measurement is not None:
        measurement = select_nearest_block(measurement, shapes.limit_size(machine.device).block)
    if calibrated:
        measurement = None if measurement is None or measurement.is_disturbed else measurement
        return Basis(calibration, measurement, quick.message, runs=runs)
    return Basis(None, measurement, quick.message, quick.trouble, runs)


def collect_shapes(workload: Workload) -> Shapes:
    """Return the model's matrix sizes (those with the most computation first), its block, and its sequences' length."""
    facts, blocks = workload.facts, list_parameters(workload.model)[1:-1]
    elements: dict[tuple[int, int], int] = {}
    for parameter in (parameter for block in blocks for parameter in block):
        if len(parameter.shape) > 1 and "lora_" not in parameter.name:
            rows, columns = parameter.shape[-2:]
            elements[rows, columns] = elements.get((rows, columns), 0) + rows * columns
    widths = sorted(elements, key=lambda size: -elements[size])
    breadth = sum(parameter.numel for parameter in blocks[0]) / facts.hidden
    block = Block(facts.hidden, breadth, partial(list_block_passes, workload.model))
    length = max(1, round(workload.mean_length))
    return Shapes(tuple(widths) or ((facts.hidden, facts.hidden),), length, block)


def list_block_passes(model: TracedModel, sequences: int, length: int) -> Passes:
    """Return the kernels of the passes over a model's first block, on a pack of sequences of about one length."""
    passes = {}
    for precision in MIXED:
        batch = build_packed_batch((length,) * sequences)
        dtype: Dtype = "fp32" if precision == "fp32" else "bf16"
        trace = size_model(TraceRequest(model, Device("cpu", fused=True), dtype), batch)
        block = trace.list_units()[1]
        for direction, operations in (("forward", block.forward.operations), ("backward", block.backward.operations)):
            passes[f"{precision}/{direction}"] = [
                Kernel(KINDS.index(o.kind), int(bool(o.name)), *o[2:10], o.width) for o in operations if o.launches
            ]
    return passes


def build_packed_batch(lengths: Sequence[int]) -> BatchShape:
    """Return the shape of a pack of sequences of these lengths, in which all tokens but each first are targets."""
    tokens = sum(lengths)
    sequences = tuple(Counter(lengths).items())
    return BatchShape(1, tokens, sequences, tokens - len(lengths), packed=True, masked=False)


@dataclass(frozen=True)
class Corrections:
    """Corrections of one workload. ``basis``: the source of uncorrected predictions."""

    runs: OwnRuns
    model: str
    basis: str

    def of(self, choice: Choice) -> Correction:
        """Return the correction for a choice."""
        return self.runs.correction(self.model, build_way_key(choice), self.basis)

    def errors(self) -> Errors | None:
        """Return the errors of corrected plans of such runs on this machine; None if there were too few."""
        similar_runs = [run for run in self.runs.runs if (run.model, run.basis) == (self.model, self.basis)]
        factors = [self.runs.correction(self.model, run.way, self.basis).seconds for run in similar_runs]
        speed = estimate_interval(factor / run.seconds for factor, run in zip(factors, similar_runs, strict=True))
        memory = estimate_interval(run.memory for run in similar_runs if run.memory)
        return None if speed is None or memory is None else Errors(memory, speed, ("runs on this machine",))


def build_corrections(runs: OwnRuns, workload: Workload, basis: str) -> Corrections:
    """Return the corrections of a workload by this machine's own runs."""
    return Corrections(runs, build_model_key(workload), basis)


def build_model_key(workload: Workload) -> str:
    """Return a key for runs whose prediction errors are related: family, size, adapter, length of rows and TF32."""
    facts, model = workload.facts, workload.model
    adapter = model.adapter_section.get("type", "full")
    parts = (facts.family, f"2^{round(math.log2(max(1, facts.total)))}", adapter, model.quantization)
    rows = f"2^{round(math.log2(workload.row_tokens))}", "packed" if workload.packed else "padded"
    return " ".join((*parts, *rows, workload.optimizer, *(["tf32"] if workload.tf32 else [])))


def build_way_key(choice: Choice) -> str:
    """Return a key for how a workload is run."""
    mode = "compiled" if choice.compile else "eager"
    recompute = str(choice.activation_checkpointing)
    threads = "" if choice.threads is None else f"x{choice.threads}"
    processes = f"{choice.num_processes}{threads}"
    return f"{choice.strategy} {choice.mixed_precision} {processes} {mode} {recompute}"


MIXED: dict[str, MixedPrecision] = {"fp32": "no", "bf16": "bf16"}
# Factors outside this range come from a disturbed measurement.
_LEAST, _MOST = 0.7, 2.5


def scale_to_measured_blocks(
    setting: ProcessRates, measured: Calibration, setting_of: Callable[[int, int | None], ProcessRates]
) -> ProcessRates:
    """Return the setting with its factors of kernels in a step scaled so that they predict the measured block.

    The block is that of the nearest setting in which it was measured.

    Args:
        setting_of: the rates of a number of processes and threads, with typical factors.
    """
    by_distance = sorted(
        measured.settings, key=lambda other: compute_distance(other, setting.processes, setting.threads)
    )
    in_step = dict(setting.in_step)
    for precision in MIXED.keys() & in_step.keys():
        names = [f"block/{precision}/{direction}" for direction in ("forward", "backward")]
        nearest = next((setting for setting in by_distance if all(name in setting.curves for name in names)), None)
        if nearest is None or not MeasuredBlock.is_of(nearest.curves[names[0]].samples[-1].sizes):
            continue
        samples, typical = [nearest.curves[name].samples[-1] for name in names], in_step[precision]
        rates = setting_of(nearest.processes, nearest.threads)
        pairs = zip(samples, names, strict=True)
        expected_seconds = sum(estimate_block_seconds(sample.sizes, name, rates) for sample, name in pairs)
        seconds = sum(sample.seconds for sample in samples)
        factor = min(_MOST, max(_LEAST, seconds / expected_seconds))
        scaled_values = {name: getattr(typical, name) * factor for name in ("products", "attention", "traffic", "host")}
        in_step[precision] = replace(typical, **scaled_values)
    return replace(setting, in_step=in_step)


def build_cpu_pricing(
    model: TracedModel, batch: BatchShape, precision: str, setting: ProcessRates
) -> tuple[SizedModel, Pricing]:
    """Return the passes of a model on a CPU, and what predicts their time."""
    dtype: Dtype = "fp32" if precision == "fp32" else "bf16"
    request = TraceRequest(model, Device("cpu", fused=True), dtype, choose_row_kind(batch))
    trace = size_model(request, batch, setting.threads or 1)
    vocabulary = trace.facts.vocabulary
    return trace, Pricing(setting, batch, MIXED[precision], on_gpu=False, vocabulary=vocabulary)


def estimate_block_seconds(sizes: Sequence[float], curve: str, setting: ProcessRates) -> float:
    """Return the predicted seconds of a pass over a block, from the sizes of a sample of ``curve``."""
    block = MeasuredBlock.of(sizes)
    _, precision, direction = curve.split("/")
    batch = build_packed_batch((block.length,) * block.sequences)
    pricing = Pricing(setting, batch, MIXED[precision], on_gpu=False, vocabulary=0)
    operations: list[Operation[int]] = [
        Operation._make((KINDS[k.kind], "weight" if k.weights else "", *k[2:7], *map(int, k[7:10]), k.width, 2))
        for k in block.kernels
    ]
    return pricing.work(operations, backward=direction == "backward").seconds


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


def build_measured_setting(
    measured: Calibration, nominal: Nominal, processes: int, threads: int | None
) -> ProcessRates:
    """Return the rates of each of ``processes`` with ``threads`` threads, all running at once.

    Each curve is that of the nearest setting in which it was measured; otherwise it is nominal, scaled by the deviation
    of nominal rates in that setting.
    """
    by_distance = sorted(measured.settings, key=lambda setting: compute_distance(setting, processes, threads))
    rates = nominal(processes, threads)
    curves = {name: _scale_nearest_curve(name, rates, by_distance, nominal) for name in rates.curves}
    launch = by_distance[0].launch if by_distance[0].launch > 0 else rates.launch
    exchange = rates.exchange if by_distance[0].exchange == Exchanged() else by_distance[0].exchange
    if not rates.in_step:
        return replace(rates, curves=curves, launch=launch, exchange=exchange)
    in_step = {
        name: replace(_IN_STEP, products=_find_product_factor(measured, name), host=typical.host * launch / _LAUNCH)
        for name, typical in rates.in_step.items()
    }
    return replace(rates, curves=curves, launch=launch, in_step=in_step, exchange=exchange)


def _find_product_factor(measured: Calibration, precision: str) -> float:
    """Return the factor of the time of products in a step."""
    fastest, plain = find_peak_rate(measured, precision), find_peak_rate(measured, "fp32")
    if fastest is None or plain is None:
        return _IN_STEP.products
    share = min(1.0, max(0.0, math.log(fastest / plain) / math.log(_FAST)))
    return _IN_STEP.products + share * (_FAST_PRODUCTS - _IN_STEP.products)


def compute_distance(setting: ProcessRates, processes: int, threads: int | None) -> tuple[float, float]:
    """Return the distance of a setting from these numbers of processes and threads, and that of the threads alone."""
    of_threads = abs(math.log((setting.threads or 1) / (threads or 1)))
    return abs(math.log(setting.processes / processes)) + of_threads, of_threads


def list_thread_counts(measured: Calibration | None, processes: int, cores: int) -> tuple[int, ...]:
    """Return the threads per process to try: all available, and fewer where they were measured."""
    share = max(1, cores // processes)
    settings = () if measured is None else measured.settings
    fewer = [s.threads for s in settings if s.processes == processes and s.threads and s.threads < share]
    return tuple(dict.fromkeys([share, *sorted(fewer, reverse=True)]))


def find_peak_rate(measured: Calibration, precision: str) -> float | None:
    """Return the highest measured operations per second of all processes of a setting; None if none was measured."""
    rates = ((setting.find_best_rate(precision), setting.processes) for setting in measured.settings)
    return max((rate * processes for rate, processes in rates if rate is not None), default=None)


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
        return math.exp(interpolate(self.points, math.log(size)))


def _scale_nearest_curve(
    name: str, rates: ProcessRates, by_distance: Sequence[ProcessRates], nominal: Nominal
) -> Curve:
    curve = rates.curves[name]
    for near in by_distance:
        alike = name if name in near.curves else _find_stand_in(name, near.curves)
        if alike is None:
            continue
        real, typical = near.curves[alike], nominal(near.processes, near.threads).curves[alike]
        if alike == name and len(real.samples) >= len(real.coefficients) > 1:
            if (near.processes, near.threads) == (rates.processes, rates.threads):
                return real
            # Of another number of cores.
            factor = _compute_typical_seconds(curve, real) / _compute_typical_seconds(typical, real)
            return replace(real, coefficients=tuple(c * factor for c in real.coefficients))
        scaled_curve = _scale_curve(curve, _Factors.of(real, typical))
        exact = alike == name and curve.form == "table" and rates.processes == near.processes
        return _insert_samples(scaled_curve, real.samples) if exact and rates.threads == near.threads else scaled_curve
    return curve


def _insert_samples(curve: Curve, samples: Sequence[TimedSample]) -> Curve:
    """Return a table with the measured points included."""
    by_sizes = {sample.sizes: sample for sample in (*curve.samples, *samples)}
    return replace(curve, samples=tuple(by_sizes[sizes] for sizes in sorted(by_sizes)))


def _find_stand_in(name: str, curves: Mapping[str, Curve]) -> str | None:
    """Return the measured curve whose deviation from nominal rates applies to ``name``, or None."""
    prefix = next((prefix for prefix in _LIKE if name.startswith(prefix)), None)
    if prefix is None:
        return None
    curve_name = _LIKE[prefix] if _LIKE[prefix] in curves else _LIKE[prefix] + name.removeprefix(prefix)
    return curve_name if curve_name in curves else None


def _compute_typical_seconds(curve: Curve, sizes_of: Curve) -> float:
    return statistics.fmean(curve.seconds(*sample.sizes) for sample in sizes_of.samples)


def _scale_curve(curve: Curve, factors: _Factors) -> Curve:
    if curve.form != "table":
        return replace(curve, coefficients=tuple(c * factors.typical for c in curve.coefficients))
    samples = tuple(TimedSample(s.sizes, s.seconds * factors.at(s.sizes[0])) for s in curve.samples)
    return replace(curve, samples=samples)
