"""The quick measurement of this machine: in about two seconds, the rates that decide a plan without a calibration.

It has the form of a calibration with fewer curves and the kernels of a model's block, and is kept in the cache by
machine, versions and everything else that affects the choice of kernels. ``trainwright.doctor.quick`` measures in a
separate process, as this module imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.machine.cache import find_cache_root, try_write
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import (
    Calibration,
    ProcessRates,
    check_calibration,
    from_json,
    hash_value,
    list_hardware,
    load_calibration,
    read_versions,
    to_json,
)
from trainwright.machine.vendors import look_up_processor

_METHOD = 4  # increased when measurements before would not be comparable
SECONDS = 3.0  # in total, including imports
_MOST_SECONDS = 30.0  # timeout of the measuring process
# Ratio of two matrices' sides from which one does not predict the other.
_FAR = 2.0
_MOST_WIDTH = {"cpu": 2048, "gpu": 8192}
_MOST_WIDTHS = 3
_LENGTHS = (16, 512)
# A measurement that other programs disturbed is repeated after this time, not by every command while they go on.
_REPEAT_MINUTES = 5

# The results of this process by file: a command measures once, also where the file cannot be written.
_measured_here: dict[Path, QuickMeasurement] = {}


@dataclass(frozen=True)
class Shapes:
    """Shapes of a model: widths (out, in) of its matrices, and the length of its sequences. ``block``: None on GPUs."""

    widths: tuple[tuple[int, int], ...]
    length: int
    block: Block | None = None

    def limit_size(self, device: str) -> Shapes:
        """Return the shapes to measure: the first few, halved until they are fast enough."""
        widths = dict.fromkeys((_halve_width(n, device), _halve_width(k, device)) for n, k in self.widths)
        length = 2 ** round(math.log2(min(_LENGTHS[1], max(_LENGTHS[0], self.length))))
        block = None if self.block is None or device != "cpu" else self.block.limit_size()
        return Shapes(tuple(widths)[:_MOST_WIDTHS], length, block)


# Shapes of a small model, if none is given.
USUAL = Shapes(((1536, 576), (576, 1536), (576, 576)), 128)


@dataclass(frozen=True)
class QuickMeasurement:
    """The result of ``measure_if_needed``.

    ``calibration``: None if there is no measurement. ``message``: message about a measurement made now. ``trouble``:
    why the plan has to use datasheets.
    """

    calibration: Calibration | None = None
    message: str | None = None
    trouble: str | None = None


def measure_if_needed(
    machine: Machine, shapes: Shapes, say: Callable[[str], None] = lambda text: None
) -> QuickMeasurement:
    """Return the measurement of ``machine``, made now if needed. ``say``: called with a message before measuring.

    A machine that is not present is not measured: the measurement in its file is used.
    """
    if machine.described_by is not None:
        return QuickMeasurement(_read_carried_measurement(Path(machine.described_by)))
    if not machine.is_here:
        return QuickMeasurement()
    bounded_shapes, file = shapes.limit_size(machine.device), locate_measurement(machine)
    calibration = load_calibration(file)
    covers = calibration is not None and covers_shapes(calibration, bounded_shapes)
    if calibration is not None and covers and not (calibration.is_disturbed and _is_old(file)):
        return QuickMeasurement(calibration)
    before = _measured_here.get(file)
    if before is not None and (before.calibration is None or covers_shapes(before.calibration, bounded_shapes)):
        return replace(before, message=None)
    say("measuring this machine")
    _measured_here[file] = _measure_now(machine, bounded_shapes, file, calibration)
    return _measured_here[file]


def _measure_now(machine: Machine, shapes: Shapes, file: Path, previous: Calibration | None) -> QuickMeasurement:
    start = time.monotonic()
    try:
        calibration = _measure(machine, shapes, previous)
    except _Failed as failed:
        trouble = f"this machine could not be measured ({failed}), so times are from datasheets"
        return QuickMeasurement(trouble=trouble)
    if why := next(check_calibration(calibration), None):
        return QuickMeasurement(None, None, f"the measurements are contradictory ({why}), so times are from datasheets")
    if previous is not None and covers_shapes(previous, shapes) and previous.disturbance < calibration.disturbance:
        calibration = previous  # both were disturbed, this one less
    try_write(file, json.dumps(to_json(calibration)) + "\n")
    note = f"saved in {file}" if load_calibration(file) == calibration else f"cannot be saved in {file.parent}"
    device = "this machine's first GPU" if machine.gpus else "this processor"
    message = f"measured {device} in {time.monotonic() - start:.1f} s: {describe_rates(calibration)}; {note}"
    if calibration.is_disturbed:
        message += (
            f". Other programs used the cores ({calibration.disturbance:.0%} of the times were disturbed): commands "
            f"measure again after {_REPEAT_MINUTES} minutes"
        )
    return QuickMeasurement(calibration, message)


def locate_measurement(machine: Machine, root: Path | None = None) -> Path:
    """Return the path of the measurement file."""
    key = [_METHOD, *list_hardware(machine), sorted(read_versions(machine).items())]
    return (root or find_cache_root()) / "measured" / f"{hash_value(key)}.json"


def _is_old(file: Path) -> bool:
    """Return whether the last measurement, also one that was worse than the one in the file, was some minutes ago."""
    try:
        return abs(time.time() - file.stat().st_mtime) >= 60 * _REPEAT_MINUTES
    except OSError:
        return True


def covers_shapes(calibration: Calibration, shapes: Shapes) -> bool:
    """Return whether the measurement covers the ``shapes`` shapes."""
    shapes_measured = [
        sample.sizes[1:]
        for name in ("fp32", "bf16")
        for sample in _select_samples(calibration, f"product/{name}/forward")
    ]
    near = all(any(max(n / m, m / n, k / j, j / k) <= _FAR for m, j in shapes_measured) for n, k in shapes.widths)
    return near and (
        shapes.block is None or any(shapes.block.ratio(sizes) <= _FAR for sizes in _list_blocks(calibration))
    )


def select_nearest_block(calibration: Calibration, block: Block | None) -> Calibration:
    """Return the measurement with the nearest block alone of those that were measured in a setting."""
    if block is None or not any(_list_blocks(calibration)):
        return calibration
    return replace(calibration, settings=tuple(_keep_nearest_block(setting, block) for setting in calibration.settings))


def _keep_nearest_block(setting: ProcessRates, block: Block) -> ProcessRates:
    curves = dict(setting.curves)
    for name, curve in setting.curves.items():
        if name.startswith("block/"):
            curves[name] = replace(curve, samples=(min(curve.samples, key=lambda sample: block.ratio(sample.sizes)),))
    return replace(setting, curves=curves)


def _list_blocks(calibration: Calibration) -> list[tuple[float, ...]]:
    return [
        sample.sizes for name in ("fp32", "bf16") for sample in _select_samples(calibration, f"block/{name}/backward")
    ]


def describe_rates(calibration: Calibration) -> str:
    """Return the rates of products as text: per core, or of the GPU."""
    first = calibration.settings[0]
    unit, scale = ("GFLOP/s per core", 1e9) if first.threads else ("TFLOP/s", 1e12)
    rates = {precision: first.find_best_rate(precision) for precision in ("fp32", "tf32", "bf16", "fp16")}
    text = ", ".join(f"{name} {rate / scale:.0f}" for name, rate in rates.items() if rate is not None)
    copy_rate = max((s.sizes[0] / s.seconds for s in _select_samples(calibration, "traffic/fp32/copy")), default=None)
    return f"{text} {unit}" + ("" if copy_rate is None else f", copies {copy_rate / 1e9:.3g} GB/s")


class _Failed(Exception):
    pass


def _measure(machine: Machine, shapes: Shapes, previous: Calibration | None) -> Calibration:
    start = time.monotonic()
    request = {
        "device": machine.device,
        "cores": machine.cpu_cores,
        "machine": machine.describe(),
        "versions": read_versions(machine),
        "widths": shapes.widths,
        "length": shapes.length,
        "block": []
        if shapes.block is None
        else [(name, block.sizes) for name, block in iterate_blocks_to_measure(shapes.block, shapes.length)],
        "begun": start,
        "seconds": SECONDS,
        "before": [] if previous is None else list(_iterate_earlier_measurements(previous)),
    }
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path}
    if not machine.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-P", "-m", "trainwright.doctor.quick"]
    try:
        result = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, env=variables, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"it took more than {_MOST_SECONDS:.0f} s") from None
    except OSError as error:
        raise _Failed(str(error)) from None
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise _Failed(lines[-1] if lines else f"its process ended with code {result.returncode}")
    try:
        return from_json(json.loads(result.stdout))
    except (ValueError, KeyError, TypeError):
        raise _Failed("its process gave no figures") from None


def _iterate_earlier_measurements(calibration: Calibration) -> Iterator[dict[str, Any]]:
    """Yield earlier measurements of products and blocks of other shapes."""
    for setting in calibration.settings:
        rows = [
            {"curve": name, "sizes": sample.sizes, "seconds": sample.seconds}
            for name, curve in setting.curves.items()
            if name.startswith(("product/", "block/"))
            for sample in curve.samples
        ]
        yield {"processes": setting.processes, "threads": setting.threads, "samples": rows}


def _read_carried_measurement(file: Path) -> Calibration | None:
    """Return the measurement in a file that describes a machine; the file has been validated."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")).get("measurement")
    except (OSError, ValueError, AttributeError):
        return None
    return None if content is None else from_json(content)


