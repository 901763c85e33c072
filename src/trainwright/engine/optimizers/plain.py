"""Optimizers whose update of an element depends on no other element, so that every strategy can divide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.optimizer import parameter_groups
from trainwright.recipe.schema import OptimizerSection

Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's AdamW. Vectors (norms, biases) have no weight decay: shrinking them toward zero is not useful."""
    return AdamW(
        parameter_groups(named, section),
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def sgd(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's SGD, whose weight decay is added to the gradient."""
    groups = parameter_groups(named, section)
    return torch.optim.SGD(groups, section.learning_rate, section.momentum, nesterov=section.nesterov)


def rmsprop(named: Named, section: OptimizerSection) -> Optimizer:
    """Return torch's RMSprop with its alpha of 0.99, whose weight decay is added to the gradient."""
    return torch.optim.RMSprop(parameter_groups(named, section), section.learning_rate, eps=section.eps)


class Lion(Optimizer):
    """Move every element by the sign of its interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2)."""

    def __init__(self, named: Named, section: OptimizerSection) -> None:
        super().__init__(parameter_groups(named, section), {"lr": section.learning_rate})
        self._betas = section.betas

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        first, second = self._betas
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad, self.state[parameter]
                if grad is None:
                    continue
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(momentum.lerp(grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(grad, 1 - second)


class ScheduleFreeAdamW(Optimizer):
    """AdamW in the points between its iterates and their average, which needs no schedule that falls (Defazio et al.,
    arXiv 2405.15682, algorithm 1).

    Weights are y; the state has z ("iterate") and x ("average"), from which y follows: so no evaluation of x changes
    what is trained. The weight of an iterate in x is the square of the largest rate so far, as in the authors' code.
    """

    def __init__(self, named: Named, section: OptimizerSection) -> None:
        super().__init__(parameter_groups(named, section), {"lr": section.learning_rate})
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
