"""AdamW and Lion with states in 8 bits, by the kernels of bitsandbytes (Dettmers et al., arXiv 2110.02861).

256 elements share a scale. A rank's rows of a parameter must be whole blocks of these, so that a sharded run has the
same scales as one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.engine.optimizer import build_parameter_groups
from trainwright.errors import RequestError
from trainwright.parallel.strategy import RowShards
from trainwright.recipe.optimizer_spec import BLOCK, SMALLEST
from trainwright.recipe.schema import OptimizerSection

Named = Iterable[tuple[str, nn.Parameter]]


def adamw(named: Named, section: OptimizerSection) -> Optimizer:
    """Return AdamW with both moments in 8 bits."""
    return EightBit(list(named), section, "adam")


def lion(named: Named, section: OptimizerSection) -> Optimizer:
    """Return Lion with its momentum in 8 bits."""
    return EightBit(list(named), section, "lion")


class EightBit(Optimizer):
    """An optimizer of bitsandbytes' kernels; parameters of less than 4,096 elements have fp32 states.

    Args:
        kernel: "adam", with two states, or "lion".
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], section: OptimizerSection, kernel: str) -> None:
        from bitsandbytes import functional

        super().__init__(build_parameter_groups(named, section), {"lr": section.learning_rate})
        self._functional, self._kernel = functional, kernel
        self._betas, self._eps = section.betas, section.eps
        self._names = {parameter: name for name, parameter in named}
        self._sizes = {parameter: parameter.numel() for _, parameter in named}
        self._codes: dict[tuple[torch.device, int], torch.Tensor] = {}

    def divide(self, shards: RowShards) -> None:
        """Check that all parameters are divided at the borders of blocks. Raises RequestError, with the parameter."""
        for parameter, name in self._names.items():
            shape = shards.shape(parameter)
            self._sizes[parameter] = math.prod(shape)
            part = shards.rows(shape) * math.prod(shape[1:])
            if self._sizes[parameter] >= SMALLEST and part % BLOCK and shards.ranks > 1:
                raise RequestError(
                    f"optimizer.name: {BLOCK} elements share a scale of an 8-bit state, and {name} is divided into "
                    f"parts of {part} elements over {shards.ranks} ranks, so that the run would differ from one on "
                    "another number of them; use parallel.strategy ddp, another number of processes, or adamw"
                )

    def state_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a state of a parameter of this shape."""
        return (-(-math.prod(shape) // BLOCK),) if slot.startswith("absmax") else shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._update(parameter, parameter.grad.contiguous(), group)

    def _update(self, parameter: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], self._betas
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        common = {"step": int(state["step"]), "lr": group["lr"], "weight_decay": group["weight_decay"]}
        state1, state2 = state["state1"], state.get("state2")
        if state1.dtype == torch.float32:
            self._functional.optimizer_update_32bit(
                self._kernel, grad, parameter, state1, first, self._eps, state2=state2, beta2=second, **common
            )
            return
        self._functional.optimizer_update_8bit_blockwise(
            self._kernel, grad, parameter, state1, state2, first, second, 0.0, 0.0, self._eps,
            qmap1=self._choose_code(parameter.device, 1),
            qmap2=None if state2 is None else self._choose_code(parameter.device, 2),
            absmax1=state["absmax1"], absmax2=state.get("absmax2"), **common,
        )  # fmt: skip

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros(())
        small = self._sizes[parameter] < SMALLEST
        for number in (1, 2) if self._kernel == "adam" else (1,):
            dtype = torch.float32 if small else torch.uint8
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            if not small:
                blocks = -(-parameter.numel() // BLOCK)
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def _choose_code(self, device: torch.device, number: int) -> torch.Tensor:
        """Return the 256 values of a state: with signs for the first moment, without for the second."""
        if (device, number) not in self._codes:
            self._codes[device, number] = self._functional.create_dynamic_map(signed=number == 1).to(device)
        return self._codes[device, number]
