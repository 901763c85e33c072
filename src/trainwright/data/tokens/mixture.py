"""Mix several sources in one stream, each with a share of the examples of every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture: it has ``examples`` examples, and each epoch samples ``drawn`` of them."""

    examples: int
    drawn: int


def parts_of(sizes: Sequence[int], weights: Sequence[float]) -> tuple[MixturePart, ...]:
    """Divide an epoch, which has as many examples as all sources together, by weight (largest remainders)."""
    return tuple(map(MixturePart, sizes, shares(sum(sizes), weights)))


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` in proportion to ``weights`` by largest remainders; ties go to the earlier weight."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def drawn(parts: Sequence[MixturePart], epoch: int, key: str) -> npt.NDArray[np.int64]:
    """Return the examples of one epoch before shuffling: a pure function of the arguments.

    Each source is sampled in rounds, each a permutation of its examples, and an epoch continues where the previous one
    stopped, so examples of a source are used almost equally often.
    """
    found: list[npt.NDArray[np.int64]] = []
    begin = 0
    for place, part in enumerate(parts):
        first, last = epoch * part.drawn, (epoch + 1) * part.drawn
        for turn in range(first // part.examples, -(-last // part.examples)):
            order = permuted(part.examples, f"{key}/{place}/{turn}")
            at = turn * part.examples
            found.append(begin + order[max(0, first - at) : last - at])
        begin += part.examples
    return np.concatenate(found)


def permuted(size: int, key: str) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 to size - 1 that depends only on ``key``."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    order: npt.NDArray[np.int64] = np.random.Generator(np.random.PCG64(seed)).permutation(
        np.arange(size, dtype=np.int64)
    )
    return order
