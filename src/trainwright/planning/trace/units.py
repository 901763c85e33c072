"""What is traced of a model: its units, and for each what a pass over it allocates, saves and computes.

A unit is what comes before the blocks (the embedding), a block, or what comes after them (the head and the loss). Sizes
are polynomials of the numbers of a batch (`BASIS`); ``evaluate_trace`` gives the sizes for one batch. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from trainwright.parallel.constants import PART_TOKENS, compute_padded_size


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
# Operations in blocks of a CPU take a ``part`` of the tokens.
# The CPU's flash attention takes a ``tile`` of scores for each thread, a ``strip`` of queries high.
BASIS = (
    *("1", "rows", "length", "tokens", "length²", "pairs", "targets"),
    *("chunk", "chunks", "block", "blocks", "second", "second²", "tile", "strip", "tokens²", "part"),
)


def compute_basis(batch: BatchShape, chunk: int, block: int, threads: int, *, pads: bool = False) -> tuple[int, ...]:
    """Return the values of ``BASIS``.

    Args:
        chunk, block: the most rows of logits that the loss takes at a time.
        threads: of a process on a CPU.
        pads: chunks have a number of rows of ``compute_padded_size``.
    """
    if batch.packed:
        rows, length, second = sum(count for _, count in batch.sequences), batch.longest, batch.second_longest
        pairs = sum(count * length**2 for length, count in batch.sequences)
    else:
        rows, length, second = batch.rows, batch.length, 0
        pairs = rows * length**2
    chunks, chunk = _divide_rows(batch.targets, chunk)
    blocks, block = _divide_rows(chunk, block)
    targets = batch.targets
    if pads:
        chunk, targets = compute_padded_size(chunk), compute_padded_size(targets) if chunks == 1 else targets
    of_loss = targets, chunk, chunks, block, chunks * blocks
    strip = threads * min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    tile = strip * min(512, length)
    square = batch.tokens**2 * batch.packed
    part = min(batch.tokens, PART_TOKENS * threads)
    return (1, rows, length, batch.tokens, length**2, pairs, *of_loss, second, second**2, tile, strip, square, part)


def _divide_rows(count: int, limit: int) -> tuple[int, int]:
    """Return into how many equal parts ``count`` rows are divided, and the rows of the first."""
    if not count:
        return 0, 0
    parts = -(-count // max(1, limit))
    return parts, -(-count // parts)


Size = tuple[float, ...]  # coefficients of ``BASIS``; zeros at the end are left out
N = TypeVar("N", Size, int)
FUSED = "fused"  # the name of operations of ``models.fused``, which a compiler leaves as they are
# "expansion": dequantization.
OperationKind = Literal["product", "attention", "elementwise", "reduction", "copy", "expansion"]


class Moment(NamedTuple, Generic[N]):
    """The time up to a ready gradient. Bytes are relative to the begin of the pass, without ready gradients.

    ``gradient``: name of the parameter within its unit; "": the end of the pass. ``live``: candidates for the most
    bytes in this time; of a batch there is one. ``after``: bytes that live at its end.
    """

    gradient: str
    live: tuple[N, ...]
    after: N


class Operation(NamedTuple, Generic[N]):
    """Equal operations. ``launches``: their number; ``flops``, ``read``, ``written``: of all of them, in bytes.

    ``name``: what it is part of: the name of a module, "loss", "experts", "recomputation" or an operator. A product is
    ``times`` products of [m, k] with [k, n]. ``width``: bytes of an element. ``generation``: of FlashAttention.
    """

    kind: OperationKind
    name: str
    launches: N
    m: N
    n: N
    k: N
    times: N
    flops: N
    read: N
    written: N
    width: float
    generation: int = 2


class PassTrace(NamedTuple, Generic[N]):
    """A pass over a unit. ``saved``: bytes of tensors for the backward pass that offloading would move."""

    moments: tuple[Moment[N], ...] = ()
    operations: Sequence[Operation[N]] = ()
    saved: tuple[N, ...] = ()


class TracedParameter(NamedTuple):
    """A parameter of a unit. ``width``: bytes of an element. ``packed``: bytes of a quantized one, otherwise 0, and
    ``buffers`` those of its scales.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    width: int
    packed: int = 0
    buffers: int = 0

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class UnitTrace(NamedTuple, Generic[N]):
    """A unit; ``evaluation``: the forward pass without gradients."""

    parameters: tuple[TracedParameter, ...]
    forward: PassTrace[N]
    backward: PassTrace[N]
    evaluation: PassTrace[N]


