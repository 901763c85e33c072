"""All kinds of faults, those of `trainwright drill` and the bench's own: importing this module registers them."""

from __future__ import annotations

from support.faults import (  # noqa: F401
    diverging,
    hostile_checkpoints,
    hostile_models,
    hostile_recipes,
    hostile_rows,
    limits,
    near_rows,
    ports,
)
from trainwright.faults.drills import damage, kills  # noqa: F401
