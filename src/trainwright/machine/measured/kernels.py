"""The kernels of a model's block, as a measurement of the block has them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("product", "attention", "elementwise", "reduction", "copy", "expansion")
# A measured block: parameters of its matrices, and tokens. Forward and backward take 6 operations of each pair.
_MOST_PARAMETERS, _TOKENS = 4_000_000, 256


class Kernel(NamedTuple):
    """Equal kernels, as ``planning.trace.units.Operation``; all are numbers.

    ``kind``: its index in ``KINDS``. ``weights``: 1 if it reads a parameter. ``flops``, ``read``, ``written``: of all
    launches.
    """

    kind: int
    weights: int
    launches: int
    m: int
    n: int
    k: int
    times: int
    flops: float
    read: float
    written: float
    width: int

    def narrowed(self, scale: float, backward: bool) -> Kernel:
        """Return the kernel of a block whose widths are multiplied by ``scale``; tokens stay."""
        changed = self._replace(read=self.read * scale, written=self.written * scale, flops=self.flops * scale)
        if KINDS[self.kind] != "product":
            return changed
        m = self.m if self.weights or not backward else round(self.m * scale)
        n, k = max(1, round(self.n * scale)), self.k if m != self.m else max(1, round(self.k * scale))
        return changed._replace(m=max(1, m), n=n, k=k, flops=2.0 * max(1, m) * n * k * self.times * self.launches)


# By "PRECISION/DIRECTION".
Passes = Mapping[str, Sequence[Kernel]]


@dataclass(frozen=True)
class Block:
    """A block of a model.

    ``hidden``: the model's width. ``breadth``: the parameters of the block for each element of it. ``passes``: returns
    the kernels of its passes over a number of sequences of a length.
    """

    hidden: float
    breadth: float
    passes: Callable[[int, int], Passes] = field(compare=False, default=lambda sequences, length: {})

    @property
    def scale(self) -> float:
        """The power of two that its widths are multiplied by to be measured fast enough."""
        excess = self.hidden * self.breadth / _MOST_PARAMETERS
        return 0.5 ** max(0, math.ceil(math.log(excess, 4))) if excess > 0 else 1.0

    def bounded(self) -> Block:
        """Return the block that is measured."""
        scale = self.scale
        if scale == 1.0:
            return self

        def passes(sequences: int, length: int) -> Passes:
            full = self.passes(sequences, length)
            return {
                name: [kernel.narrowed(scale, name.endswith("backward")) for kernel in kernels]
                for name, kernels in full.items()
            }

        return Block(self.hidden * scale, self.breadth * scale, passes)

    def ratio(self, sizes: Sequence[float]) -> float:
        """Return the largest ratio of its widths to those of a measured block."""
        return max(max(a / b, b / a) for a, b in zip(sizes[:2], (self.hidden, self.breadth), strict=True))


class MeasuredBlock(NamedTuple):
    """A pass over a block that was measured, from the sizes of a sample of the curves ``block/``."""

    hidden: float
    breadth: float
    sequences: int
    length: int
    kernels: tuple[Kernel, ...]

    @staticmethod
    def is_of(sizes: Sequence[float]) -> bool:
        """Return whether these are the sizes of a sample; those of earlier versions were a Llama's."""
        return len(sizes) >= 4 and (len(sizes) - 4) % len(Kernel._fields) == 0

    @classmethod
    def of(cls, sizes: Sequence[float]) -> MeasuredBlock:
        """Return the pass of the sizes of a sample."""
        hidden, breadth, sequences, length, *numbers = sizes
        width = len(Kernel._fields)
        rows = (numbers[begin : begin + width] for begin in range(0, len(numbers), width))
        kernels = tuple(Kernel._make((*map(int, row[:7]), *row[7:10], int(row[10]))) for row in rows)
        return cls(hidden, breadth, int(sequences), int(length), kernels)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The sizes of its sample."""
        return (*map(float, self[:4]), *(float(number) for kernel in self.kernels for number in kernel))


def sequences_of_block(length: int) -> tuple[int, int]:
    """Return the number and the length of the sequences that a block is measured on."""
    return max(1, _TOKENS // length), length


def blocks_to_measure(block: Block, length: int) -> Iterable[tuple[str, MeasuredBlock]]:
    """Yield the passes of a block by the name of their curve."""
    sequences, length = sequences_of_block(length)
    for name, kernels in block.passes(sequences, length).items():
        yield f"block/{name}", MeasuredBlock(block.hidden, block.breadth, sequences, length, tuple(kernels))
