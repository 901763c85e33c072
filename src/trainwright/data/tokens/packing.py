"""Best-fit-decreasing bin packing of examples into packs of bounded length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


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
        place = bisect_left(open_packs, (lengths[index], -1))
        if place == len(open_packs):
            packs.append([index])
            free, pack = capacity, len(packs) - 1
        else:
            free, pack = open_packs.pop(place)
            packs[pack].append(index)
        insort(open_packs, (free - lengths[index], pack))
    return packs
