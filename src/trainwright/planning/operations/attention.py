"""Attention as it runs: inside the documents of a pack, or under a mask over padded rows; by the kernel it takes.

The paths are those of models/attention.py and of transformers' sdpa and eager attention; which kernel torch takes for
them, and what it works in, is read from aten/src/ATen/native/transformers.
"""

from __future__ import annotations

from trainwright.planning.operations.elementary import (
    cat,
    contiguous,
    dropout,
    from_result,
    plus,
    scale,
    slices,
    to,
    view,
)
from trainwright.planning.operations.layers import softmax
from trainwright.planning.operations.shapes import Device, Heads, MicroBatch
from trainwright.planning.operations.tape import Kernel, Tape, Tensor

_FP32 = 4
# models/attention.py: packs of shorter documents are converted to fp32 for the flash kernel of a CPU.
_BF16_FROM_LENGTH = 512
# Documents that are gone through one by one; more of them are taken together.
_MOST_DOCUMENTS = 12


def document_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device
) -> Tensor:
    """models/attention.py: inside each document of a pack. Gives [1, T, H, D]."""
    windowed = heads.window is not None and heads.window < batch.longest
    plain = not heads.dropout and not heads.softcap
    if device.is_gpu and plain and q.width < _FP32:
        return view(tape, _varlen(tape, q, k, v, heads, batch))
    if plain and not windowed and not device.is_gpu:
        return view(tape, _document_flash(tape, q, k, v, heads, batch, device))
    return _each_document(tape, q, k, v, heads, batch, device)


def sdpa_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device, masked: bool
) -> Tensor:
    """transformers' sdpa over padded rows; ``masked``: by a mask of bytes, else causal. Gives [B, L, H, D]."""
    if heads.group > 1 and (masked or (device.is_gpu and heads.size > 256)):
        k, v = _repeat(tape, k, heads.group), _repeat(tape, v, heads.group)
    mask = batch.rows * batch.length**2 if masked else 0
    out = _sdpa(tape, q, k, v, heads, batch.rows, batch.length, mask, device)
    return _tokens_first(tape, out, heads)


def eager_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device
) -> Tensor:
    """transformers' eager attention with capped scores, over padded rows. Gives [B, L, H, D]."""
    if heads.group > 1:
        k, v = _repeat(tape, k, heads.group), _repeat(tape, v, heads.group)
    length, count = batch.length, batch.rows * heads.queries
    scores = scale(tape, _product(tape, q, k, length, length, heads.size, count, batch.rows))
    if heads.softcap:
        scores = scale(tape, from_result(tape, scale(tape, scores)))
    scores = plus(tape, scores, batch.rows * length**2 * scores.width)
    weights = to(tape, softmax(tape, to(tape, scores, _FP32)), q.width)
    del scores
    weights = dropout(tape, weights, heads.dropout, device.is_gpu)
    return _tokens_first(tape, _product(tape, weights, v, length, heads.size, length, count, batch.rows), heads)


def _attend(tape: Tape, inputs: int, out: int, pairs: int, size: int, products: int) -> None:
    """Record an attention kernel: ``products`` matrix products over the pairs of all heads."""
    tape.kernels.append(Kernel(tape.operation, "attention", inputs, out, 2 * products * pairs * size))


def _flash(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: int,
    size: int,
    room: int,
    backward_room: int,
    sums: int,
    mask: Tensor | None = None,
    heads_first: bool = False,
) -> Tensor:
    """A kernel that keeps its inputs, its output and the ``sums`` logarithms of its sums, and works in ``room``."""
    recorded = tape.wants(q, k, v)
    width, masked = q.width, 0 if mask is None else mask.bytes
    kept = [tape.save(x) for x in (q, k, v, mask) if x is not None] if recorded else []

    def run() -> list[Tensor]:
        made = [tape.new(q.numel, width, heads_first), tape.new(sums, _FP32)]
        tape.new(room, 1)
        _attend(tape, q.bytes + k.bytes + v.bytes + masked, made[0].bytes, pairs, size, 2)
        return made

    out, logarithms = tape.result("attention", run)
    if recorded:
        kept_out = tape.save(out.alias()), tape.save(logarithms.alias())
        sizes = [x.numel for x in (q, k, v)]

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            read = sum(one.get().bytes for one in kept) + sum(one.get().bytes for one in kept_out)
            made: list[Tensor | None] = [tape.new(numel, width) for numel in sizes]
            tape.new(backward_room, 1)
            _attend(tape, read + grad.bytes, sum(sizes) * width, pairs, size, 5)
            return made

        tape.record([out, logarithms], [q, k, v], apply)
    return out


