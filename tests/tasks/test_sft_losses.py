"""What the section `sft` changes in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import Runs, difference
from tests.support.training import Case, train
from trainwright.data.stream.batch import collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.models.linear_losses import Head, linear_cross_entropy
from trainwright.tasks.sft.spec import SftSection
from trainwright.tasks.sft.task import compute_eaft_weights, dft

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


def test_the_weights_of_entropy_adaptive_fine_tuning_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight, targets = 3 * torch.randn(40, 5, dtype=torch.float64), torch.randint(40, (7,))
    section = SftSection(loss="eaft", eaft_power=1.5)
    total = linear_cross_entropy(
        head := Head(hidden, weight, None), targets, target_weights=compute_eaft_weights(head, section).double()
    )
    (gradient,) = torch.autograd.grad(total, hidden)
    logits = hidden @ weight.T
    top = logits.detach().topk(20, dim=-1).values
    logs = top - top.logsumexp(-1, keepdim=True)
    entropy = -(logs.exp() * logs).sum(-1)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = (losses * (entropy / 3.0).pow(1.5)).sum()
    (of_theirs,) = torch.autograd.grad(expected, hidden)
    assert torch.allclose(total, expected, rtol=1e-6) and torch.allclose(gradient, of_theirs, rtol=1e-6, atol=1e-9)
    few = SftSection(loss="eaft", eaft_top=500, eaft_divisor=1.0)  # all there are: the entropy of the prediction
    whole = torch.distributions.Categorical(logits=logits.detach()).entropy()
    assert torch.allclose(compute_eaft_weights(head, few).double(), whole, rtol=1e-5)


def test_a_run_by_entropy_is_the_same_on_any_number_of_processes_and_resumed(runs: Runs, tmp_path: Path) -> None:
    adaptive = ("sft={loss: eaft, eaft_power: 0.5}", *SMALL)
    one = (*adaptive, "parallel.strategy=single")
    cases = {part: Case(one, part, str(tmp_path)) for part in (2, None)}
    alone = train(runs, {**cases, "one": Case(one), "plain": Case((*SMALL, "parallel.strategy=single"))}, 1)
    assert alone[2].column("loss") + alone[None].column("loss") == alone["one"].column("loss")
    assert alone["one"].metrics()[0] == alone["plain"].metrics()[0]  # evaluations have the plain loss
    assert alone["one"].column("loss")[0] != alone["plain"].column("loss")[0]
    cases = {s: Case((*adaptive, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}
    for strategy, trained in train(runs, cases, 2).items():
        assert difference(trained.column("loss"), alone["one"].column("loss")) < 1e-5, strategy


@pytest.mark.slow
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
