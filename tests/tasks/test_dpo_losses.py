"""The losses against numbers worked by hand, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.preferences import TINY_DPO
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.dpo import losses
from trainwright.tasks.dpo.spec import DpoSection


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, *expected: float) -> bool:
    return found.tolist() == pytest.approx(expected, rel=1e-14)


def section(**values: Any) -> DpoSection:
    return DpoSection.model_validate(values)


def test_dpo() -> None:
    # beta (s_w - s_l) = 0.1 (0.5 + 1.5) = 0.2, and -log sigma(0.2) = log(1 + exp(-0.2)).
    found = losses.dpo(tensor(0.5, 0.0, -1.5), tensor(-1.5, 0.0, 0.5), section())
    assert close(found, math.log(1 + math.exp(-0.2)), math.log(2), math.log(1 + math.exp(0.2)))
    assert found[0].item() == pytest.approx(0.5981388693815918, rel=1e-12)


def test_dpo_with_label_smoothing() -> None:
    # 0.9 of the loss of the pair, 0.1 of that of the pair turned round, which is 0.2 larger.
    found = losses.dpo(tensor(0.5), tensor(-1.5), section(label_smoothing=0.1))
    assert close(found, 0.5981388693815918 + 0.1 * 0.2)


def test_dpo_of_a_pair_that_is_far_off_does_not_overflow() -> None:
    found = losses.dpo(tensor(5000.0, -5000.0), tensor(-5000.0, 5000.0), section(beta=1.0))
    assert found.tolist() == [0.0, 10000.0]


def test_ipo() -> None:
    # 0.5 + 0.25 - 1 / (2 * 0.1) = -4.25; at the start -5; none where the margin is just what is aimed at.
    assert close(losses.ipo(tensor(0.5, 0.0, 5.0), tensor(-0.25, 0.0, 0.0), section()), 18.0625, 25.0, 0.0)


def test_hinge() -> None:
    # 1 - 0.5 (1 + 0.5) = 0.25; 1 at the start; none beyond the margin.
    assert close(losses.hinge(tensor(1.0, 0.0, 3.0), tensor(-0.5, 0.0, 0.0), section(beta=0.5)), 0.25, 1.0, 0.0)


def test_robust() -> None:
    # (0.8 log(1 + e^-0.2) - 0.2 log(1 + e^0.2)) / 0.6: with no swapped pairs it is DPO.
    chosen, rejected = tensor(0.5), tensor(-1.5)
    right, wrong = math.log(1 + math.exp(-0.2)), math.log(1 + math.exp(0.2))
    assert close(losses.robust(chosen, rejected, section(label_smoothing=0.2)), (0.8 * right - 0.2 * wrong) / 0.6)
    assert close(losses.robust(chosen, rejected, section()), right)


def test_apo() -> None:
    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    chosen, rejected = tensor(0.5, 0.0), tensor(-1.5, 0.0)
    assert close(losses.apo_zero(chosen, rejected, section()), 1 - sigma(0.05) + sigma(-0.15), 1.0)
    assert close(losses.apo_down(chosen, rejected, section()), sigma(0.05) + 1 - sigma(0.2), 1.0)


def test_sppo() -> None:
    # 1 / (2 * 0.25) = 2: (1 - 2)^2 + (-0.5 + 2)^2; none where both scores are what is aimed at.
    assert close(losses.sppo(tensor(1.0, 2.0), tensor(-0.5, -2.0), section(beta=0.25)), 1 + 2.25, 0.0)


def test_simpo() -> None:
    # 2 (-1 + 1.75) - 0.5 = 1.
    found = losses.simpo(tensor(-1.0), tensor(-1.75), section(beta=2.0, margin=0.5))
    assert close(found, math.log(1 + math.exp(-1.0)))
    # 0.9 of it and 0.1 of what is 1 larger.
    smoothed = losses.simpo(tensor(-1.0), tensor(-1.75), section(beta=2.0, margin=0.5, label_smoothing=0.1))
    assert close(smoothed, math.log(1 + math.exp(-1.0)) + 0.1)


def test_orpo() -> None:
    # p = 1/2 and 1/4: odds of 1 and 1/3, whose ratio is 3, and sigma(log 3) = 3/4.
    found = losses.orpo(tensor(math.log(1 / 2)), tensor(math.log(1 / 4)), section(beta=0.2))
    assert close(found, 0.2 * math.log(4 / 3))


def test_kto() -> None:
    # 0.2 (2 - 0.5) = 0.3 for the good answer; 0.2 (0.5 + 1) = 0.3 for the bad one, which counts one and a half.
    good = torch.tensor([True, False])
    found = losses.kto(tensor(2.0, -1.0), good, section(beta=0.2, undesirable_weight=1.5), 0.5)
    lost = 1 / (1 + math.exp(0.3))
    assert close(found, lost, 1.5 * lost)
    assert close(losses.kto(tensor(0.0, 0.0), good, section(desirable_weight=2.0), 0.0), 1.0, 0.5)


@pytest.mark.parametrize(
    "loss",
    [losses.dpo, losses.ipo, losses.hinge, losses.robust, losses.apo_zero, losses.sppo, losses.simpo, losses.orpo],
)
def test_chosen_answers_are_pulled_up_and_rejected_ones_down(loss: Any) -> None:
    chosen, rejected = tensor(-0.7).requires_grad_(), tensor(-0.5).requires_grad_()
    loss(chosen, rejected, section(beta=0.5)).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.item() < 0 < rejected.grad.item()


def test_kto_pulls_good_answers_up_and_bad_ones_down() -> None:
    ratios = tensor(0.1, 0.3).requires_grad_()
    losses.kto(ratios, torch.tensor([True, False]), section(beta=0.5), 0.2).sum().backward()
    assert ratios.grad is not None
    assert ratios.grad[0] < 0 < ratios.grad[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("ipo", "label_smoothing=0.1"), "has no effect with dpo.loss ipo, only with dpo, robust, simpo, cpo"),
        (("dpo", "margin=1"), "only with simpo"),
        (("orpo", "length_normalized=true"), "only with dpo, hinge, robust, apo_zero, apo_down, sppo, cpo"),
        (("kto", "sft_weight=1"), "kto has no pairs of which one answer is chosen"),
        (("simpo", "reference=base"), "simpo has no reference; leave it at start"),
        (("sigmoid",), "sigmoid"),
    ],
    ids=str,
)
def test_keys_that_a_loss_does_not_read_are_refused(values: tuple[str, ...], said: str) -> None:
    loss, *others = values
    with pytest.raises(RequestError) as refused:
        load_recipe(TINY_DPO, [f"dpo.loss={loss}", *(f"dpo.{other}" for other in others)])
    assert said in str(refused.value)
