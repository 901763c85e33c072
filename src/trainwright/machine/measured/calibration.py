"""What was measured of a machine: seconds as functions of sizes, with what each is off by on sizes left out of it.

``trainwright machine calibrate`` writes one, plans read it. It is kept in the cache by machine, and is out of date as
soon as torch or the driver is another. Imports no torch.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainwright.machine.cache import cache_root
from trainwright.machine.detect import Machine

# Of the file; another number is another layout of it.
_FORM = 2
# Of the times, how many other programs may spoil while a machine is measured; and the held-out errors, in the mean,
# from which on it says too little. Beside a program that always wants a core they were seen to stay below.
_QUIET, _FAR_OFF = 0.25, 0.20

# What seconds are a sum of, each times a coefficient. "product": of [m, k] @ [k, n]; beside its operations every
# matrix costs by its size, as it is read, written or laid out anew, and the last tiles by their depth k, as there are
# not enough of them for all cores. "amount": of bytes or elements. "batch": of documents and tokens.
FORMS: dict[str, Callable[..., tuple[float, ...]]] = {
    "product": lambda m, n, k: (1.0, k, m * n * k, m * k, n * k, m * n),
    "amount": lambda amount: (1.0, amount),
    "batch": lambda documents, tokens: (1.0, documents, tokens),
}


@dataclass(frozen=True)
class Sample:
    """One measurement. ``held_out``: not used, so that the error there tells what others will be."""

    sizes: tuple[float, ...]
    seconds: float
    held_out: bool = False


@dataclass(frozen=True)
class Curve:
    """Seconds by sizes.

    ``form``: one of ``FORMS``, whose terms times ``coefficients`` are added; or "table", where the seconds of one
    size are interpolated between samples, both in logarithms, and go on in proportion beyond the last.
    """

    form: str
    samples: tuple[Sample, ...]
    coefficients: tuple[float, ...] = ()
    _points: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        used = sorted((s.sizes[0], s.seconds) for s in self._usable()) if self.form == "table" else []
        object.__setattr__(self, "_points", tuple((math.log(size), math.log(seconds)) for size, seconds in used))

    def _usable(self) -> Iterator[Sample]:
        """Those to go by; impossible ones are told of by ``contradictions``."""
        return (s for s in self.samples if not s.held_out and s.sizes[0] > 0 and s.seconds > 0)

    def seconds(self, *sizes: float) -> float:
        """Predicted for these sizes, which are those of the samples in number and order."""
        if self.form == "table":
            return self._interpolated(sizes[0])
        return sum(c * t for c, t in zip(self.coefficients, FORMS[self.form](*sizes), strict=True))

    def _interpolated(self, size: float) -> float:
        points = self._points
        if size <= 0:
            return 0.0
        x = math.log(size)
        if x <= points[0][0]:
            return math.exp(points[0][1])  # nothing is shorter than the start of a kernel
        for (x0, y0), (x1, y1) in pairwise(points):
            if x <= x1:
                return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        return math.exp(points[-1][1] + x - points[-1][0])

    @property
    def errors(self) -> list[float]:
        """How far off each held-out sample is predicted, as a part of what was measured."""
        return [abs(self.seconds(*s.sizes) / s.seconds - 1) for s in self.samples if s.held_out]


@dataclass(frozen=True)
class InStep:
    """How the kernels of a training step compare with the same ones alone, over and over on memory in the caches.

    ``products``, ``attention`` and ``traffic``: factors on the curves' seconds. ``host``: seconds beside each kernel in
    which Python, autograd and the start of threads go on and nothing is computed. ``errors``: how far off passes of
    models are predicted by these that were not used to find them, each by itself.
    """

    products: float = 1.0
    attention: float = 1.0
    traffic: float = 1.0
    host: float = 0.0
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Exchanged:
    """How a collective of a training step compares with the same one alone: processes come to it at different times,
    and what computes competes with what exchanges for the cores.

    ``waited``: seconds beside it; ``factor``: on the curve's seconds. ``errors``: as those of ``InStep``.
    """

    waited: float = 0.0
    factor: float = 1.0
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What one of ``processes`` takes when all of them do the same at once, each with ``threads`` on a CPU.

    ``curves`` by name:

    - ``product/PRECISION/LAYOUT``: a matrix product of sizes (m, n, k); the layouts are the three of a linear module,
      "forward" (x @ W^T), "input" (dy @ W) and "weight" (dy^T @ x)
    - ``traffic/PRECISION/KIND``: a kernel that reads and writes so many bytes; "copy", "elementwise", "reduction"
    - ``attention/PRECISION/forward`` and ``backward``: causal attention of one token in one channel, by the length
      of its document
    - ``optimizer``: AdamW on so many fp32 elements; ``host_optimizer``: the same in the host's memory
    - ``collective/KIND``: over all processes, by the bytes of the whole tensor
    - ``host/to`` and ``host/from``: bytes between a GPU and the host's memory
    - ``loss/PRECISION``: cross-entropy of so many logits, with its gradient, without the head's products
    - ``data``: making a micro-batch of so many documents and tokens

    ``launch``: seconds from the start of one small kernel to that of the next. ``overlap``: the part of a collective
    that is hidden by computing meanwhile. ``in_step``: by precision, on a CPU.
    """

    processes: int
    threads: int | None
    curves: Mapping[str, Curve]
    launch: float = 0.0
    overlap: float = 0.0
    in_step: Mapping[str, InStep] = field(default_factory=dict)
    exchange: Exchanged = field(default_factory=lambda: Exchanged())


