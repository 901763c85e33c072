"""Attention by the kernel that runs: within the documents of a pack, or with a mask over padded rows.

The paths are those of models/attention.py and of transformers' sdpa and eager attention; the choice of torch's kernels
and their working memory follow aten/src/ATen/native/transformers.
"""

from __future__ import annotations

from dataclasses import replace

from trainwright.planning.operations.elementary import (
    cat,
    contiguous,
    dropout,
    scale,
    slices,
    to,
    view,
)
from trainwright.planning.operations.layers import softmax
from trainwright.planning.operations.scores import product, repeat, scores_attention, tokens_first
from trainwright.planning.operations.shapes import Device, Heads, MicroBatch
from trainwright.planning.operations.tape import Kernel, Parameter, Tape, Tensor

_FP32 = 4
# models/attention.py: packs of shorter documents are converted to fp32 for the CPU's flash kernel.
_BF16_FROM_LENGTH = 512
# Maximum number of documents that are simulated one by one; more are grouped.
_MOST_DOCUMENTS = 12


def document_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    batch: MicroBatch,
    device: Device,
    sinks: Parameter | None = None,
) -> Tensor:
    """Apply models/attention.py within each document of a pack. Returns [1, T, H, D]."""
    windowed = heads.window is not None and heads.window < batch.longest
    plain = not heads.dropout and not heads.softcap and not heads.sinks
    if device.is_gpu and plain and q.width < _FP32:
        return view(tape, _varlen(tape, q, k, v, heads, batch))
    if plain and not windowed and not device.is_gpu and heads.value_size == heads.size:
        return view(tape, _document_flash(tape, q, k, v, heads, batch, device))
    return _each_document(tape, q, k, v, heads, batch, device, sinks)


def sdpa_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device, masked: bool
) -> Tensor:
    """Apply transformers' sdpa to padded rows; ``masked``: with a mask of bytes, else causal. Returns [B, L, H, D]."""
    mask = batch.rows * batch.length**2 if masked else 0
    if heads.broadcast:
        return tokens_first(tape, _sdpa_math(tape, q, k, v, heads, batch.rows, batch.length, mask), heads)
    if heads.group > 1 and (masked or (device.is_gpu and heads.size > 256)):
        k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
    out = _sdpa(tape, q, k, v, heads, batch.rows, batch.length, mask, device)
    return tokens_first(tape, out, heads)


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
    workspace: int,
    backward_workspace: int,
    sums: int,
    mask: Tensor | None = None,
    heads_first: bool = False,
    numel: int | None = None,
) -> Tensor:
    """Run a kernel with ``workspace`` bytes that saves its inputs, output and ``sums`` log-sum-exp values.

    ``numel``: elements of the output, if not those of the queries.
    """
    recorded = tape.wants(q, k, v)
    width, masked, given = q.width, 0 if mask is None else mask.bytes, numel or q.numel
    kept = [tape.save(x) for x in (q, k, v, mask) if x is not None] if recorded else []

    def run() -> list[Tensor]:
        made = [tape.new(given, width, heads_first), tape.new(sums, _FP32)]
        tape.new(workspace, 1)
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
            made: list[Tensor | None] = [tape.new(size, width) for size in sizes]
            tape.new(backward_workspace, 1)
            _attend(tape, read + grad.bytes, sum(sizes) * width, pairs, size, 5)
            return made

        tape.record([out, logarithms], [q, k, v], apply)
    return out


def _document_flash(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch, device: Device
) -> Tensor:
    """Run the CPU's flash kernel on each document, as one operator."""
    tokens, longest, before = batch.tokens, batch.longest, batch.second_longest
    work = _FP32 if longest < _BF16_FROM_LENGTH else q.width
    copied = q.numel + k.numel + v.numel if work != q.width else 0
    # The output of a document still exists while the next one runs; converted ones of equal length run at once.
    equal = copied and len({length for length, _ in batch.documents}) == 1
    together = tokens if equal else longest + before
    of_token = heads.queries * (heads.size * work + _FP32)
    workspace = copied * work + together * of_token + _flash_workspace(longest, heads.size, work, device)
    copied += 2 * q.numel if copied else 0
    of_token = (heads.queries + 2 * heads.keys) * heads.size * work
    backward_workspace = copied * work + together * of_token + _flash_backward_room(longest, work, device)
    sums = heads.queries * tokens
    pairs = heads.queries * batch.pairs
    return _flash(tape, q, k, v, pairs, heads.size, workspace, backward_workspace + _FP32 * sums, sums)


