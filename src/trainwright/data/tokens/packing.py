"""How examples fill packs, and batches that are counted in tokens. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate


def count_examples_within(lengths: Iterator[int], tokens: int) -> int:
    """Return how many of the next examples have at most ``tokens`` together, at least one."""
    sums = accumulate(lengths)
    return max(1, next(index for index, total in enumerate(sums) if total > tokens))


def pack_in_order(lengths: Iterator[int], packs: int, capacity: int) -> list[list[int]]:
    """Group the indices of as many ``lengths`` as fit into ``packs``, one after another, until one fits into none.

    Each is put into the fullest pack with enough space.

    Raises:
        ValueError: an example is longer than a pack.
    """
    groups: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"an example of {length} tokens does not fit a pack of {capacity}")
        position = bisect_left(open_packs, (length, -1))
        if position < len(open_packs):
            free, pack = open_packs.pop(position)
        elif len(groups) < packs:
            free, pack = capacity, len(groups)
            groups.append([])
        else:
            break
        groups[pack].append(index)
        insort(open_packs, (free - length, pack))
    return groups


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group the indices of ``lengths`` into packs whose lengths sum to at most ``capacity``.

    Examples are placed in descending order of length, each into the fullest pack with enough space (Johnson 1973: at
    most 11/9 of the optimum plus a constant). Examples are never split or dropped, and equal input gives equal packs.

    Raises:
        ValueError: an example is longer than a pack.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > capacity:
        raise ValueError(f"an example of {lengths[order[0]]} tokens does not fit a pack of {capacity}")
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for index in order:
        position = bisect_left(open_packs, (lengths[index], -1))
        if position == len(open_packs):
            packs.append([index])
            free, pack = capacity, len(packs) - 1
        else:
            free, pack = open_packs.pop(position)
            packs[pack].append(index)
        insort(open_packs, (free - lengths[index], pack))
    return packs