class LayerAttention(NamedTuple):
    """The attention of a kind of layer, as ``AttentionNeeds``; ``window``: it has one, whatever the lengths are."""

    size: int
    value_size: int
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    window: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Numbers of a model for messages and the search; 0 where a model has no such number.

    ``window``: of tokens, in a share ``windowed`` of the blocks; ``attention``: of each kind of layer.
    ``total``, ``active``: parameters, and those that one token uses. ``chunk_logits``, ``block_logits``: the most
    logits that the loss takes at a time. ``grows``: chunks are as large as the hidden states, if these are larger.
    ``pads``: products need numbers of rows of ``compute_padded_size``.
    ``failed``: the operation that could not be traced, "" if the trace is exact.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    total: int
    active: int
    window: int = 0
    windowed: float = 0.0
    attention: tuple[LayerAttention, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    chunk_logits: int = 0
    block_logits: int = 0
    grows: bool = False
    pads: bool = False
    failed: str = ""

    def compute_logit_rows(self, targets: int) -> tuple[int, int]:
        """Return the most rows of logits in a chunk of the loss, and in a block of it."""
        chunk = self.chunk_logits // max(1, self.vocabulary)
        if self.grows:
            return max(chunk, targets * self.hidden // self.vocabulary), 2**62
        return chunk, self.block_logits // max(1, self.vocabulary)


@dataclass(frozen=True, eq=False)
class ModelTrace(Generic[N]):
    """A traced model. ``order``: the embedding, every block and the head, as indices into ``units``.

    ``reference``: the same for a frozen model that runs without gradients before each forward pass, if it is in memory
    too (``reference_copied``) or is the model with its adapter disabled.
    """

    units: tuple[UnitTrace[N], ...]
    order: tuple[int, ...]
    facts: ModelFacts
    reference: tuple[int, ...] = ()
    reference_copied: bool = False

    def list_units(self) -> tuple[UnitTrace[N], ...]:
        """Return the embedding, every block and the head."""
        return tuple(self.units[index] for index in self.order)


SizedModel = ModelTrace[int]


@lru_cache(maxsize=256)
def evaluate_trace(trace: ModelTrace[Size], batch: BatchShape, threads: int = 1) -> SizedModel:
    """Return the trace of one batch: integers instead of polynomials, one candidate for the most bytes.

    ``threads``: of a process on a CPU, each of which has memory of its own in some kernels.
    """
    facts = trace.facts
    values = compute_basis(batch, *facts.compute_logit_rows(batch.targets), threads, pads=facts.pads)

    @cache  # many operations have equal sizes
    def number(size: Size) -> int:
        return round(evaluate_polynomial(size, values))

    def sized(part: PassTrace[Size]) -> PassTrace[int]:
        moments = (Moment(m.gradient, (max(map(number, m.live), default=0),), number(m.after)) for m in part.moments)
        return PassTrace(tuple(moments), _Sized(part.operations, number), tuple(map(number, part.saved)))

    units = tuple(
        UnitTrace(unit.parameters, sized(unit.forward), sized(unit.backward), sized(unit.evaluation))
        for unit in trace.units
    )
    return ModelTrace(units, trace.order, trace.facts, trace.reference, trace.reference_copied)


class _Sized(Sequence[Operation[int]]):
    """The operations of one batch, computed when they are first read: memory needs none of them."""

    def __init__(self, operations: Sequence[Operation[Size]], number: Callable[[Size], int]) -> None:
        self._operations, self._number = operations, number

    @cached_property
    def _all(self) -> list[Operation[int]]:
        return [Operation._make((*o[:2], *map(self._number, o[2:10]), *o[10:])) for o in self._operations]

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._operations)


def evaluate_polynomial(size: Size, values: Sequence[int]) -> float:
    """Return a polynomial's value where the terms of ``BASIS`` have these ``values``."""
    return sum(a * b for a, b in zip(size, values, strict=False))
