"""All kinds of faults: importing this module registers them."""

from __future__ import annotations

from support.faults import (  # noqa: F401
    damage,
    disks,
    diverging,
    hostile_checkpoints,
    hostile_models,
    hostile_recipes,
    hostile_rows,
    kills,
    limits,
    near_rows,
    ports,
    resuming,
    signals,
    torchrun,
)