@dataclass(frozen=True)
class Calibration:
    """A machine as measured.

    ``machine``: its name. ``versions``: of the software it was measured with. ``measured``: when, in ISO 8601.
    ``parts``: seconds that each part of the measuring took. ``disturbance``: the part of the times in each of which
    a process waited for a core, as other programs had it.
    """

    machine: str
    measured: str
    versions: Mapping[str, str]
    settings: tuple[Setting, ...]
    parts: Mapping[str, float]
    disturbance: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much that it does not tell what the machine can do."""
        return self.distrust is not None

    @property
    def distrust(self) -> str | None:
        """Why it is not to be gone by; None where it is."""
        if self.disturbance > _QUIET:
            return f"other programs had the cores in {self.disturbance:.0%} of the times"
        errors = self.errors("")
        if errors and (off := statistics.median(errors)) > _FAR_OFF:
            return f"sizes that were measured and left out are predicted {off:.0%} wrong in the median"
        return None

    def nearest(self, processes: int) -> Setting:
        """Return the setting whose number of processes is next to ``processes``, in proportion."""
        return min(self.settings, key=lambda setting: abs(math.log(setting.processes / processes)))

    def outdated(self, machine: Machine) -> tuple[str, ...]:
        """Return what has changed since, in words; empty while the calibration can be used."""
        now = versions(machine)
        names = dict.fromkeys([*self.versions, *now])
        return tuple(
            f"{name} {self.versions.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in names
            if self.versions.get(name) != now.get(name)
        )

    def errors(self, prefix: str) -> list[float]:
        """Held-out errors of all curves whose name begins with ``prefix``."""
        return [e for s in self.settings for name, c in s.curves.items() if name.startswith(prefix) for e in c.errors]


# What torch's CPU libraries read from the environment to choose kernels by.
_KERNELS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def versions(machine: Machine) -> dict[str, str]:
    """Of what the speed of ``machine`` hangs on beside its hardware."""
    found = {"torch": metadata.version("torch"), "python": platform.python_version()}
    found |= {name: value for name in _KERNELS if (value := os.environ.get(name, ""))}
    if machine.gpus and (driver := _driver()):
        found["driver"] = driver
    return found


def calibration_file(machine: Machine, root: Path | None = None) -> Path:
    """Where the calibration of machines like ``machine`` is kept: same processor, cores and GPUs."""
    return (root or cache_root()) / "calibration" / f"{digest(hardware(machine))}.json"


def hardware(machine: Machine) -> list[object]:
    """Return what machines of one speed have in common."""
    return [machine.cpu_name, machine.cpu_cores, *((gpu.name, gpu.memory_bytes) for gpu in machine.gpus)]


def digest(value: object) -> str:
    """Return a name for a file."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def save_calibration(calibration: Calibration, file: Path) -> None:
    """Write it whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(as_json(calibration), indent=1) + "\n", encoding="utf-8")
    scratch.replace(file)


def load_calibration(file: Path) -> Calibration | None:
    """Return the calibration in ``file``; None where there is none, or one of another layout."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return from_json(content) if _is_of_this_layout(content) else None


