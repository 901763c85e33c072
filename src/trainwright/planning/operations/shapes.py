"""The shapes that a pass over a model has, and what it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MicroBatch:
    """The shape of one pass over the model, on one device.

    ``rows`` of ``length`` tokens each, padding counted in; packed: one row, which is all the documents end to end.
    ``documents``: lengths with how many there are of each; of padded rows, one document a row.
    ``targets``: tokens whose prediction is in the loss. ``masked``: padded rows of unequal lengths, which need a mask.
    """

    rows: int
    length: int
    documents: tuple[tuple[int, int], ...]
    targets: int
    packed: bool
    masked: bool

    @property
    def tokens(self) -> int:
        """Positions that are computed."""
        return self.rows * self.length

    @property
    def longest(self) -> int:
        """Return the longest length."""
        return max(length for length, _ in self.documents)

    @property
    def second_longest(self) -> int:
        """Length of the longest document beside the longest one; 0 where that is the only one."""
        lengths = sorted((length for length, count in self.documents for _ in range(min(2, count))), reverse=True)
        return lengths[1] if len(lengths) > 1 else 0

    def each_document(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield the documents as (length, count): one by one, but equal ones together where there are more than
        ``most``.
        """
        total = sum(count for _, count in self.documents)
        together = max(1, -(-total // most))
        for length, count in self.documents:
            for begin in range(0, count, together):
                yield length, min(together, count - begin)

    @property
    def pairs(self) -> int:
        """A query with each key that it may see, in whole documents."""
        return sum(count * length * (length + 1) // 2 for length, count in self.documents)


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention. ``window``: tokens that a query sees, itself among them. ``value``: the width
    of a head's values, where it is not ``size``. ``sinks``: whether each head has a score that no value belongs to.
    ``broadcast``: one head of keys is left to torch to give to all queries, which no kernel of its does."""

    queries: int
    keys: int
    size: int
    window: int | None = None
    softcap: bool = False
    dropout: float = 0.0
    value: int = 0
    sinks: bool = False
    broadcast: bool = False

    @property
    def value_size(self) -> int:
        """Return the size of a value."""
        return self.value or self.size

    @property
    def group(self) -> int:
        """Return the number of queries for each key."""
        return self.queries // self.keys


@dataclass(frozen=True)
class Device:
    """What the kernels run on. ``threads``: of a process on a CPU."""

    kind: Literal["cpu", "cuda"]
    threads: int = 1

    @property
    def is_gpu(self) -> bool:
        """Return whether it is a GPU."""
        return self.kind == "cuda"


@dataclass(frozen=True)
class BlockKind:
    """In what blocks of one model differ. ``windowed``: attention looks back a window only. ``rotated``: queries and
    keys are. ``sparse``: its MLP has experts. ``linear``: it has a delta net in place of attention."""

    windowed: bool
    rotated: bool
    sparse: bool
    linear: bool = False