def _flash_workspace(length: int, size: int, width: int, device: Device) -> int:
    """Return the working memory of the CPU's flash kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows, columns = _flash_tile(length)
    workspace = 4 * (rows * columns + 2 * rows + rows * size) + (0 if width == _FP32 else width * rows * columns)
    return device.threads * workspace


def _flash_backward_room(length: int, width: int, device: Device) -> int:
    rows, columns = _flash_tile(length)
    return device.threads * (8 + (0 if width == _FP32 else 2 * width)) * rows * columns + 4 * rows


def _flash_tile(length: int) -> tuple[int, int]:
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, length)


def _varlen(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, batch: MicroBatch) -> Tensor:
    """Run FlashAttention-2 over all documents of a pack.

    The backward pass accumulates gradients of queries in fp32, and those of keys and values for every query head.
    """
    if heads.value_size != heads.size:  # the kernel requires equal widths: values are padded, and the zeros cut off
        v = cat(tape, [v, tape.new(k.numel - v.numel, v.width)])
        whole = _varlen(tape, q, k, v, replace(heads, value=0), batch)
        return contiguous(tape, slices(tape, whole, [batch.tokens * heads.queries * heads.value_size])[0])
    count = sum(number for _, number in batch.documents)
    padded = batch.tokens + 128 * count
    rounded = -(-heads.size // 32) * 32
    sums = heads.queries * padded * _FP32
    expanded = 2 * batch.tokens * heads.queries * heads.size * q.width if heads.group > 1 else 0
    backward_workspace = sums * (rounded + 1) + expanded
    pairs = heads.queries * batch.pairs
    return _flash(tape, q, k, v, pairs, heads.size, 0, backward_workspace, heads.queries * batch.tokens)


def _each_document(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    batch: MicroBatch,
    device: Device,
    sinks: Parameter | None = None,
) -> Tensor:
    """Run the general case: windows, dropout, soft caps, sinks, values of another width than keys."""
    k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
    outputs = []
    for length, count in batch.each_document(_MOST_DOCUMENTS):
        numel = count * length * heads.queries
        sizes = (heads.size, heads.size, heads.value_size)
        queries, keys, values = (slices(tape, x, [numel * n])[0] for x, n in zip((q, k, v), sizes, strict=True))
        windowed = heads.window is not None and length > heads.window
        if not heads.softcap and sinks is None:
            mask = length**2 if windowed else 0
            out = _sdpa(tape, queries, keys, values, heads, count, length, mask, device)
        else:
            out = scores_attention(tape, queries, keys, values, heads, count, length, device, sinks)
        del queries, keys, values
        outputs.append(out)
    return tokens_first(tape, cat(tape, outputs, heads_first=True), heads)


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
    """Run torch's scaled_dot_product_attention; ``mask``: bytes of a boolean mask, 0 if it is causal without one."""
    # The CPU's kernels support neither dropout nor values of another width than the keys.
    if not device.is_gpu and (heads.dropout or heads.value_size != heads.size):
        return _sdpa_math(tape, q, k, v, heads, rows, length, mask)
    numbers = tape.new(mask, q.width) if mask else None
    pairs = rows * heads.queries * (length**2 if mask else length * (length + 1) // 2)
    sums = rows * heads.queries * length
    if device.is_gpu:
        workspace, backward_workspace = 0, _FP32 * sums * ((0 if q.width == _FP32 else heads.size) + 1)
    else:
        workspace = _flash_workspace(length, heads.size, q.width, device)
        backward_workspace = _flash_backward_room(length, q.width, device)
    size, numel = (heads.size + heads.value_size) // 2, sums * heads.value_size
    return _flash(tape, q, k, v, pairs, size, workspace, backward_workspace, sums, numbers, q.heads_first, numel)


def _sdpa_math(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: Heads, rows: int, length: int, mask: int) -> Tensor:
    """Run attention in single operations in fp32, as a CPU does with dropout."""
    width, count = q.width, rows * heads.queries
    numbers = tape.new(mask or length**2, width)
    one_view = heads.broadcast and rows == 1  # a view that products accept
    if heads.group > 1 and k.numel != q.numel and not one_view:
        k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
    q, k, v = (to(tape, x, _FP32) for x in (q, k, v))
    scores = product(tape, scale(tape, q), scale(tape, k), length, length, heads.size, count, rows)
    tape.launch("elementwise", scores.bytes + numbers.bytes, scores.bytes)
    weights = softmax(tape, scores)
    del scores
    weights = dropout(tape, weights, heads.dropout, fused=False)
    to(tape, weights.alias(), width)
    return to(tape, product(tape, weights, v, length, heads.value_size, length, count, rows), width)
