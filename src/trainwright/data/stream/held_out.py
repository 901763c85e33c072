"""Choose the examples that are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trainwright.errors import RequestError

HELD_BACK = "held_back.npy"  # the file with the source and the row number of every held-out example

Indices = npt.NDArray[np.int64]


def split(hashes: Sequence[bytes], validation: float | int | None, seed: int) -> tuple[Indices, Indices]:
    """Return ``(train, validation)`` indices, both sorted; every example is in exactly one.

    Whether an example is held out depends on the seed and its content, so equal examples are on the same side, and
    adding a row to the data moves few others.

    Args:
        hashes: digests of the examples' content.
        validation: a fraction below 1, a number of examples, or None.

    Raises:
        RequestError: no examples would remain for training or for validation.
    """
    total = len(hashes)
    everything = np.arange(total, dtype=np.int64)
    if not validation:
        return everything, everything[:0]
    wanted = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if wanted >= total:
        raise RequestError(
            f"data.validation: {validation} of {total:,} examples leaves none for training; lower it, or set it to null"
        )
    prefix = f"{seed}/".encode()
    ranks = np.fromiter((_rank(prefix + content) for content in hashes), np.uint64, total)
    order = np.argsort(ranks, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(ranks[order])) + 1).tolist(), total]  # edges of equal groups
    held = np.zeros(total, dtype=np.bool_)
    count = 0
    for begin, end in pairwise(borders):
        if count + end - begin <= wanted:
            held[order[begin:end]] = True
            count += end - begin
        if count == wanted:
            break
    if not count:
        raise RequestError(
            f"data.validation: too many duplicates to hold out {wanted:,} examples; remove the duplicates, or set it "
            "to null"
        )
    return everything[~held], everything[held]


def _rank(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
