"""Dropout works in training passes and in no others, and passes without it leave the training as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import Runs
from tests.support.training import ALONE, Case, train
from trainwright.data.stream.stream import MicroBatch, Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.engine.task import ForwardOnly
from trainwright.parallel.replicated.replicated import Replicated
from trainwright.parallel.strategy import StrategyConfig
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.parallel import ParallelSection

DROPOUT = ("model.dropout=0.4", "train.max_steps=4", "data.limit=40", "data.validation=4", "parallel.strategy=single")
ADAPTER = "model.adapter={type: lora, rank: 4, dropout: 0.4}"
WATCHED = ("evaluate.every=1", "evaluate.prompts=[Hi]", "evaluate.max_new_tokens=4", "checkpoint.every=1")


@pytest.mark.slow
def test_a_run_that_is_evaluated_and_saved_every_step_is_the_run_that_is_not(runs: Runs) -> None:
    cases: dict[Any, Case] = {
        (kind, watched): Case((*DROPOUT, *more, *(WATCHED if watched else ("evaluate.every=null",))))
        for kind, more in (("whole", ()), ("adapter", (ADAPTER,)))
        for watched in (True, False)
    }
    cases["without dropout"] = Case((*DROPOUT, "model.dropout=0"))
    found = train(runs, cases, 1)
    for kind in ("whole", "adapter"):
        watched, unwatched = found[kind, True], found[kind, False]
        assert len(watched.metrics()) == 5 and len(unwatched.metrics()) == 2
        for column in ("loss", "grad_norm"):
            assert watched.column(column) == unwatched.column(column)
    # The same weights are evaluated before the first step, and what is evaluated drops nothing.
    assert found["whole", True].metrics()[0] == found["without dropout"].metrics()[0]
    assert found["whole", True].column("loss")[0] != found["without dropout"].column("loss")[0]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: Any = None) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(self.weight)
        return dropped.sum()


def test_what_is_looked_at_is_computed_without_dropout_and_training_goes_on_with_it() -> None:
    make_optimizer = build_optimizer_factory(OptimizerSection())
    strategy = Replicated(
        StrategyConfig(ParallelSection(strategy="single"), ALONE, Dropping(), make_optimizer, torch.float32)
    )
    dataset = TokenDataset.from_examples([([1, 2, 3], [True] * 3)] * 4, "four")
    stream = Stream(dataset, StreamSettings(global_batch_size=4, seed=0, rows=2, pack_length=None))
    for training in (True, False):
        strategy.module.train(training)
        seen: list[float] = []

        def look(looked: nn.Module, micro: MicroBatch, seen: list[float] = seen) -> None:
            seen.append(float(looked(None)))

        ForwardOnly(strategy)([stream.global_batch(0)], look)
        assert seen == [1000.0, 1000.0]
        assert strategy.module.training is training
