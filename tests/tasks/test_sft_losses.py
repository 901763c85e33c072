"""What the section `sft` changes in a run."""

from __future__ import annotations

import torch

from tests.support.runs import Runs, difference
from tests.support.training import Case, train
from trainwright.data.stream.batch import collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.tasks.sft.task import dft

SMALL = ("data.validation=8", "train.max_steps=3", "train.micro_batch_size=1", "train.mixed_precision=no")
SMALL += ("model.dropout=0",)


def test_the_weights_of_dynamic_fine_tuning_are_constants() -> None:
    dataset = TokenDataset.from_examples([([1, 2, 3, 4], [False, True, True, True])], "x")
    losses = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    value = dft(losses, collate_examples(dataset, [0], packed=False))
    value.backward()
    probabilities = (-losses.detach()).exp()
    assert torch.allclose(value.detach(), (probabilities * losses.detach()).sum())
    assert losses.grad is not None and torch.equal(losses.grad, probabilities)


def test_a_smoothed_run_has_another_loss_and_the_plain_one_in_evaluations(runs: Runs) -> None:
    smoothed = ("sft.label_smoothing=0.2", *SMALL)
    cases = {
        "plain": Case((*SMALL, "parallel.strategy=single")),
        "smoothed": Case((*smoothed, "parallel.strategy=single")),
    }
    alone = train(runs, cases, 1)
    assert alone["smoothed"].metrics()[0] == alone["plain"].metrics()[0]
    assert alone["smoothed"].column("loss")[0] != alone["plain"].column("loss")[0]
    for strategy, trained in train(
        runs, {s: Case((*smoothed, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}, 2
    ).items():
        assert difference(trained.column("loss"), alone["smoothed"].column("loss")) < 1e-5, strategy
