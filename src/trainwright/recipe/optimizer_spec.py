"""What recipes, plans and the engine need to know of an optimizer and of a schedule, without torch.

They are registered in ``recipe/registries.py``, by an entry point of the groups ``trainwright.optimizers`` and
``trainwright.schedules``, or named in a recipe as ``module:Name``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
        summary: one line for the documentation of the key.
        implementation: place ``module:function`` of a function that gets the named parameters and the recipe's section
            ``optimizer``, and returns a ``torch.optim.Optimizer``. Its state per parameter is tensors of the
            parameter's shape, and numbers. The engine sets the learning rate of its groups before each step.
        reads: which of ``momentum``, ``betas``, ``eps`` and ``options`` of the section have an effect.
        state: elements of the optimizer's state for each element of a parameter, for the plan.
        whole_matrices: whether the matrices of blocks are updated as a whole, from one element of state for each of
            theirs; strategies that shard parameters gather them.
    """

    summary: str
    implementation: str
    reads: tuple[str, ...]
    state: int = 2
    whole_matrices: bool = False


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule of the learning rate after its warm-up.

    Attributes:
        factor: from the progress, 0 at the first step after the warm-up and 1 after the last step, to the part of the
            way from ``final_learning_rate_ratio`` (0.0) to the peak (1.0). It also gets what it ``reads`` as keywords.
        reads: which of ``power`` and ``cycles`` of the section, and of the numbers of steps ``warmup`` and ``total``.
        in_decay_steps: whether the progress is that of the last ``decay_steps``, before which the rate is at its peak.
        falls: whether the rate ever leaves its peak.
    """

    factor: Callable[..., float]
    reads: tuple[str, ...] = ()
    in_decay_steps: bool = False
    falls: bool = True


ADAMW = OptimizerSpec(
    summary="adamw (Loshchilov and Hutter, arXiv 1711.05101)",
    implementation="trainwright.engine.optimizer:adamw",
    reads=("betas", "eps"),
)
MUON = OptimizerSpec(
    summary="muon: orthogonalized momentum for the matrices of the blocks (Jordan et al., 2024; scaled as in arXiv "
    "2502.16982) and AdamW for all other parameters, with one learning rate",
    implementation="trainwright.engine.optimizer:Muon",
    reads=("momentum", "betas", "eps"),
    whole_matrices=True,
)

CONSTANT = ScheduleSpec(lambda progress: 1.0, falls=False)
LINEAR = ScheduleSpec(lambda progress: 1.0 - progress)
COSINE = ScheduleSpec(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)))
WARMUP_STABLE_DECAY = ScheduleSpec(LINEAR.factor, in_decay_steps=True)
POLYNOMIAL = ScheduleSpec(lambda progress, power: (1.0 - progress) ** power, reads=("power",))
COSINE_RESTARTS = ScheduleSpec(lambda progress, cycles: COSINE.factor(progress * cycles % 1.0), reads=("cycles",))


def _inverse_sqrt(progress: float, warmup: int, total: int) -> float:
    step = warmup + progress * (total - warmup)
    return math.sqrt((warmup + 1) / (step + 1))


# Vaswani et al., arXiv 1706.03762, equation 3; here the first step after the warm-up has the peak.
INVERSE_SQRT = ScheduleSpec(_inverse_sqrt, reads=("warmup", "total"))
