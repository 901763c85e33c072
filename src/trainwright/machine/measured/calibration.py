"""Measured rates of a machine: seconds as functions of sizes, with their errors on held-out sizes.

``trainwright machine calibrate`` writes a calibration, plans read it. It is kept in the cache by machine, and is
outdated when the version of torch or the driver changes. One with impossible values is not kept: its measurement
failed, or a file was written by hand. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from trainwright.machine.cache import find_cache_root
from trainwright.machine.machine import Machine
from trainwright.utils.paths import write_file

# Version of the file format.
_FORM = 2
# Share of the times that other programs may spoil during a measurement, and the median held-out error from which a
# calibration is rejected. With another program that always uses one core both stayed below.
_QUIET, _FAR_OFF = 0.25, 0.20

# The terms that seconds are a sum of, each times a coefficient. "product": of [m, k] @ [k, n]; in addition to its
# operations, every matrix costs by its size, for reading, writing or repacking, and the last tiles by their depth k, as
# there are not enough of them for all cores. "amount": of bytes or elements. "batch": of sequences and tokens.
FORMS: dict[str, Callable[..., tuple[float, ...]]] = {
    "product": lambda m, n, k: (1.0, k, m * n * k, m * k, n * k, m * n),
    "amount": lambda amount: (1.0, amount),
    "batch": lambda sequences, tokens: (1.0, sequences, tokens),
}


@dataclass(frozen=True)
class TimedSample:
    """One measurement. ``held_out``: not used for the fit, so that its error estimates that of other sizes."""

    sizes: tuple[float, ...]
    seconds: float
    held_out: bool = False


@dataclass(frozen=True)
class Curve:
    """Seconds by sizes.

    ``form``: one of ``FORMS``, whose terms times ``coefficients`` are added; or "table", where the seconds of one size
    are interpolated between samples, both in logarithms, and extrapolated in proportion beyond the last.
    """

    form: str
    samples: tuple[TimedSample, ...]
    coefficients: tuple[float, ...] = ()
    _points: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usable = (s for s in self.samples if not s.held_out and s.sizes[0] > 0 and s.seconds > 0)
        points = sorted((s.sizes[0], s.seconds) for s in usable) if self.form == "table" else []
        object.__setattr__(self, "_points", tuple((math.log(size), math.log(seconds)) for size, seconds in points))

    def seconds(self, *sizes: float) -> float:
        """Return the predicted seconds for these sizes, in the number and order of the samples' sizes."""
        if self.form == "table":
            return self._interpolate_seconds(sizes[0])
        return sum(c * t for c, t in zip(self.coefficients, FORMS[self.form](*sizes), strict=True))

    def _interpolate_seconds(self, size: float) -> float:
        points = self._points
        if size <= 0:
            return 0.0
        x, (largest, seconds) = math.log(size), points[-1]
        if x > largest:
            return math.exp(seconds + x - largest)
        return math.exp(interpolate(points, x))  # nothing takes less than launching a kernel, the first point

    @property
    def errors(self) -> list[float]:
        """The relative prediction error of each held-out sample."""
        return [abs(self.seconds(*s.sizes) / s.seconds - 1) for s in self.samples if s.held_out]


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at ``x`` between sorted ``points``; that of the first or the last point outside of them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


