"""Sizes that several strategies and plans share. Imports no torch."""

from __future__ import annotations

# Elements that a CPU converts to fp32 at a time, for a norm or a sum of gradients: with their copies they fit a cache.
CACHED_ELEMENTS = 2**18
# Shapes of half-precision products on a CPU whose code is cached (models/padding.py), and bytes of each, measured.
CACHED_PRODUCTS, PRODUCT_BYTES = 256, 700_000
