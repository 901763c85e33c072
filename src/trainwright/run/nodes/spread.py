"""How a number of processes is spread over nodes: the same number on each, and rank 0 on node 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The nodes that take part in a launch, in the order of their ranks, and the number of processes on each."""

    nodes: tuple[int, ...]
    each: int

    @property
    def processes(self) -> int:
        """Return the number of processes on all nodes."""
        return self.each * len(self.nodes)

    def first_rank(self, node: int) -> int:
        """Return the lowest rank on a node."""
        return self.each * self.nodes.index(node)


@dataclass(frozen=True)
class Launch:
    """One launch of the workers: its number, its nodes, and the port of the workers' store at node 0."""

    number: int
    spread: Spread
    port: int


def spread(usable: Collection[int], rooms: Mapping[int, int]) -> Spread | None:
    """Return the spread of the largest usable number of processes, over as many nodes as possible; None if there is
    room for none.

    Args:
        rooms: how many processes each node has room for, by its index.
    """
    best: Spread | None = None
    for each in range(max(rooms.values(), default=0), 0, -1):
        able = sorted(index for index, room in rooms.items() if room >= each)
        for count in range(len(able), 0, -1):
            number = count * each
            if able[0] == 0 and number in usable and (best is None or number >= best.processes):
                best = Spread(tuple(able[:count]), each)
    return best
