"""Sizes that several strategies and plans share. Imports no torch."""

from __future__ import annotations

# Elements squared at a time on a CPU for a norm, so that conversions and squares stay in the cache.
NORM_ELEMENTS = 2**18
