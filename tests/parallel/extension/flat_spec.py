"""The strategy `flat`: as `ddp`, but all gradients are summed at once, when the last backward pass is over."""

from __future__ import annotations

from dataclasses import replace

from trainwright.parallel.replicated.spec import DDP
from trainwright.recipe.strategy_spec import Collective, Limit

SPEC = replace(
    DDP,
    summary="every process has the whole model, and gradients are summed in one piece",
    implementation="flat_strategy:Flat",
    collectives=(Collective("all_reduce", "gradients", "step"),),
    bucket_bytes=None,
    least_processes=2,
    limits=(Limit("train.mixed_precision", ("no",), "flat sums gradients in fp32 alone; set it to no", "fp32 alone"),),
)
