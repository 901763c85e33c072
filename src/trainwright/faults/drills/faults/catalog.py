"""All kinds of faults that any run can have: importing this module registers them."""

from __future__ import annotations

from trainwright.faults.drills.faults import damage, disks, kills, signals, torchrun  # noqa: F401
