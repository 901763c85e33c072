"""The losses of preference tuning, from log-ratios log pi(y|x) - log pi_ref(y|x), in nats, of every answer y.

w is the chosen answer of a pair and l the rejected one. All functions are element-wise, in the precision of their
inputs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Compute direct preference optimization (arXiv 2305.18290, equation 7): -log sigma(beta (r_w - r_l)).

    ``label_smoothing`` e is the probability that a pair is swapped: the loss is (1 - e) times that of the pair plus e
    times that of the swapped pair (conservative DPO, https://ericmitchell.ai/cdpo.pdf).

    Args:
        chosen, rejected: log-ratios r_w and r_l of summed log-probabilities [P].
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute identity preference optimization (arXiv 2310.12036, equation 17): (r_w - r_l - 1 / (2 beta))^2.

    Args:
        chosen, rejected: log-ratios of the mean log-probabilities of an answer's tokens [P]; with sums, the target
            margin would depend on the length.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto(
    ratios: torch.Tensor,
    good: torch.Tensor,
    divergence: torch.Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Compute Kahneman-Tversky optimization (arXiv 2402.01306, equations 7 and 8) of single answers.

    lambda_D (1 - sigma(beta (r - z))) for a good answer and lambda_U (1 - sigma(beta (z - r))) for a bad one.

    Args:
        ratios: log-ratios r of summed log-probabilities [D].
        good: whether an answer is desirable, bool [D].
        divergence: z, the estimate of KL(pi || pi_ref) that answers are compared with; at least 0.
    """
    gain = beta * (ratios - divergence)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights.to(gain.dtype) * (1 - torch.sigmoid(torch.where(good, gain, -gain)))
