"""All kinds of faults that any run can have: importing this module registers them."""

from __future__ import annotations
