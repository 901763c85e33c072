"""Step policies that inject once what cannot be injected from outside: wrong numbers, and a clock that jumps.

``TRAINWRIGHT_FAULT`` in the environment says where: ``{"rank": 1, "step": 5, "place": 0.3, "bit": 7, "pass": 0}``;
without it they do nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.policies.base import StepGradients, StepPolicy, TrainingContext

VARIABLE = "TRAINWRIGHT_FAULT"
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def flip_bit(tensor: torch.Tensor, position: float, bit: int) -> None:
    """Flip a bit of the element at this share of a tensor's elements."""
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()]).view(-1)
    bits[int(position * len(bits))] ^= 1 << bit


class Planted(StepPolicy):
    """The base class, which decides whether the fault is due."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self.where: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "null")) or {"rank": None}
        self._done = self.training.world.rank != self.where["rank"]

    def is_due(self, step: int) -> bool:
        """Return whether this is the rank and the step of the fault; true only once."""
        due = not self._done and step == self.where["step"]
        self._done |= due
        return due

    def flip(self, tensor: torch.Tensor) -> None:
        """Flip the bit, of the mantissa."""
        flip_bit(tensor, self.where["place"], self.where["bit"] % _MANTISSA_BITS[tensor.dtype])

    def change_output(self, change: Callable[[torch.Tensor], object]) -> None:
        """Change what the first block returns, in the training pass of this number from now on.

        Passes in evaluation mode, which some losses need before, are not compared with those of other ranks.
        """
        passes = iter(range(1000))

        def after_block(module: torch.nn.Module, arguments: object, output: Any) -> None:
            if module.training and next(passes) == self.where["pass"]:
                change((output[0] if isinstance(output, tuple) else output).data)
                hook.remove()

        hook = self.training.task.blocks()[0].register_forward_hook(after_block, prepend=True)


class FlippedWeight(Planted):
    """Flip a bit of a trained weight, in master precision, after a step. Ranks must have all weights."""

    def after(self, step: int) -> None:
        """Flip the bit if it is due."""
        if self.is_due(step):
            weights = self.weights()
            self.flip(weights[int(self.where["place"] * len(weights))])

    def weights(self) -> list[torch.Tensor]:
        """Return the weights of which one is changed."""
        strategy = self.training.strategy
        names = {name for name, _ in strategy.module.named_parameters()}  # others are buffers
        return [tensor for name, tensor in strategy.parameters(frozen=False) if name in names]


class FrozenWeight(FlippedWeight):
    """Flip a bit of a weight that is not trained, such as one under an adapter, after a step."""

    def weights(self) -> list[torch.Tensor]:
        """Return the weights of which one is changed."""
        return [weight.data for weight in self.training.strategy.module.parameters() if not weight.requires_grad]


class Activation(Planted):
    """Flip a bit of what the first block returns in a step."""

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        """Prepare the flip if it is due."""
        if self.is_due(step):
            self.change_output(self.flip)


class NotANumber(Planted):
    """Make what the first block returns in a step NaN."""

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        """Prepare the NaN if it is due."""
        if self.is_due(step):
            self.change_output(lambda output: output.fill_(float("nan")))


class Clock(Planted):
    """Move the system clock, as Python reads it, by ``seconds`` after a step."""

    def after(self, step: int) -> None:
        """Move the clock if it is due."""
        if self.is_due(step):
            clock, seconds = time.time, self.where["seconds"]
            time.time = lambda: clock() + seconds
