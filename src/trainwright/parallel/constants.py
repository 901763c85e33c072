"""Sizes that models, strategies and plans share. Imports no torch."""

from __future__ import annotations

# Elements that a CPU converts to fp32 at a time, for a norm or a sum of gradients: with their copies they fit a cache.
CACHED_ELEMENTS = 2**18
# Elements that a checksum adds at a time: a CPU converts all of them to eight bytes first (models/files.py).
SUMMED_ELEMENTS = 2**20
# Shapes of half-precision products on a CPU whose code is cached (models/linear_losses.py); bytes of each, measured.
CACHED_PRODUCTS, PRODUCT_BYTES = 256, 570_000
# Bytes of the logits of a chunk of the loss, in the model's precision; on a GPU as many as the hidden states have, if
# these are more: large products use it best, and the memory is small beside that of the activations. (As torch's
# LinearCrossEntropyOptions, whose chunks follow the hidden states at every size.)
CHUNK_BYTES = 128 * 2**20
# Bytes of the logits of a chunk of the fused loss, which makes no copies of them in fp32.
FUSED_CHUNK_BYTES = 2**30
# Share of the free memory that a copy of a model or its state may take; the rest is for activations and a cache.
USABLE = 0.8
# The weights of a saved model are split into files of at most this size, each of which is in memory at once.
SHARD_BYTES = 5 * 10**9
# Bytes of the fp32 logits that a CPU processes at a time.
BLOCK_BYTES = 2 * 2**20
# Tokens that each thread of a CPU takes at a time in operations in blocks (models/fused/blocked.py). A multiple of the
# numbers in two of its registers: torch computes those left over by another formula, with other last bits.
PART_TOKENS = 128
# The length from which the backward pass of the CPU's flash kernel is faster in bf16 than converted to fp32, with AMX;
# without AMX it never is. CPU time in fp32 by that in bf16, heads of 64 and 128 channels, at 256, 512 and 1,024 tokens:
# AMX 0.7 to 1.0, 0.8 to 1.4, 1.2 to 1.9; AVX-512 with bf16 units 0.5 to 0.8, 0.6 to 0.8, 0.8 to 1.0; AVX-512 0.3 to
# 0.4; AVX2 0.1 to 0.2. The forward pass is as fast in bf16 at 64 tokens (0.8 to 1.5) and faster above (1.5 to 3.5), on
# AVX2 as fast (0.9 to 1.1).
BF16_FROM_LENGTH = 512
_SMALLEST_STEP = 16  # of `compute_padded_size`: rows of a tile of AMX
PADDED_SIZES = 16  # of `compute_padded_size`, between a power of two and the next


def step_elements(on_gpu: bool) -> int:
    """Return how many elements a bf16 optimizer step converts to fp32 at a time, but for a parameter with more.

    It bounds the memory of a step. A GPU takes 1 GiB: most steps are one pass, as every piece launches kernels anew.
    """
    return 2**28 if on_gpu else 2**24


def compute_padded_size(count: int) -> int:
    """Return ``count`` rounded up to one of 16 sizes between powers of two, and to a multiple of 16."""
    step = max(_SMALLEST_STEP, (1 << max(0, count - 1).bit_length()) // (2 * PADDED_SIZES))
    return -(-count // step) * step
