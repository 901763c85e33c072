"""What is traced of a model: its units, and for each what a pass over it allocates, saves and computes.

A unit is what comes before the blocks (the embedding), a block, or what comes after them (the head and the loss). Sizes
are polynomials of a batch (``batch.BASIS``); ``at`` gives the numbers for one batch. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from trainwright.planning.trace.batch import BatchShape, basis

Size = tuple[float, ...]  # coefficients of ``BASIS``; zeros at the end are left out
N = TypeVar("N", Size, int)
# "expansion": dequantization.
FUSED = "fused"  # the name of operations of ``models.fused``, which a compiler leaves as they are
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
    width: int
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
        total = 1
        for size in self.shape:
            total *= size
        return total


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
    ``pads``: products need numbers of rows of ``padded_size``.
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

    def rows_of_logits(self, targets: int) -> tuple[int, int]:
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

    def in_order(self) -> tuple[UnitTrace[N], ...]:
        """Return the embedding, every block and the head."""
        return tuple(self.units[index] for index in self.order)


SizedModel = ModelTrace[int]


@lru_cache(maxsize=256)
def at(trace: ModelTrace[Size], batch: BatchShape, threads: int = 1) -> SizedModel:
    """Return the trace of one batch: integers instead of polynomials, one candidate for the most bytes.

    ``threads``: of a process on a CPU, each of which has memory of its own in some kernels.
    """
    facts = trace.facts
    values = basis(batch, *facts.rows_of_logits(batch.targets), threads, pads=facts.pads)

    @cache  # many operations have equal sizes
    def number(size: Size) -> int:
        return round(value_of(size, values))

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


def value_of(size: Size, values: Sequence[int]) -> float:
    """Return a polynomial's value where the terms of ``BASIS`` have these ``values``."""
    return sum(a * b for a, b in zip(size, values, strict=False))
