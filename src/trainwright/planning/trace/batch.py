"""The shape of a pass over a model, and the numbers of it that sizes are polynomials of. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.parallel.constants import padded_size


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

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it attends to, in full sequences."""
        return sum(count * length * (length + 1) // 2 for length, count in self.sequences)


# The numbers of a batch that bytes and FLOPs are polynomials of. Rows: of a pack, its sequences. Length: of a row, or
# of a pack's longest sequence; second: of its second longest. Pairs: the sum of the squares of the sequences' lengths.
# The loss takes the targets in ``chunks`` of ``chunk`` rows, and these in ``blocks`` (of all chunks) of ``block`` rows.
# Some models compare all tokens of a pack, and mask those of other sequences: ``tokens²``, 0 for padded rows.
# The CPU's flash attention takes a ``tile`` of scores for each thread, a ``strip`` of queries high.
BASIS = (
    *("1", "rows", "length", "tokens", "length²", "pairs", "targets"),
    *("chunk", "chunks", "block", "blocks", "second", "second²", "tile", "strip", "tokens²"),
)


def basis(batch: BatchShape, chunk: int, block: int, threads: int, *, pads: bool = False) -> tuple[int, ...]:
    """Return the values of ``BASIS``.

    Args:
        chunk, block: the most rows of logits that the loss takes at a time.
        threads: of a process on a CPU.
        pads: chunks have a number of rows of ``padded_size``.
    """
    if batch.packed:
        rows, length, second = sum(count for _, count in batch.sequences), batch.longest, batch.second_longest
        pairs = sum(count * length**2 for length, count in batch.sequences)
    else:
        rows, length, second = batch.rows, batch.length, 0
        pairs = rows * length**2
    chunks, chunk = _parts(batch.targets, chunk)
    blocks, block = _parts(chunk, block)
    targets = batch.targets
    if pads:
        chunk, targets = padded_size(chunk), padded_size(targets) if chunks == 1 else targets
    of_loss = targets, chunk, chunks, block, chunks * blocks
    strip = threads * min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    tile = strip * min(512, length)
    squared = batch.tokens**2 * batch.packed
    return (1, rows, length, batch.tokens, length**2, pairs, *of_loss, second, second**2, tile, strip, squared)


def _parts(count: int, limit: int) -> tuple[int, int]:
    """Return into how many equal parts ``count`` rows are divided, and the rows of the first."""
    if not count:
        return 0, 0
    parts = -(-count // max(1, limit))
    return parts, -(-count // parts)
