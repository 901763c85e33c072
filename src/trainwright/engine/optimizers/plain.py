"""Optimizers whose update of an element depends on no other element, so that every strategy can divide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.optimizer import build_parameter_groups
from trainwright.recipe.schema import OptimizerSection

Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's AdamW. Vectors (norms, biases) have no weight decay: shrinking them toward zero is not useful."""
    groups = build_parameter_groups(named, section)
    return AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True)


def sgd(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's SGD, whose weight decay is added to the gradient."""
    groups = build_parameter_groups(named, section)
    return torch.optim.SGD(groups, section.learning_rate, section.momentum, nesterov=section.nesterov)


def rmsprop(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's RMSprop with its alpha of 0.99, whose weight decay is added to the gradient."""
    return torch.optim.RMSprop(build_parameter_groups(named, section), section.learning_rate, eps=section.eps)


class Elementwise(Optimizer):
    """An optimizer that updates one parameter after another, by ``_update``."""

    def __init__(self, named: Named, section: OptimizerSection) -> None:
        super().__init__(build_parameter_groups(named, section), {"lr": section.learning_rate})
        self._betas, self._eps = section.betas, section.eps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        raise NotImplementedError


class Adagrad(Elementwise):
    """Divide the gradient by the root of the sum of its squares (Duchi et al., 2011), as torch's Adagrad, whose state
    is there before the first step and so cannot begin anew.
    """

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state = self.state[weight]
        if not state:
            state["sum"] = torch.zeros_like(weight)
        grad = grad.add(weight, alpha=decay) if decay else grad
        state["sum"].addcmul_(grad, grad)
        weight.addcdiv_(grad, state["sum"].sqrt().add_(self._eps), value=-rate)


class AdEMAMix(Elementwise):
    """AdamW with a second, slow momentum (Pagliardini et al., arXiv 2409.03137, without warm-ups)."""

    _SLOW, _ALPHA = 0.9999, 5.0  # of the paper, and of bitsandbytes

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state, (first, second) = self.state[weight], self._betas
        if not state:
            state.update({name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")})
            state["step"] = torch.zeros(())
        state["step"] += 1
        step, fast, slow, square = int(state["step"]), state["exp_avg"], state["exp_avg_slow"], state["exp_avg_sq"]
        fast.lerp_(grad, 1 - first)
        slow.lerp_(grad, 1 - self._SLOW)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        update = (fast / (1 - first**step)).add_(slow, alpha=self._ALPHA)
        update.div_((square / (1 - second**step)).sqrt_().add_(self._eps)).add_(weight, alpha=decay)
        weight.sub_(update, alpha=rate)


class Lion(Elementwise):
    """Move every element by the sign of its interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2)."""

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state, (first, second) = self.state[weight], self._betas
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"]
        weight.mul_(1 - rate * decay)
        weight.add_(momentum.lerp(grad, 1 - first).sign_(), alpha=-rate)
        momentum.lerp_(grad, 1 - second)


class ScheduleFreeAdamW(Elementwise):
    """AdamW in the points between its iterates and their average, which needs no schedule that falls (Defazio et al.,
    arXiv 2405.15682, algorithm 1).

    Weights are y; the state has z ("iterate") and x ("average"), from which y follows: so no evaluation of x changes
    what is trained. The weight of an iterate in x is the square of the largest rate so far, as in the authors' code.
    """

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, rate: float, decay: float) -> None:
        state, (first, second) = self.state[weight], self._betas
        if not state:
            state["iterate"], state["average"] = weight.detach().clone(), weight.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(weight)
            # The number of steps, the largest rate and the sum of the weights of the average.
            state.update({name: torch.zeros((), dtype=torch.float64) for name in ("step", "largest", "total")})
        state["step"] += 1
        state["largest"].clamp_(min=rate)
        state["total"] += state["largest"] ** 2
        step, part = int(state["step"]), float(state["largest"] ** 2 / state["total"]) if state["total"] else 0.0
        iterate, average, square = state["iterate"], state["average"], state["exp_avg_sq"]
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        update = grad / (square / (1 - second**step)).sqrt_().add_(self._eps)
        if decay:
            update.add_(weight, alpha=decay)
        iterate.sub_(update, alpha=rate)
        average.lerp_(iterate, part)
        weight.copy_(torch.lerp(iterate, average, first))
