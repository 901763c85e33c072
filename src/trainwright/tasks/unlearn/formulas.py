"""The formulas of unlearning, by what they are computed from; objective.py lists the inputs of each forget loss.

pi is the trained model and pi_ref the reference, x a question and y its answer with |y| tokens.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

# From the logits of every position [n, V], and optionally those of a teacher, which get no gradient.


def undial(logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute UNDIAL (arXiv 2402.10052): cross-entropy from softmax(z_ref - beta 1_target) to the model.

    The teacher is the reference with the logit of the forget token lowered by ``beta``.
    """
    lowered = teacher.scatter_add(1, targets[:, None], teacher.new_full((len(teacher), 1), -beta))
    return _cross_entropy(logits, lowered.softmax(1))


def ce_u(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute CE-U (arXiv 2503.01224): cross-entropy from the model's own softmax without the target to the model.

    In the target distribution, which gets no gradient, the logit of the forget token is minus infinity.
    """
    aim = logits.detach().scatter(1, targets[:, None], float("-inf")).softmax(1)
    return _cross_entropy(logits, aim)


def flatten(logits: torch.Tensor) -> torch.Tensor:
    """Compute the logit-margin flattening of PDU (arXiv 2506.05314): (max_v z_v - mean_v z_v)^2."""
    return (logits.amax(1) - logits.mean(1)).square()


def divergence(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute KL(reference || model) = sum_v pi_ref(v) (log pi_ref(v) - log pi(v)); on retain rows (arXiv
    2401.06121).
    """
    expected = teacher.log_softmax(1)
    return (expected.exp() * (expected - logits.log_softmax(1))).sum(1)


def _cross_entropy(logits: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """Return -sum_v aim(v) log pi(v) [n]."""
    return -(aim * logits.log_softmax(1)).sum(1)


# From the negative log-likelihood of every forget token in nats [N], element-wise.


def grad_ascent(losses: torch.Tensor) -> torch.Tensor:
    """Return log pi(y_i | x, y_<i): gradient ascent (arXiv 2210.01504); GradDiff with a retain loss (arXiv
    2203.12817).
    """
    return -losses


def wga(losses: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute weighted gradient ascent (arXiv 2502.19301): w log pi(y_i | x, y_<i), with w = pi(y_i | x, y_<i)^beta.

    The weight has no gradient. Tokens that are almost forgotten have almost no weight.
    """
    return -(-beta * losses.detach()).exp() * losses


def satimp(losses: torch.Tensor, beta: float, importance: float) -> torch.Tensor:
    """Compute SatImp (arXiv 2505.11953): as ``wga`` with w = p^beta (1 - p)^importance, p = pi(y_i | x, y_<i).

    The first factor is the saturation of a token, the second its importance.
    """
    probability = (-losses.detach()).exp()
    return -(probability**beta) * (1 - probability) ** importance * losses


def descent(losses: torch.Tensor) -> torch.Tensor:
    """Return -log pi(y_i | x, y_<i), the fine-tuning loss: for refusals, and for what is subtracted at the end."""
    return losses


# From sums over the tokens of every forget answer [D], element-wise.


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

    With alternate answers in place of the refusals it is AltPO (arXiv 2409.13474). The factor 2 / beta is that of
    ``npo``, so that both have the same weight relative to a retain loss.

    Args:
        refused: log-ratios of the refusals or alternates.
        ratios: log-ratios of the forget answers.
    """
    return -2 / beta * logsigmoid(beta * (refused - ratios))


# From activations: RMU, representation misdirection for unlearning (arXiv 2403.03218).


def steering(activations: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - c u)^2 at every forget position [n], with c u the fixed ``direction`` [H]."""
    return (activations - direction).square().mean(1)


def activation_distance(activations: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - h_ref)^2 at every retain position [n].

    Args:
        frozen: the reference's activations [n, H].
    """
    return (activations - frozen).square().mean(1)


def direction(width: int, coefficient: float, seed: int) -> torch.Tensor:
    """Return c u: a vector [H], fp32, of length ``coefficient``, with uniform entries in [0, 1) before scaling.

    It depends only on ``width``, ``coefficient`` and ``seed``.
    """
    drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm() * coefficient


# Dual ascent of PDU (arXiv 2506.05314): forget as much as the limit of the retain loss permits.


def updated_multiplier(weight: float, retain_loss: float, limit: float, step_size: float) -> float:
    """Update the multiplier of L_forget + lambda (L_retain - limit): max(0, lambda + eta (L_retain - limit))."""
    return max(0.0, weight + step_size * (retain_loss - limit))
