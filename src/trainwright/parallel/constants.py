"""Sizes that several strategies and plans share. Imports no torch."""

from __future__ import annotations

# Elements that a CPU converts to fp32 at a time, for a norm or a sum of gradients: with their copies they fit a cache.
CACHED_ELEMENTS = 2**18
# Shapes of half-precision products on a CPU whose code is cached (models/padding.py), and bytes of each, measured.
CACHED_PRODUCTS, PRODUCT_BYTES = 256, 570_000
_SMALLEST_STEP = 16  # of `padded_size`: rows of a tile of AMX
_SIZES = 16  # between a power of two and the next


def padded_size(count: int) -> int:
    """Return ``count`` rounded up to one of 16 sizes between powers of two, and to a multiple of 16."""
    step = max(_SMALLEST_STEP, (1 << max(0, count - 1).bit_length()) // (2 * _SIZES))
    return -(-count // step) * step
