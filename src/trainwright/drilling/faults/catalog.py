"""All kinds of faults that any run can have: importing this module registers them."""

from __future__ import annotations

from trainwright.drilling.faults import (  # noqa: F401
    damage,
    disks,
    kills,
    memory,
    numbers,
    resuming,
    signals,
    sockets,
    torchrun,
)