def _document_flash(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device
) -> Tensor:
    """The flash kernel of a CPU, document by document, as one operator."""
    tokens, longest, before = batch.tokens, batch.longest, batch.second_longest
    work = _FP32 if longest < _BF16_FROM_LENGTH else q.width
    copied = q.numel + k.numel + v.numel if work != q.width else 0
    # What a document gives is still there while the next one runs; equal ones that are converted run at once.
    equal = copied and len({length for length, _ in batch.documents}) == 1
    together = tokens if equal else longest + before
    of_token = heads.queries * (heads.size * work + _FP32)
    room = copied * work + together * of_token + _flash_room(longest, heads.size, work, device)
    copied += 2 * q.numel if copied else 0
    of_token = (heads.queries + 2 * heads.keys) * heads.size * work
    backward_room = copied * work + together * of_token + _flash_backward_room(longest, work, device)
    sums = heads.queries * tokens
    pairs = heads.queries * batch.pairs
    return _flash(tape, q, k, v, pairs, heads.size, room, backward_room + _FP32 * sums, sums)


def _flash_room(length: int, size: int, width: int, device: Device) -> int:
    """Bytes that the flash kernel of a CPU works in (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows, columns = _flash_tile(length)
    room = 4 * (rows * columns + 2 * rows + rows * size) + (0 if width == _FP32 else width * rows * columns)
    return device.threads * room


def _flash_backward_room(length: int, width: int, device: Device) -> int:
    rows, columns = _flash_tile(length)
    return device.threads * (8 + (0 if width == _FP32 else 2 * width)) * rows * columns + 4 * rows


def _flash_tile(length: int) -> tuple[int, int]:
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, length)


def _varlen(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch) -> Tensor:
    """FlashAttention-2 over all documents of a pack. Backwards it adds up gradients of queries in fp32, and those of
    keys and values for every query head."""
    count = sum(number for _, number in batch.documents)
    padded = batch.tokens + 128 * count
    rounded = -(-heads.size // 32) * 32
    sums = heads.queries * padded * _FP32
    expanded = 2 * batch.tokens * heads.queries * heads.size * q.width if heads.group > 1 else 0
    backward_room = sums * (rounded + 1) + expanded
    pairs = heads.queries * batch.pairs
    return _flash(tape, q, k, v, pairs, heads.size, 0, backward_room, heads.queries * batch.tokens)


def _each_document(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device
) -> Tensor:
    """The general case: windows, dropout, capped scores."""
    k, v = _repeat(tape, k, heads.group), _repeat(tape, v, heads.group)
    outputs = []
    for length, count in batch.each_document(_MOST_DOCUMENTS):
        numel = count * length * heads.queries * heads.size
        queries, keys, values = (slices(tape, x, [numel])[0] for x in (q, k, v))
        windowed = heads.window is not None and length > heads.window
        if not heads.softcap:
            mask = length**2 if windowed else 0
            out = _sdpa(tape, queries, keys, values, heads, count, length, mask, device)
        else:
            out = _scores_attention(tape, queries, keys, values, heads, count, length, device)
        del queries, keys, values
        outputs.append(out)
    return _tokens_first(tape, cat(tape, outputs, heads_first=True), heads)


def _scores_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, rows: int, length: int, device: Device
) -> Tensor:
    count = rows * heads.queries
    scores = to(tape, scale(tape, _product(tape, q, k, length, length, heads.size, count, rows)), _FP32)
    scores = scale(tape, from_result(tape, scale(tape, scores)))
    scores = _masked_fill(tape, scores, length**2)
    weights = to(tape, softmax(tape, scores), v.width)
    del scores
    weights = dropout(tape, weights, heads.dropout, device.is_gpu)
    return _product(tape, weights, v, length, heads.size, length, count, rows)


def _masked_fill(tape: Tape, x: Tensor, mask: int) -> Tensor:
    """-inf where a mask of ``mask`` bytes, made for it, says so; the mask is kept."""
    kept = tape.save(tape.new(mask, 1)) if tape.wants(x) else None
    out = tape.new(x.numel, x.width, x.heads_first)
    tape.launch("elementwise", x.bytes + mask, x.bytes)
    if kept is not None:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            kept.get()
            made = tape.new(grad.numel, grad.width, grad.heads_first)
            tape.launch("elementwise", grad.bytes + mask, grad.bytes)
            return [made]

        tape.record([out], [x], apply)
    return out


def _sdpa(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    rows: int,
    length: int,
    mask: int,
    device: Device,
) -> Tensor:
    """torch's scaled_dot_product_attention; ``mask``: bytes of a boolean mask, 0 where it is causal without one."""
    if heads.dropout and not device.is_gpu:
        return _sdpa_math(tape, q, k, v, heads, rows, length, mask)
    numbers = tape.new(mask, q.width) if mask else None
    pairs = rows * heads.queries * (length**2 if mask else length * (length + 1) // 2)
    sums = rows * heads.queries * length
    if device.is_gpu:
        room, backward_room = 0, _FP32 * sums * ((0 if q.width == _FP32 else heads.size) + 1)
    else:
        room = _flash_room(length, heads.size, q.width, device)
        backward_room = _flash_backward_room(length, q.width, device)
    return _flash(tape, q, k, v, pairs, heads.size, room, backward_room, sums, numbers, q.heads_first)


def _sdpa_math(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, rows: int, length: int, mask: int) -> Tensor:
    """Attention in single operations, in fp32: what a CPU does where there is dropout."""
    width, count = q.width, rows * heads.queries
    numbers = tape.new(mask or length**2, width)
    if heads.group > 1 and k.numel != q.numel:
        k, v = _repeat(tape, k, heads.group), _repeat(tape, v, heads.group)
    q, k, v = (to(tape, x, _FP32) for x in (q, k, v))
    scores = _product(tape, scale(tape, q), scale(tape, k), length, length, heads.size, count, rows)
    tape.launch("elementwise", scores.bytes + numbers.bytes, scores.bytes)
    weights = softmax(tape, scores)
    del scores
    weights = dropout(tape, weights, heads.dropout, fused=False)
    to(tape, weights.alias(), width)
    return to(tape, _product(tape, weights, v, length, heads.size, length, count, rows), width)


def _product(tape: Tape, a: Tensor, b: Tensor, m: int, n: int, k: int, count: int, rows: int) -> Tensor:
    """``count`` products of [m, k] with [k, n], ``count / rows`` heads of each of ``rows``."""
    a, b = (contiguous(tape, x) if not x.heads_first and rows > 1 else view(tape, x) for x in (a, b))
    width = a.width
    recorded = tape.wants(a, b)
    kept = (tape.save(a), tape.save(b)) if recorded else None

    def multiply() -> list[Tensor]:
        made = tape.new(count * m * n, width, heads_first=True)
        tape.product(m, n, k, width, count)
        return [made]

    out = tape.result("product", multiply)[0]
    if kept is not None:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            for one in kept:
                one.get()
            of_a = tape.new(count * m * k, width, heads_first=True)
            tape.product(m, k, n, width, count)
            of_b = tape.new(count * k * n, width, heads_first=True)
            tape.product(k, n, m, width, count)
            return [of_a, of_b]

        tape.record([out], [a, b], apply)
    del a, b
    return view(tape, out)


def _repeat(tape: Tape, x: Tensor, group: int) -> Tensor:
    """Every head ``group`` times."""
    out = tape.new(x.numel * group, x.width, heads_first=True)
    tape.launch("copy", x.bytes, out.bytes)
    if tape.wants(x):
        numel = x.numel

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            if group == 1:
                return [grad.alias()]
            total = tape.new(numel, grad.width, heads_first=True)
            tape.launch("reduction", grad.bytes, total.bytes)
            return [total]

        tape.record([out], [x], apply)
    return out


def _tokens_first(tape: Tape, x: Tensor, heads: Heads) -> Tensor:
    """[B, H, L, D] as [B, L, H, D]: a copy where its memory is in the first order."""
    if x.heads_first and heads.queries > 1:
        x = contiguous(tape, x)
        x.heads_first = False
        return x
    return view(tape, x)
