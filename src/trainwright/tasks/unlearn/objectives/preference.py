"""Losses of every forget answer, from sums over its tokens [D]; all functions are element-wise."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def npo(ratios: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute negative preference optimization (arXiv 2404.05868): -(2 / beta) log sigma(-beta log(pi / pi_ref)).

    Args:
        ratios: log pi(y|x) - log pi_ref(y|x), summed over the answer.
    """
    return -2 / beta * logsigmoid(-beta * ratios)


def simnpo(losses: torch.Tensor, counts: torch.Tensor, beta: float, delta: float) -> torch.Tensor:
    """Compute SimNPO (arXiv 2410.07163): -(2 / beta) log sigma(-(beta / |y|) log pi(y|x) - beta delta).

    The gamma of the paper is beta times ``delta``.

    Args:
        losses: -log pi(y|x), summed over the answer.
        counts: |y|.
    """
    return -2 / beta * logsigmoid(beta * (losses / counts - delta))


def dpo(refused: torch.Tensor, ratios: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute DPO for refusals (arXiv 2305.18290, equation 7): -(2 / beta) log sigma(beta (r_refusal - r_forget)).

    The factor 2 / beta is that of ``npo``, so that both have the same weight relative to a retain loss.

    Args:
        refused: log-ratios of the refusals.
        ratios: log-ratios of the forget answers.
    """
    return -2 / beta * logsigmoid(beta * (refused - ratios))
