"""The losses against numbers worked by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright.tasks.dpo.task import dpo_loss, ipo_loss, kto_loss


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, *expected: float) -> bool:
    return found.tolist() == pytest.approx(expected, rel=1e-14)


def test_dpo() -> None:
    # beta (r_w - r_l) = 0.1 (0.5 + 1.5) = 0.2, and -log sigma(0.2) = log(1 + exp(-0.2)).
    found = dpo_loss(tensor(0.5, 0.0, -1.5), tensor(-1.5, 0.0, 0.5), 0.1)
    assert close(found, math.log(1 + math.exp(-0.2)), math.log(2), math.log(1 + math.exp(0.2)))
    assert found[0].item() == pytest.approx(0.5981388693815918, rel=1e-12)


def test_dpo_with_label_smoothing() -> None:
    # 0.9 of the loss of the pair, 0.1 of that of the pair turned round, which is 0.2 larger.
    found = dpo_loss(tensor(0.5), tensor(-1.5), 0.1, label_smoothing=0.1)
    assert close(found, 0.5981388693815918 + 0.1 * 0.2)


def test_dpo_of_a_pair_that_is_far_off_does_not_overflow() -> None:
    found = dpo_loss(tensor(5000.0, -5000.0), tensor(-5000.0, 5000.0), 1.0)
    assert found.tolist() == [0.0, 10000.0]


def test_ipo() -> None:
    # 0.5 + 0.25 - 1 / (2 * 0.1) = -4.25; at the start -5; none where the margin is just what is aimed at.
    assert close(ipo_loss(tensor(0.5, 0.0, 5.0), tensor(-0.25, 0.0, 0.0), 0.1), 18.0625, 25.0, 0.0)


def test_kto() -> None:
    # 0.2 (2 - 0.5) = 0.3 for the good answer; 0.2 (0.5 + 1) = 0.3 for the bad one, which counts one and a half.
    found = kto_loss(tensor(2.0, -1.0), torch.tensor([True, False]), 0.5, 0.2, 1.0, 1.5)
    lost = 1 / (1 + math.exp(0.3))
    assert close(found, lost, 1.5 * lost)
    assert close(kto_loss(tensor(0.0, 0.0), torch.tensor([True, False]), 0.0, 0.1, 2.0, 1.0), 1.0, 0.5)


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_chosen_answers_are_pulled_up_and_rejected_ones_down(loss: object) -> None:
    chosen, rejected = tensor(0.1).requires_grad_(), tensor(0.3).requires_grad_()
    loss(chosen, rejected, 0.5).sum().backward()  # type: ignore[operator]
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.item() < 0 < rejected.grad.item()
    assert chosen.grad.item() == pytest.approx(-rejected.grad.item(), rel=1e-14)


def test_kto_pulls_good_answers_up_and_bad_ones_down() -> None:
    ratios = tensor(0.1, 0.3).requires_grad_()
    kto_loss(ratios, torch.tensor([True, False]), 0.2, 0.5).sum().backward()
    assert ratios.grad is not None
    assert ratios.grad[0] < 0 < ratios.grad[1]