def of_json(content: Any) -> Calibration:
    """As ``from_json``, of a value that may be anything. Raises KeyError, TypeError or ValueError."""
    if not _is_of_this_layout(content):
        raise ValueError("of another version of Trainwright, or no calibration")
    found = from_json(content)
    if as_json(found) != content:  # it goes by no types, so what it was given has to come out again
        raise ValueError("not as `trainwright machine --json` writes it")
    return found


def _is_of_this_layout(content: Any) -> bool:
    return isinstance(content, dict) and content.get("form") == _FORM


def current_calibration(machine: Machine, root: Path | None = None) -> Calibration | None:
    """Return the calibration of ``machine`` that a plan can use: there is one, and nothing has changed since."""
    found = load_calibration(calibration_file(machine, root))
    return None if found is None or found.outdated(machine) else found


def as_json(calibration: Calibration) -> dict[str, Any]:
    """As a value that JSON has."""
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
                "exchange": _without_tuples(asdict(setting.exchange)),
                "in_step": {precision: _without_tuples(asdict(found)) for precision, found in setting.in_step.items()},
                "curves": {name: _curve_as_json(curve) for name, curve in setting.curves.items()},
            }
            for setting in calibration.settings
        ],
    }


def from_json(content: Mapping[str, Any]) -> Calibration:
    """Return what ``as_json`` made."""
    return Calibration(
        machine=content["machine"],
        measured=content["measured"],
        versions=content["versions"],
        parts=content["parts"],
        disturbance=content["disturbance"],
        settings=tuple(
            Setting(
                processes=setting["processes"],
                threads=setting["threads"],
                launch=setting["launch"],
                overlap=setting["overlap"],
                exchange=Exchanged(**_with_errors(setting["exchange"])),
                in_step={precision: InStep(**_with_errors(found)) for precision, found in setting["in_step"].items()},
                curves={name: _curve_from_json(curve) for name, curve in setting["curves"].items()},
            )
            for setting in content["settings"]
        ),
    )


def summary(errors: Iterable[float]) -> str:
    """Errors in a few words."""
    found = list(errors)
    return f"{statistics.median(found):.0%} (worst {max(found):.0%})" if found else "-"


def _curve_as_json(curve: Curve) -> dict[str, Any]:
    return {
        "form": curve.form,
        "coefficients": list(curve.coefficients),
        "samples": [[*sample.sizes, sample.seconds] for sample in curve.samples if not sample.held_out],
        "held_out": [[*sample.sizes, sample.seconds] for sample in curve.samples if sample.held_out],
    }


def _curve_from_json(content: Mapping[str, Any]) -> Curve:
    return Curve(
        form=content["form"],
        coefficients=tuple(content["coefficients"]),
        samples=(*_samples(content["samples"]), *(replace(s, held_out=True) for s in _samples(content["held_out"]))),
    )


def _without_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "errors": list(content["errors"])}


def _with_errors(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "errors": tuple(content["errors"])}


def _samples(rows: Sequence[Sequence[float]]) -> list[Sample]:
    return [Sample(tuple(row[:-1]), row[-1]) for row in rows]


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
