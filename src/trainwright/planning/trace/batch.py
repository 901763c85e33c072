"""The shape of a pass over a model, and the numbers of it that sizes are polynomials of. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    """The shape of one pass over the model, on one device.

    ``rows`` rows of ``length`` tokens each, including padding; if packed, one row of all sequences. ``sequences``:
    lengths, and the number of each; padded rows have one sequence each. ``targets``: number of targets. ``masked``:
    padded rows of unequal lengths, which need a mask.
    """

    rows: int
    length: int
    sequences: tuple[tuple[int, int], ...]
    targets: int
    packed: bool
    masked: bool

    @property
    def tokens(self) -> int:
        """Number of computed positions."""
        return self.rows * self.length

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(length for length, _ in self.sequences)

    @property
    def second_longest(self) -> int:
        """Length of the second-longest sequence; 0 if there is only one."""
        lengths = sorted((length for length, count in self.sequences for _ in range(min(2, count))), reverse=True)
        return lengths[1] if len(lengths) > 1 else 0

    def each_sequence(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield the sequences as (length, count), one by one; if there are more than ``most``, equal ones in groups."""
        total = sum(count for _, count in self.sequences)
        together = max(1, -(-total // most))
        for length, count in self.sequences:
            for begin in range(0, count, together):
                yield length, min(together, count - begin)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it attends to, in full sequences."""
        return sum(count * length * (length + 1) // 2 for length, count in self.sequences)


# The numbers of a batch that bytes and FLOPs are polynomials of. Rows: of a pack, its sequences. Length: of a row, or
# of a pack's longest sequence. Pairs: the sum of the squares of the sequences' lengths. The loss takes the targets in
# ``chunks`` of ``chunk`` rows, and each chunk in ``blocks`` (of all chunks) of ``block`` rows. Second: the length of a
# pack's second longest sequence.
BASIS = (
    *("1", "rows", "length", "tokens", "length²", "pairs"),
    *("targets", "chunk", "chunks", "block", "blocks", "second", "threads"),
)


def basis(batch: BatchShape, chunk: int, block: int, threads: int) -> tuple[int, ...]:
    """Return the values of ``BASIS``. ``chunk``, ``block``: the most rows of logits that the loss takes at a time."""
    if batch.packed:
        rows, length = sum(count for _, count in batch.sequences), batch.longest
        pairs = sum(count * length**2 for length, count in batch.sequences)
    else:
        rows, length = batch.rows, batch.length
        pairs = rows * length**2
    chunks, chunk = _parts(batch.targets, chunk)
    blocks, block = _parts(chunk, block)
    of_loss = batch.targets, chunk, chunks, block, chunks * blocks
    second = batch.second_longest if batch.packed else 0
    return (1, rows, length, batch.tokens, length**2, pairs, *of_loss, second, threads)


def _parts(count: int, most: int) -> tuple[int, int]:
    """Return into how many equal parts ``count`` rows are divided, and the rows of the first."""
    if not count:
        return 0, 0
    parts = -(-count // max(1, most))
    return parts, -(-count // parts)
