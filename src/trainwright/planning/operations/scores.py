"""Attention that computes every score in single operations: soft-capped scores, sinks, ALiBi."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.planning.operations.elementary import (
    add,
    as_tensor,
    broadcast,
    cat,
    contiguous,
    dropout,
    from_result,
    gather,
    plus,
    scale,
    slices,
    split,
    to,
    view,
)
from trainwright.planning.operations.layers import softmax
from trainwright.planning.operations.shapes import BatchShape, Device, Heads
from trainwright.planning.operations.tape import Parameter, Tape, Tensor

_FP32, _INT64 = 4, 8


@dataclass(frozen=True)
class ScoresAttention:
    """The attention of one layer over a micro-batch. ``sinks``: if the heads have them."""

    tape: Tape
    heads: Heads
    batch: BatchShape
    device: Device
    sinks: Parameter | None = None

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply transformers' eager attention over padded rows, or each sequence of a pack. Returns [B, L, H, D]."""
        tape, heads, groups = self.tape, self.heads, self.batch.sequences
        if heads.group > 1:
            k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
        if len(groups) == 1:
            return tokens_first(tape, self._eager(q, k, v, groups[0][1], groups[0][0]), heads)
        queries, keys, values = (
            split(tape, x, [rows * length * heads.queries * size for length, rows in groups])
            for x, size in ((q, heads.size), (k, heads.size), (v, heads.value_size))
        )
        made = [self._eager(queries[i], keys[i], values[i], rows, length) for i, (length, rows) in enumerate(groups)]
        return tokens_first(tape, cat(tape, made, heads_first=True), heads)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, rows: int, length: int) -> Tensor:
        tape, heads = self.tape, self.heads
        count = rows * heads.queries
        scores = self._scores(q, k, rows, length)
        if heads.softcap:
            scores = scale(tape, from_result(tape, scale(tape, scores)))
        scores = plus(tape, scores, rows * length**2 * scores.width)
        if self.sinks is None:
            weights = to(tape, softmax(tape, to(tape, scores, _FP32)), q.width)
        else:
            scores = self._with_sinks(scores, self.sinks, count * length, scores.width)
            largest = gather(tape, scores, count * length, tape.new(count * length, _INT64))
            weights = self._without_sinks(softmax(tape, add(tape, scores, largest)), count * length)
            del largest
        del scores
        weights = dropout(tape, weights, heads.dropout, self.device.is_gpu)
        return product(tape, weights, v, length, heads.value_size, length, count, rows)

    def alibi(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply attention with ALiBi scores over padded rows, in single operations. Returns [B, L, H, D]."""
        tape, heads, rows, length = self.tape, self.heads, self.batch.rows, self.batch.length
        count = rows * heads.queries
        scores = self._scores(q, k, rows, length)
        scores = plus(tape, scores, heads.queries * length * scores.width)
        scores = plus(tape, scores, rows * length**2)  # the mask, which all blocks share
        weights = to(tape, softmax(tape, to(tape, scores, _FP32)), q.width)
        del scores
        weights = dropout(tape, weights, heads.dropout, self.device.is_gpu)
        return tokens_first(tape, product(tape, weights, v, length, heads.size, length, count, rows), heads)

    def single_operations(self, q: Tensor, k: Tensor, v: Tensor, rows: int, length: int) -> Tensor:
        """Compute attention over sequences of one length with all scores in memory."""
        tape, heads, count = self.tape, self.heads, rows * self.heads.queries
        scores = to(tape, self._scores(q, k, rows, length), _FP32)
        if heads.softcap:
            scores = scale(tape, from_result(tape, scale(tape, scores)))
        scores = _masked_fill(tape, scores, length**2)
        if self.sinks is None:
            weights = to(tape, softmax(tape, scores), v.width)
        else:
            weights = softmax(tape, self._with_sinks(scores, self.sinks, count * length, _FP32))
            weights = to(tape, self._without_sinks(weights, count * length), v.width)
        del scores
        weights = dropout(tape, weights, heads.dropout, self.device.is_gpu)
        return product(tape, weights, v, length, heads.size, length, count, rows)

    def _scores(self, q: Tensor, k: Tensor, rows: int, length: int) -> Tensor:
        """Return the scores of all pairs of tokens in each of ``rows`` rows."""
        heads = self.heads
        return scale(self.tape, product(self.tape, q, k, length, length, heads.size, rows * heads.queries, rows))

    def _with_sinks(self, scores: Tensor, sinks: Parameter, rows: int, width: int) -> Tensor:
        """Append to each of ``rows`` rows of scores its head's sink."""
        sink = broadcast(self.tape, as_tensor(self.tape, sinks, width), rows)
        return cat(self.tape, [scores, sink], heads_first=True)

    def _without_sinks(self, weights: Tensor, rows: int) -> Tensor:
        return slices(self.tape, weights, [weights.numel - rows])[0]


def _masked_fill(tape: Tape, x: Tensor, mask: int) -> Tensor:
    """Set ``x`` to -inf where a new mask of ``mask`` bytes is set; the mask is saved."""
    kept = tape.save(tape.new(mask, 1)) if tape.wants(x) else None
    out = tape.new(x.numel, x.width, x.heads_first)
    tape.launch("elementwise", x.bytes + mask, x.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        assert kept is not None
        kept.get()
        made = tape.new(grad.numel, grad.width, grad.heads_first)
        tape.launch("elementwise", grad.bytes + mask, grad.bytes)
        return [made]

    return tape.derive(out, [x], apply)


def product(tape: Tape, a: Tensor, b: Tensor, m: int, n: int, k: int, count: int, rows: int) -> Tensor:
    """Compute ``count`` products of [m, k] with [k, n]: ``count / rows`` heads of each row."""
    a, b = (contiguous(tape, x) if not x.heads_first and rows > 1 else view(tape, x) for x in (a, b))
    width = a.width
    kept = [tape.save(x) for x in (a, b)] if tape.wants(a, b) else []

    def multiply() -> list[Tensor]:
        made = tape.new(count * m * n, width, heads_first=True)
        tape.product(m, n, k, width, count)
        return [made]

    out = tape.result("product", multiply)[0]

    def apply(grad: Tensor) -> list[Tensor | None]:
        for one in kept:
            one.get()
        of_a = tape.new(count * m * k, width, heads_first=True)
        tape.product(m, k, n, width, count)
        of_b = tape.new(count * k * n, width, heads_first=True)
        tape.product(k, n, m, width, count)
        return [of_a, of_b]

    tape.derive(out, [a, b], apply)
    del a, b
    return view(tape, out)


def repeat(tape: Tape, x: Tensor, group: int) -> Tensor:
    """Repeat every head ``group`` times."""
    out = tape.new(x.numel * group, x.width, heads_first=True)
    tape.launch("copy", x.bytes, out.bytes)
    numel = x.numel

    def apply(grad: Tensor) -> list[Tensor | None]:
        if group == 1:
            return [grad.alias()]
        total = tape.new(numel, grad.width, heads_first=True)
        tape.launch("reduction", grad.bytes, total.bytes)
        return [total]

    return tape.derive(out, [x], apply)


def tokens_first(tape: Tape, x: Tensor, heads: Heads) -> Tensor:
    """Transpose [B, H, L, D] to [B, L, H, D]: a copy if its memory has the first order."""
    if x.heads_first and heads.queries > 1:
        x = contiguous(tape, x)
        x.heads_first = False
        return x
    return view(tape, x)
