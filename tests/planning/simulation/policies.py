"""Step policies with mistakes that only show on a GPU."""

from __future__ import annotations

import torch

from trainwright.engine.policies.base import StepGradients, StepPolicy


class MixesDevices(StepPolicy):
    """Adds a tensor on the host to one on the device, after the second step."""

    def after(self, step: int) -> None:
        if step < 2:
            return
        device = self.training.strategy.world.device
        torch.ones(3, device=device) + torch.ones(3)


class LeavesMaskOnHost(StepPolicy):
    """Applies a mask of the host on the device, after the first step."""

    def after(self, step: int) -> None:
        device = self.training.strategy.world.device
        torch.ones(3, device=device).masked_fill(torch.ones(3, dtype=torch.bool), 0.0)


class NeedsTf32(StepPolicy):
    """Fails unless fp32 products are computed in TF32, by both of torch's settings."""

    def after(self, step: int) -> None:
        found = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
        if found != ("high", "tf32"):
            raise RuntimeError(f"fp32 products are computed in {found}")


class Waits(StepPolicy):
    """Reads three numbers from the device in every step."""

    def metrics(self, step: int, found: StepGradients) -> dict[str, float]:
        device = self.training.strategy.world.device
        return {f"read_{number}": torch.ones(2, device=device).sum().item() for number in range(3)}
