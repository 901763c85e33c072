"""What a number of tokens costs in time, energy and money, and the loss to be expected of it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from trainwright.errors import RequestError
from trainwright.planning.plan import Plan
from trainwright.planning.workload import Workload

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)([KMBTx]?)", re.IGNORECASE)
# Hoffmann et al., arXiv 2203.15556, section D.3: loss in nats of a model of N parameters after D tokens of web text.
_IRREDUCIBLE, _A, _ALPHA, _B, _BETA = 1.69, 406.4, 0.34, 410.7, 0.28


def tokens_of(written: str, workload: Workload) -> float:
    """A budget as it is written: 300B, or 20x for so many tokens a parameter (about 20 are the best use of compute).

    Raises:
        RequestError: it is neither, or zero.
    """
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        raise RequestError(f"--tokens {written}: write a number such as 300B, or 20x for 20 tokens a parameter")
    number, unit = float(match[1]), match[2]
    tokens = number * (workload.architecture.parameters().total if unit == "x" else _UNITS[unit.upper()])
    if tokens < 1:
        raise RequestError(f"--tokens {written}: a budget of no tokens trains nothing")
    return tokens


def with_budget(workload: Workload, tokens: float) -> Workload:
    """The workload in as many steps as it takes to see the tokens."""
    return replace(workload, steps=max(1, -(-round(tokens) // round(workload.tokens))))


def words(plan: Plan, tokens: float, price: float | None) -> Iterator[str]:
    """What training on ``tokens`` takes; ``price``: of an hour of a device."""
    time, size = plan.chosen.time, plan.workload.architecture.parameters().total
    if not plan.fits or time is None:
        return
    steps = plan.workload.steps
    assert steps is not None
    hours = steps * time.seconds / 3600
    devices = plan.chosen.choice.num_processes if plan.cluster.device == "cuda" else 1
    unit = "GPU hours" if plan.cluster.device == "cuda" else "hours of the machine"
    yield f"{tokens:.3g} tokens, {tokens / size:.3g} for each of {size:,} parameters, in {steps:,} steps"
    line = f"{hours:,.3g} hours, {hours * devices:,.3g} {unit}"
    if price is not None:
        line += f", {hours * devices * price:,.2f} at {price:g} an hour"
    yield line
    loss = _IRREDUCIBLE + _A / size**_ALPHA + _B / tokens**_BETA
    yield f"about {loss:.2f} nats a token of web text, by the fit of arXiv 2203.15556"