@dataclass(frozen=True)
class InStep:
    """Kernels of a training step relative to the same kernels in a loop on cached memory.

    ``products``, ``attention`` and ``traffic``: factors on the curves' seconds. ``host``: seconds per kernel in which
    Python, autograd and thread starts run and nothing is computed. ``errors``: relative errors of passes of models that
    were not used for the fit.
    """

    products: float = 1.0
    attention: float = 1.0
    traffic: float = 1.0
    host: float = 0.0
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Exchanged:
    """Collectives of a training step relative to the same collective alone.

    Processes reach a collective at different times, and computation competes with communication for the cores.
    ``waited``: additional seconds; ``factor``: on the curve's seconds. ``errors``: as those of ``InStep``.
    """

    waited: float = 0.0
    factor: float = 1.0
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ProcessRates:
    """Measured times of one of ``processes`` that all run the same at once, each with ``threads`` on a CPU.

    ``curves`` by name:

    - ``product/PRECISION/LAYOUT``: a matrix product of sizes (m, n, k); the layouts are the three of a linear module,
      "forward" (x @ W^T), "input" (dy @ W) and "weight" (dy^T @ x)
    - ``traffic/PRECISION/KIND``: a kernel, by the bytes it reads and writes; "copy", "elementwise", "reduction"
    - ``attention/PRECISION/forward`` and ``backward``: causal attention of one token in one channel, by the length
      of its sequence
    - ``optimizer``: AdamW, by the number of fp32 elements; ``host_optimizer``: the same in the host's memory
    - ``collective/KIND``: over all processes, by the bytes of the full tensor
    - ``host/to`` and ``host/from``: copies between a GPU and the host's memory, by bytes
    - ``loss/PRECISION``: cross-entropy with its gradient, by the number of logits, without the head's products
    - ``data``: preparing a micro-batch, by its sequences and tokens
    - ``block/PRECISION/forward`` and ``backward``: the kernels of a block of a model in a row, with cold caches; the
      sizes are those of ``kernels.MeasuredBlock``

    ``launch``: seconds between the starts of two small kernels. ``overlap``: the share of a collective that overlaps
    with computation. ``in_step``: by precision, on a CPU.
    """

    processes: int
    threads: int | None
    curves: Mapping[str, Curve]
    launch: float = 0.0
    overlap: float = 0.0
    in_step: Mapping[str, InStep] = field(default_factory=dict)
    exchange: Exchanged = field(default_factory=lambda: Exchanged())

    def find_best_rate(self, precision: str) -> float | None:
        """Return the highest measured operations per second of products of a process; None if none was measured."""
        curves = [curve for name, curve in self.curves.items() if name.startswith(f"product/{precision}/")]
        return max((2 * math.prod(s.sizes) / s.seconds for curve in curves for s in curve.samples), default=None)


@dataclass(frozen=True)
class Calibration:
    """A machine as measured.

    ``machine``: its name. ``versions``: of the software it was measured with. ``measured``: when, in ISO 8601.
    ``parts``: seconds of each part of the measurement. ``disturbance``: share of the times in which a process waited
    for a core that another program used.
    """

    machine: str
    measured: str
    versions: Mapping[str, str]
    settings: tuple[ProcessRates, ...]
    parts: Mapping[str, float]
    disturbance: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs disturbed the measurement so much that it is not usable."""
        return self.unreliable_reason is not None

    @property
    def unreliable_reason(self) -> str | None:
        """The reason why the calibration is not usable, or None."""
        if self.disturbance > _QUIET:
            return f"other programs used the cores during {self.disturbance:.0%} of the measurements"
        errors = self.errors("")
        if errors and (off := statistics.median(errors)) > _FAR_OFF:
            return f"the median error for held-out sizes is {off:.0%}"
        return None

    def nearest(self, processes: int) -> ProcessRates:
        """Return the setting whose number of processes is nearest to ``processes``, in proportion."""
        return min(self.settings, key=lambda setting: abs(math.log(setting.processes / processes)))

    def explain_outdated(self, machine: Machine) -> tuple[str, ...]:
        """Return messages about what has changed since the calibration; empty while it is valid."""
        now = read_versions(machine)
        names = dict.fromkeys([*self.versions, *now])
        return tuple(
            f"{name} {self.versions.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in names
            if self.versions.get(name) != now.get(name)
        )

    def errors(self, prefix: str) -> list[float]:
        """Return the held-out errors of all curves whose name starts with ``prefix``."""
        return [e for s in self.settings for name, c in s.curves.items() if name.startswith(prefix) for e in c.errors]


# Environment variables by which torch's CPU libraries choose kernels.
_KERNELS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def read_versions(machine: Machine) -> dict[str, str]:
    """Return the versions, besides the hardware, that affect the speed of ``machine``."""
    by_component = {"torch": metadata.version("torch"), "python": platform.python_version()}
    by_component |= {name: value for name in _KERNELS if (value := os.environ.get(name, ""))}
    if machine.gpus and (driver := _read_driver_version()):
        by_component["driver"] = driver
    return by_component


def locate_calibration(machine: Machine, root: Path | None = None) -> Path:
    """Return the calibration file of machines like ``machine``: same processor, cores and GPUs."""
    return (root or find_cache_root()) / "calibration" / f"{hash_value(list_hardware(machine))}.json"


def list_hardware(machine: Machine) -> list[object]:
    """Return the hardware properties that identify machines of equal speed."""
    return [machine.cpu_name, machine.cpu_cores, *((gpu.name, gpu.memory_bytes) for gpu in machine.gpus)]


def hash_value(value: object) -> str:
    """Return a hash of a value, for file names."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def save_calibration(calibration: Calibration, file: Path) -> None:
    """Write the calibration as a whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(to_json(calibration), indent=1) + "\n")


def load_calibration(file: Path) -> Calibration | None:
    """Return the calibration in ``file``; None if there is none, or it has another format version."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return from_json(content) if _is_of_this_layout(content) else None


