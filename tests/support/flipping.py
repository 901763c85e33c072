"""A step policy that flips a bit of what a rank computes with, where the weights that it updates are others."""

from __future__ import annotations

import torch

from trainwright.faults.drills.planted import Planted


class ComputingWeight(Planted):
    """Flip a bit of a weight in bf16 after a step."""

    def after(self, step: int) -> None:
        """Flip the bit if it is due."""
        if self.is_due(step):
            weights = dict(self.training.strategy.module.named_parameters())
            weight = next(each for name, each in weights.items() if name.endswith("down_proj.weight"))
            assert weight.dtype == torch.bfloat16
            self.flip(weight.data)
