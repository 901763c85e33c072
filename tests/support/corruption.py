"""Step policies that flip one bit on one rank, once: what a faulty memory or processor does without an error.

``FLIP`` in the environment says where: ``{"rank": 1, "step": 5, "place": 0.3, "bit": 7, "pass": 0}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.policies.base import StepGradients, StepPolicy, Training


def flip(tensor: torch.Tensor, place: float, bit: int) -> None:
    """Flip a bit of the element at this share of a tensor's elements."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.detach().view(integers).view(-1)
    bits[int(place * len(bits))] ^= 1 << bit


class _Flip(StepPolicy):
    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.where: dict[str, Any] = json.loads(os.environ["FLIP"])
        self.done = training.world.rank != self.where["rank"]


class Weight(_Flip):
    """Flip a bit of a weight after a step."""

    def after(self, step: int) -> None:
        if not self.done and step == self.where["step"]:
            self.done = True
            weights = [tensor for _, tensor in self.training.strategy.module.named_parameters()]
            flip(weights[int(self.where["place"] * len(weights))].data, self.where["place"], self.where["bit"])


class Activation(_Flip):
    """Flip a bit of what the first block gives, in the pass of a step with this number."""

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        if self.done or step != self.where["step"]:
            return
        self.done = True
        passes = iter(range(1000))

        def after_block(module: torch.nn.Module, arguments: object, output: Any) -> None:
            if next(passes) == self.where["pass"]:
                first = output[0] if isinstance(output, tuple) else output
                flip(first.data, self.where["place"], self.where["bit"])
                hook.remove()

        hook = self.training.task.blocks()[0].register_forward_hook(after_block, prepend=True)