def parse_calibration(content: Any) -> Calibration:
    """Validate any value and convert it like ``from_json``. Raises KeyError, TypeError or ValueError."""
    if not _is_of_this_layout(content):
        raise ValueError("of another version of Trainwright, or no calibration")
    calibration = from_json(content)
    if to_json(calibration) != content:  # types are not checked, so the result must convert back to the input
        raise ValueError("not as `trainwright machine --json` writes it")
    return calibration


def _is_of_this_layout(content: Any) -> bool:
    return isinstance(content, dict) and content.get("form") == _FORM


def load_current_calibration(machine: Machine, root: Path | None = None) -> Calibration | None:
    """Return the calibration of ``machine`` that a plan can use; None if there is none or it is outdated."""
    calibration = load_calibration(locate_calibration(machine, root))
    return None if calibration is None or calibration.explain_outdated(machine) else calibration


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as JSON values."""
    return {
        "form": _FORM,
        "machine": calibration.machine,
        "measured": calibration.measured,
        "versions": dict(calibration.versions),
        "parts": dict(calibration.parts),
        "disturbance": calibration.disturbance,
        "settings": [
            {
                "processes": setting.processes,
                "threads": setting.threads,
                "launch": setting.launch,
                "overlap": setting.overlap,
                "exchange": _replace_tuples(asdict(setting.exchange)),
                "in_step": {
                    precision: _replace_tuples(asdict(in_step)) for precision, in_step in setting.in_step.items()
                },
                "curves": {name: _convert_curve(curve) for name, curve in setting.curves.items()},
            }
            for setting in calibration.settings
        ],
    }


def from_json(content: Mapping[str, Any]) -> Calibration:
    """Return the calibration from the result of ``to_json``."""
    return Calibration(
        machine=content["machine"],
        measured=content["measured"],
        versions=content["versions"],
        parts=content["parts"],
        disturbance=content["disturbance"],
        settings=tuple(
            ProcessRates(
                processes=setting["processes"],
                threads=setting["threads"],
                launch=setting["launch"],
                overlap=setting["overlap"],
                exchange=Exchanged(**_restore_tuples(setting["exchange"])),
                in_step={
                    precision: InStep(**_restore_tuples(fields)) for precision, fields in setting["in_step"].items()
                },
                curves={name: _parse_curve(curve) for name, curve in setting["curves"].items()},
            )
            for setting in content["settings"]
        ),
    )


def summarize_errors(errors: Iterable[float]) -> str:
    """Summarize errors as text."""
    known_errors = list(errors)
    return f"{statistics.median(known_errors):.0%} (worst {max(known_errors):.0%})" if known_errors else "-"


def _convert_curve(curve: Curve) -> dict[str, Any]:
    return {
        "form": curve.form,
        "coefficients": list(curve.coefficients),
        "samples": [[*sample.sizes, sample.seconds] for sample in curve.samples if not sample.held_out],
        "held_out": [[*sample.sizes, sample.seconds] for sample in curve.samples if sample.held_out],
    }


def _parse_curve(content: Mapping[str, Any]) -> Curve:
    return Curve(
        form=content["form"],
        coefficients=tuple(content["coefficients"]),
        samples=(
            *_parse_samples(content["samples"]),
            *(replace(s, held_out=True) for s in _parse_samples(content["held_out"])),
        ),
    )


def _replace_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "errors": list(content["errors"])}


def _restore_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "errors": tuple(content["errors"])}


def _parse_samples(rows: Sequence[Sequence[float]]) -> list[TimedSample]:
    return [TimedSample(tuple(row[:-1]), row[-1]) for row in rows]


def _read_driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


# No processor exceeds these limits.
_MOST_RATIO, _MOST_SLOWER = 64.0, 10.0  # rates of two precisions; several threads compared with one
_MOST_OPERATIONS, _MOST_BYTES = 1e17, 1e15  # per second


def save_if_reliable(calibration: Calibration, machine: Machine, root: Path | None = None) -> str | None:
    """Save a calibration of ``machine`` if it is usable; otherwise return why not, and what plans use instead."""
    unreliable_reason = calibration.unreliable_reason or next(check_calibration(calibration), None)
    if unreliable_reason is None:
        save_calibration(calibration, locate_calibration(machine, root))
        return None
    before = load_current_calibration(machine, root)
    stays = "plans use a quick measurement" if before is None else f"the one of {before.measured} is kept"
    return f"the measurement was discarded, because {unreliable_reason}: {stays}; measure again without other programs"


def check_calibration(calibration: Calibration) -> Iterator[str]:
    """Yield impossible values with their keys; the measurement failed then."""
    for number, setting in enumerate(calibration.settings):
        for name, curve in setting.curves.items():
            key = f"settings.{number}.curves.{name}"
            for sample in curve.samples:
                if not (math.isfinite(sample.seconds) and sample.seconds > 0):
                    sizes = " x ".join(f"{size:.0f}" for size in sample.sizes)
                    yield f"{key}: {sample.seconds} seconds for {sizes}"
                elif name.startswith("product/") and 2 * math.prod(sample.sizes) / sample.seconds > _MOST_OPERATIONS:
                    yield f"{key}: {2 * math.prod(sample.sizes) / sample.seconds:.1e} operations per second"
                elif name.startswith("traffic/") and sample.sizes[0] / sample.seconds > _MOST_BYTES:
                    yield f"{key}: {sample.sizes[0] / sample.seconds:.1e} bytes per second"
            if not all(math.isfinite(c) and c >= 0 for c in curve.coefficients):
                yield f"{key}.coefficients: {', '.join(map(str, curve.coefficients))}"
        if not (math.isfinite(setting.launch) and setting.launch >= 0):
            yield f"settings.{number}.launch: {setting.launch}"
    yield from _check_ratios(calibration)


def _check_ratios(calibration: Calibration) -> Iterator[str]:
    for number, setting in enumerate(calibration.settings):
        rates = {precision: _compute_rate(setting, precision) for precision in ("fp32", "tf32", "bf16", "fp16")}
        for faster, slower in permutations(rates, 2):
            if (rates[faster] or 0.0) > _MOST_RATIO * (rates[slower] or math.inf):
                times = f"{(rates[faster] or 0) / (rates[slower] or 1):.0f}"
                yield f"settings.{number}.curves: {faster} is {times} times as fast as {slower}"
    alone = {s.threads: _compute_rate(s, "fp32") for s in calibration.settings if s.processes == 1 and s.threads}
    if (one_thread := alone.get(1)) is not None:
        for threads, rate in alone.items():
            if rate is not None and rate * _MOST_SLOWER < one_thread:
                yield f"settings: {threads} threads are {one_thread / rate:.0f} times as slow as one"


def _compute_rate(setting: ProcessRates, precision: str) -> float | None:
    """Return the operations per second over all measured products; None without any."""
    curves = [curve for name, curve in setting.curves.items() if name.startswith(f"product/{precision}/")]
    samples = [sample for curve in curves for sample in curve.samples]
    seconds = sum(sample.seconds for sample in samples)
    return sum(2 * math.prod(sample.sizes) for sample in samples) / seconds if seconds > 0 else None