def _select_samples(calibration: Calibration, name: str) -> Sequence[Any]:
    return [
        sample for setting in calibration.settings if name in setting.curves for sample in setting.curves[name].samples
    ]


def _halve_width(width: int, device: str) -> int:
    while width > _MOST_WIDTH[look_up_processor(device)]:
        width = -(-width // 2)
    return width


KINDS = ("product", "attention", "elementwise", "reduction", "copy", "expansion")
# A measured block: parameters of its matrices, and tokens. Forward and backward take 6 operations of each pair.
_MOST_PARAMETERS, _TOKENS = 4_000_000, 256


class Kernel(NamedTuple):
    """Equal kernels, as ``planning.trace.units.Operation``; all are numbers.

    ``kind``: its index in ``KINDS``. ``weights``: 1 if it reads a parameter. ``flops``, ``read``, ``written``: of all
    launches.
    """

    kind: int
    weights: int
    launches: int
    m: int
    n: int
    k: int
    times: int
    flops: float
    read: float
    written: float
    width: float

    def narrow_widths(self, scale: float, backward: bool) -> Kernel:
        """Return the kernel of a block whose widths are multiplied by ``scale``; tokens stay."""
        kernel = self._replace(read=self.read * scale, written=self.written * scale, flops=self.flops * scale)
        if KINDS[self.kind] != "product":
            return kernel
        m = self.m if self.weights or not backward else round(self.m * scale)
        n, k = max(1, round(self.n * scale)), self.k if m != self.m else max(1, round(self.k * scale))
        return kernel._replace(m=max(1, m), n=n, k=k, flops=2.0 * max(1, m) * n * k * self.times * self.launches)


# By "PRECISION/DIRECTION".
Passes = Mapping[str, Sequence[Kernel]]


@dataclass(frozen=True)
class Block:
    """A block of a model.

    ``hidden``: the model's width. ``breadth``: the parameters of the block for each element of it. ``passes``: returns
    the kernels of its passes over a number of sequences of a length.
    """

    hidden: float
    breadth: float
    passes: Callable[[int, int], Passes] = field(compare=False, default=lambda sequences, length: {})

    @property
    def scale(self) -> float:
        """The power of two that its widths are multiplied by to be measured fast enough."""
        excess = self.hidden * self.breadth / _MOST_PARAMETERS
        return 0.5 ** max(0, math.ceil(math.log(excess, 4))) if excess > 0 else 1.0

    def limit_size(self) -> Block:
        """Return the block that is measured."""
        scale = self.scale
        if scale == 1.0:
            return self

        def passes(sequences: int, length: int) -> Passes:
            full = self.passes(sequences, length)
            return {
                name: [kernel.narrow_widths(scale, name.endswith("backward")) for kernel in kernels]
                for name, kernels in full.items()
            }

        return Block(self.hidden * scale, self.breadth * scale, passes)

    def ratio(self, sizes: Sequence[float]) -> float:
        """Return the largest ratio of its widths to those of a measured block."""
        return max(max(a / b, b / a) for a, b in zip(sizes[:2], (self.hidden, self.breadth), strict=True))


class MeasuredBlock(NamedTuple):
    """A pass over a block that was measured, from the sizes of a sample of the curves ``block/``."""

    hidden: float
    breadth: float
    sequences: int
    length: int
    kernels: tuple[Kernel, ...]

    @staticmethod
    def is_of(sizes: Sequence[float]) -> bool:
        """Return whether these are the sizes of a sample; those of earlier versions were a Llama's."""
        return len(sizes) >= 4 and (len(sizes) - 4) % len(Kernel._fields) == 0

    @classmethod
    def of(cls, sizes: Sequence[float]) -> MeasuredBlock:
        """Return the pass of the sizes of a sample."""
        hidden, breadth, sequences, length, *numbers = sizes
        width = len(Kernel._fields)
        rows = (numbers[begin : begin + width] for begin in range(0, len(numbers), width))
        kernels = tuple(Kernel._make((*map(int, row[:7]), *row[7:10], int(row[10]))) for row in rows)
        return cls(hidden, breadth, int(sequences), int(length), kernels)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The sizes of its sample."""
        return (*map(float, self[:4]), *(float(number) for kernel in self.kernels for number in kernel))


def choose_sequences(length: int) -> tuple[int, int]:
    """Return the number and the length of the sequences that a block is measured on."""
    return max(1, _TOKENS // length), length


def iterate_blocks_to_measure(block: Block, length: int) -> Iterable[tuple[str, MeasuredBlock]]:
    """Yield the passes of a block by the name of their curve."""
    sequences, length = choose_sequences(length)
    for name, kernels in block.passes(sequences, length).items():
        yield f"block/{name}", MeasuredBlock(block.hidden, block.breadth, sequences, length, tuple(kernels))
