"""The losses of preference tuning: functions of scores, element-wise and in the precision of their inputs.

A score is the log-ratio of an answer, log pi(y|x) - log pi_ref(y|x), or without a reference its log-probability: summed
over the tokens of the answer, or averaged (``PreferenceLoss.averages``, ``dpo.length_normalized``). w is the chosen
answer of a pair and l the rejected one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from trainwright.tasks.dpo.spec import DpoSection


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute direct preference optimization (arXiv 2305.18290, equation 7): -log sigma(beta (s_w - s_l)).

    ``label_smoothing`` e is the probability that a pair is swapped: the loss is (1 - e) times that of the pair plus e
    times that of the swapped pair (conservative DPO, https://ericmitchell.ai/cdpo.pdf). Without a reference it is
    contrastive preference optimization (arXiv 2401.08417, equation 4).
    """
    return _compute_smoothed_loss(section.beta * (chosen - rejected), section.label_smoothing)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute identity preference optimization (arXiv 2310.12036, equation 17): (s_w - s_l - 1 / (2 beta))^2.

    With sums instead of means the margin would depend on the length of answers.
    """
    return (chosen - rejected - 1 / (2 * section.beta)).square()


def hinge(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute the loss of sequence likelihood calibration: max(0, 1 - beta (s_w - s_l)).

    Source: arXiv 2305.10425, equation 1, with the rewards of arXiv 2309.06657.
    """
    return torch.relu(1 - section.beta * (chosen - rejected))


def robust(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute robust DPO (arXiv 2403.00409, equation 12): an unbiased estimate if a share e of the pairs is swapped.

    (-(1 - e) log sigma(beta (s_w - s_l)) + e log sigma(beta (s_l - s_w))) / (1 - 2 e)
    """
    margin, smoothing = section.beta * (chosen - rejected), section.label_smoothing
    return (smoothing * logsigmoid(-margin) - (1 - smoothing) * logsigmoid(margin)) / (1 - 2 * smoothing)


def apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute anchored preference optimization (arXiv 2408.06266, equation 6).

    1 - sigma(beta s_w) + sigma(beta s_l)
    """
    return 1 - torch.sigmoid(section.beta * chosen) + torch.sigmoid(section.beta * rejected)


def apo_down(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute it for chosen answers that are worse than the model's own (arXiv 2408.06266, equation 7).

    sigma(beta s_w) + 1 - sigma(beta (s_w - s_l))
    """
    return torch.sigmoid(section.beta * chosen) + 1 - torch.sigmoid(section.beta * (chosen - rejected))


def sppo(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute self-play preference optimization with hard labels (arXiv 2405.00675, equation 4.7 with P of 1 and 0).

    (s_w - 1 / (2 beta))^2 + (s_l + 1 / (2 beta))^2
    """
    goal = 1 / (2 * section.beta)
    return (chosen - goal).square() + (rejected + goal).square()


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute simple preference optimization (arXiv 2405.14734, equation 6): -log sigma(beta (s_w - s_l) - gamma)."""
    return _compute_smoothed_loss(section.beta * (chosen - rejected) - section.margin, section.label_smoothing)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, section: DpoSection) -> torch.Tensor:
    """Compute the odds-ratio term of ORPO (arXiv 2403.07691, equations 4 to 7).

    -beta log sigma(log odds_w - log odds_l), where the odds of an answer are p / (1 - p) and log p is the mean
    log-probability of its tokens.
    """
    log_odds = [score - torch.log1p(-score.exp()) for score in (chosen, rejected)]
    return -section.beta * logsigmoid(log_odds[0] - log_odds[1])


def kto(
    scores: torch.Tensor, good: torch.Tensor, section: DpoSection, divergence: torch.Tensor | float
) -> torch.Tensor:
    """Compute Kahneman-Tversky optimization (arXiv 2402.01306, equations 7 and 8) of single answers.

    lambda_D (1 - sigma(beta (s - z))) for a good answer and lambda_U (1 - sigma(beta (z - s))) for a bad one.

    Args:
        scores: of the answers [S].
        good: whether an answer is desirable, bool [S].
        divergence: z, the estimate of KL(pi || pi_ref) that answers are compared with; at least 0.
    """
    gain = section.beta * (scores - divergence)
    weights = torch.where(good, section.desirable_weight, section.undesirable_weight)
    return weights.to(gain.dtype) * (1 - torch.sigmoid(torch.where(good, gain, -gain)))


def _compute_smoothed_loss(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
