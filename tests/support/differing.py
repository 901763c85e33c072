"""Step policies that do something else on one rank, as users write them by mistake."""

from __future__ import annotations

import os
import sys

import torch

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.policies.base import StepGradients, StepPolicy


class SkipOnOne(StepPolicy):
    def skips(self, step: int, found: StepGradients) -> bool:
        return self.training.world.rank == 1 and step == 2


class SkipLastOnOne(StepPolicy):
    def skips(self, step: int, found: StepGradients) -> bool:
        return self.training.world.rank == 1 and step == 4


class RepeatOnOne(StepPolicy):
    def again(self, step: int, found: StepGradients) -> GlobalBatch | None:
        repeats = self.training.world.rank == 1 and step == 2 and not self.state.get("repeated")
        self.state["repeated"] = float(step == 2)
        return found.batch if repeats else None


class ChangeLastOnOne(StepPolicy):
    def after(self, step: int) -> None:
        if self.training.world.rank == 1 and step == 4:
            with torch.no_grad():
                next(self.training.strategy.module.parameters()).add_(1e-3)


class ExitOnOne(StepPolicy):
    def after(self, step: int) -> None:
        if self.training.world.rank == 1 and step == 2:
            sys.exit(0)


class ExitAtOnceOnOne(StepPolicy):
    def after(self, step: int) -> None:
        if self.training.world.rank == 1 and step == 2:
            os._exit(0)
