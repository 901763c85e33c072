"""What every strategy is compared with one process on: precisions, passes, recomputation, prompts."""

from __future__ import annotations

import itertools

import pytest

from tests.support.runs import Runs, difference
from tests.support.training import Case, Trained, train

PROMPTS = (
    "data.validation=8",
    "evaluate.every=4",
    'evaluate.prompts=["What is os?", "Hi", "a"]',
    "evaluate.max_new_tokens=8",
)
PRECISIONS = {"fp32": ("train.mixed_precision=no",), "bf16": ("train.mixed_precision=bf16",)}
# By the passes each of two processes makes a step; three need fillers.
PASSES = {
    "one pass": ("train.micro_batch_size=1", "train.global_batch_size=2", "data.pack_length=null"),
    "three passes": ("train.micro_batch_size=1", "train.global_batch_size=6", "data.pack_length=null"),
}
RECOMPUTE = {"kept": (), "recomputed": ("train.activation_checkpointing=full",)}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}

Row = tuple[str, str, str]  # a key of each of PRECISIONS, PASSES and RECOMPUTE
TABLE: list[Row] = list(itertools.product(PRECISIONS, PASSES, RECOMPUTE))
Singles = dict[tuple[str, str], Trained]


def steps(count: int) -> tuple[str, ...]:
    return (f"train.max_steps={count}",)


def case(row: Row, count: int, *more: str) -> Case:
    """A training of so many steps with what a row of the table says, and more overrides."""
    precision, passes, kept = row
    return Case((*PRECISIONS[precision], *PASSES[passes], *RECOMPUTE[kept], *PROMPTS, *steps(count), *more))


class TrainedSingles(Singles):
    """On one process, nothing recomputed, by precision and passes; each is trained when it is first asked for."""

    def __init__(self, runs: Runs, count: int) -> None:
        super().__init__()
        self._runs, self._count = runs, count

    def __missing__(self, kind: tuple[str, str]) -> Trained:
        one = case((*kind, "kept"), self._count, "parallel.strategy=single")
        self[kind] = found = train(self._runs, {kind: one}, 1)[kind]
        return found


def assert_same(trained: Trained, single: Trained, tolerance: float) -> None:
    """The same losses, gradient norms and metrics; the same texts where sums differ in their last digits only."""
    assert difference(trained.column("loss"), single.column("loss")) < tolerance
    assert difference(trained.column("grad_norm"), single.column("grad_norm")) < 2 * tolerance
    for found, expected in zip(trained.metrics(), single.metrics(), strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
    if tolerance < 1e-3:
        assert trained.texts() == single.texts()


def assert_table(runs: Runs, processes: int, sharding: tuple[str, ...], count: int = 20) -> None:
    """Every row of the table, with these overrides on so many processes, is the run of one process."""
    singles = TrainedSingles(runs, count)
    trained = train(runs, {row: case(row, count, *sharding) for row in TABLE}, processes)
    for row, found in trained.items():
        precision, passes, _ = row
        assert_same(found, singles[precision, passes], TOLERANCE[precision])
