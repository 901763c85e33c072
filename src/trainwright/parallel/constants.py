"""Sizes that the strategies' code has in common, for plans too. Imports no torch."""

from __future__ import annotations

# Elements squared at a time on a CPU for a norm, so that neither a conversion nor a square leaves the cache.
NORM_ELEMENTS = 2**18
