"""Time, energy, cost and expected loss of training on a number of tokens. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from trainwright.errors import RequestError
from trainwright.planning.plan import RunPlan
from trainwright.planning.workload import Workload

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)([KMBTx]?)", re.IGNORECASE)
# Hoffmann et al., arXiv 2203.15556, section D.3: loss in nats of a model of N parameters after D tokens of web text.
_IRREDUCIBLE, _A, _ALPHA, _B, _BETA = 1.69, 406.4, 0.34, 410.7, 0.28


def tokens_of(written: str, workload: Workload) -> float:
    """Parse a budget of tokens: 300B, or 20x for 20 tokens per parameter (about 20 are compute-optimal).

    Raises:
        RequestError: it is neither, or zero.
    """
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        raise RequestError(f"--tokens {written}: use a number such as 300B, or 20x for 20 tokens per parameter")
    number, unit = float(match[1]), match[2].upper()
    tokens = number * (workload.facts.total if unit == "X" else _UNITS[unit])
    if tokens < 1:
        raise RequestError(f"--tokens {written}: the budget must be above zero")
    return tokens


def with_budget(workload: Workload, tokens: float) -> Workload:
    """Return the workload with the number of steps that the tokens require."""
    return replace(workload, steps=max(1, -(-round(tokens) // round(workload.tokens))))


def cost(plan: RunPlan, tokens: float, price: float | None) -> dict[str, float]:
    """Return the time and cost of training on ``tokens``, and the expected loss; ``price``: per device and hour.

    Empty if nothing fits.
    """
    time, size = plan.chosen.time, plan.workload.facts.total
    if not plan.fits or time is None:
        return {}
    assert plan.workload.steps is not None
    hours = plan.workload.steps * time.seconds / 3600
    devices = plan.chosen.choice.num_processes if plan.cluster.has_gpus else 1
    figures = {
        "tokens": tokens,
        "tokens_per_parameter": tokens / size,
        "hours": hours,
        "device_hours": hours * devices,
        "expected_loss": _IRREDUCIBLE + _A / size**_ALPHA + _B / tokens**_BETA,
    }
    return figures if price is None else {**figures, "cost": hours * devices * price}


def words(plan: RunPlan, tokens: float, price: float | None) -> Iterator[str]:
    """Yield the values of ``cost`` as text."""
    figures = cost(plan, tokens, price)
    if not figures:
        return
    size, steps = plan.workload.facts.total, plan.workload.steps
    unit = "GPU hours" if plan.cluster.has_gpus else "hours of the machine"
    each = figures["tokens_per_parameter"]
    yield f"{tokens:.3g} tokens, {each:.3g} per parameter ({size:,} parameters), in {steps:,} steps"
    line = f"{figures['hours']:,.3g} hours, {figures['device_hours']:,.3g} {unit}"
    yield line if price is None else f"{line}, {figures['cost']:,.2f} at {price:g} an hour"
    yield f"about {figures['expected_loss']:.2f} nats per token of web text, by the fit of arXiv 2203.15556"
