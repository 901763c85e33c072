"""The losses of preference tuning, of log-ratios: log pi(y|x) - log pi_ref(y|x), in nats, of every answer y.

Here w is the chosen answer of a pair and l the rejected one. All are element-wise and in the precision they are given.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimisation (arXiv 2305.18290, equation 7): -log sigma(beta (r_w - r_l)).

    With ``label_smoothing`` e, the probability that a pair is the wrong way round, (1 - e) of it and e of that of the
    pair turned round (conservative DPO, https://ericmitchell.ai/cdpo.pdf).

    Args:
        chosen, rejected: log-ratios r_w and r_l of summed log-probabilities [P].
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Identity preference optimisation (arXiv 2310.12036, equation 17): (r_w - r_l - 1 / (2 beta))^2.

    Args:
        chosen, rejected: log-ratios of mean log-probabilities of an answer's tokens [P]: with sums the margin that is
            aimed at would mean another thing for every length.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto(
    ratios: torch.Tensor,
    good: torch.Tensor,
    divergence: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Kahneman-Tversky optimisation (arXiv 2402.01306, equations 7 and 8), of every answer for itself.

    lambda_D (1 - sigma(beta (r - z))) of a good answer and lambda_U (1 - sigma(beta (z - r))) of a bad one.

    Args:
        ratios: log-ratios r of summed log-probabilities [D].
        good: whether an answer is desirable, bool [D].
        divergence: z, the estimate of KL(pi || pi_ref) that answers are measured against; at least 0.
    """
    gain = beta * (ratios - divergence)
    weights = torch.where(good, desirable_weight, undesirable_weight)
    return weights.to(gain.dtype) * (1 - torch.sigmoid(torch.where(good, gain, -gain)))
