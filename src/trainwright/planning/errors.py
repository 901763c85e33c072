"""Errors of earlier plans by kind: intervals around predictions. Imports no torch.

``class_errors.json`` is made by ``bench/plan_published.py --write`` from published runs, and for CPUs from runs that
were measured there; nothing in it is written by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

from trainwright.machine.describe import Cluster
from trainwright.planning.workload import Choice, Workload

FILE = Path(__file__).with_name("class_errors.json")
# Share of runs that lie in the interval, with equal shares of the others above and below.
SHARE = 0.9
# With fewer runs no quantile is given.
FEWEST = 4
_LONG = 16_384
_ALL = "all"


@dataclass(frozen=True)
class Interval:
    """Ratios of measured to predicted values, of which ``SHARE`` lie from ``low`` (<= 1) to ``high`` (>= 1).

    ``runs``: how many it is made from.
    """

    low: float
    high: float
    runs: int

    def of(self, predicted: float) -> tuple[float, float]:
        """Return the interval around a prediction."""
        return predicted * self.low, predicted * self.high


@dataclass(frozen=True)
class Errors:
    """Errors of plans of a kind. ``speed``: of tokens per second. ``kinds``: descriptions of the runs."""

    memory: Interval
    speed: Interval
    kinds: tuple[str, ...]

    @property
    def words(self) -> str:
        """The description of the runs."""
        return " and ".join(self.kinds)


def estimate_interval(ratios: Iterable[float]) -> Interval | None:
    """Return the interval in which another run's ratio of measured to predicted lies; None for fewer than ``FEWEST``.

    Of n runs, another one is as likely below the lowest, between two neighbours, and above the highest; between two,
    logarithms are interpolated. For fewer runs than that needs, logarithms are taken to be normal.
    """
    logarithms = sorted(math.log(ratio) for ratio in ratios)
    if len(logarithms) < FEWEST:
        return None
    outside = round((1 - SHARE) / 2, 9)
    if outside * (len(logarithms) + 1) >= 1:
        low, high = (_interpolate_quantile(logarithms, part) for part in (outside, 1 - outside))
    else:
        middle, width = mean(logarithms), _compute_students_quantile(1 - outside, len(logarithms) - 1)
        width *= stdev(logarithms) * math.sqrt(1 + 1 / len(logarithms))
        low, high = middle - width, middle + width
    return Interval(math.exp(min(low, 0.0)), math.exp(max(high, 0.0)), len(logarithms))


def list_kinds(workload: Workload, choice: Choice, cluster: Cluster) -> tuple[str, ...]:
    """Return all kinds of a run: what is trained, and what makes it harder to predict."""
    if cluster.device == "cpu":
        return ("CPU",)
    adapted, quantized = bool(workload.model.adapter), workload.model.quantization != "none"
    holds = {
        "QLoRA": adapted and quantized,
        "LoRA": adapted and not quantized,
        "dense": not adapted and not workload.facts.experts,
        "MoE": bool(workload.facts.experts),
        "long context": workload.mean_length >= _LONG,
        "offload": choice.offload_parameters or choice.offload_optimizer or choice.activation_offload,
        "several nodes": choice.num_processes > cluster.devices_per_node,
        "other vendors": cluster.card.vendor != "NVIDIA",
    }
    return tuple(name for name, holds_now in holds.items() if holds_now)


def build_errors(workload: Workload, choice: Choice, cluster: Cluster) -> Errors:
    """Return the errors of a run's kinds; of several, the wider bound on each side."""
    return _build_errors(list_kinds(workload, choice, cluster))


@cache
def _build_errors(kinds: tuple[str, ...]) -> Errors:
    return Errors(_find_widest(kinds, "memory"), _find_widest(kinds, "speed"), kinds)


def _find_widest(kinds: tuple[str, ...], what: str) -> Interval:
    """Return the widest interval of the kinds; a kind with too few known runs has that of all runs."""
    classes = _read_ratios()["classes"]
    intervals = [Interval(**classes[kind][what]) if classes.get(kind, {}).get(what) else None for kind in kinds]
    of_all = Interval(**classes[_ALL][what])
    some = [interval or of_all for interval in intervals]
    runs = min((interval.runs for interval in intervals if interval), default=0)
    return Interval(min(interval.low for interval in some), max(interval.high for interval in some), runs)


@cache
def _read_ratios() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def _interpolate_quantile(values: list[float], part: float) -> float:
    position = part * (len(values) + 1) - 1
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def _compute_students_quantile(part: float, freedom: int) -> float:
    """Return a quantile of Student's distribution (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5),
    0.3 % off at 3 degrees of freedom.
    """
    z = NormalDist().inv_cdf(part)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
