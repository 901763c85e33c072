"""Create an optimizer's state before it is filled from a checkpoint."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def create_optimizer_state(optimizer: Optimizer) -> None:
    """Make the state of every parameter, if there is none yet: a step with zero gradients at a learning rate of 0."""
    if any(optimizer.state.values()):
        return
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
