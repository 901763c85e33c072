"""Recipes run for a few steps through the product's own workers, timed by its own events.

The workers are launched here and not by `tw.train`, which would also export the model and write checkpoints.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from support.processes import busy_seconds
from trainwright.machine.machine import Machine
from trainwright.recipe.loading import dump_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run import run_directory
from trainwright.run.process import run_in_child
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.supervisor import launch


@dataclass(frozen=True)
class Timed:
    """``times``: seconds of the steps after the warm-up, ``tokens`` those of each. ``others``: cores that everything
    else on the machine used meanwhile."""

    times: list[float]
    tokens: list[int]
    accumulation: int
    others: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def seconds_per_token(self) -> float:
        return statistics.median(seconds / tokens for seconds, tokens in zip(self.times, self.tokens, strict=True))

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / len(self.tokens) / self.seconds


def run_steps(
    recipe: RecipeSchema,
    machine: Machine,
    steps: int,
    warm_up: int,
    directory: Path,
    cache: Path,
    threads: int | None = None,
) -> Timed:
    """Train ``steps`` of a resolved recipe and keep nothing but the times of those after ``warm_up``.

    ``threads``: of each process; without it they share the cores.

    Raises:
        SystemExit: the run failed; says where its logs are.
    """
    processes = recipe.parallel.num_processes
    assert isinstance(processes, int)
    directory.mkdir(parents=True)
    run_directory.record(directory, dump_recipe(recipe), directory.name, ())
    os.environ["OMP_NUM_THREADS"] = str(threads or max(1, machine.cpu_cores // processes))
    with Stopping() as stopping:
        run_in_child(functools.partial(_prepare, recipe, cache), directory / "prepare.log", stopping)
        busy, own = busy_seconds(), _children_seconds()
        entry = functools.partial(_work, directory, cache, steps)
        code = launch(entry, processes=processes, logs=directory / "logs", stopping=stopping)
        busy, own = busy_seconds() - busy, _children_seconds() - own
    if code:
        raise SystemExit(f"a run ended with exit code {code}; its logs are in {directory}")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    taken = [event for event in events if event["event"] == "step"]
    tokens = [b["tokens"] - a["tokens"] for a, b in pairwise(taken)]
    wall = taken[-1]["time"] - start["time"]
    return Timed(
        times=[event["step_time"] for event in taken[warm_up:]],
        tokens=tokens[warm_up - 1 :],
        accumulation=start["gradient_accumulation_steps"],
        others=max(0.0, busy - own) / max(wall, 1e-9),
    )


def pairwise_order(predicted: Sequence[float], measured: Sequence[float], tied: float = 0.05) -> float:
    """Of all pairs whose measured values differ by more than ``tied``, how many are predicted in the right order."""
    pairs = [
        (p - q) * (a - b) > 0
        for i, (p, a) in enumerate(zip(predicted, measured, strict=True))
        for q, b in list(zip(predicted, measured, strict=True))[:i]
        if abs(a / b - 1) > tied
    ]
    return sum(pairs) / max(1, len(pairs))


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Correlation of the ranks of two lists without ties."""
    return statistics.correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = float(rank)
    return ranks


def _prepare(recipe: RecipeSchema, cache: Path) -> None:
    from trainwright.engine.task import import_task_module

    import_task_module(recipe).prepare_once(recipe, cache)


def _work(directory: Path, cache: Path, steps: int) -> int:
    from trainwright.run.run_worker import TrialRun, Worker, run_worker

    return run_worker(Worker(directory, cache=cache), trial=TrialRun(steps))


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system
