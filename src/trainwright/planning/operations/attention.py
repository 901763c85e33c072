"""Attention by the kernel that runs: within the sequences of a pack, or with a mask over padded rows.

The paths are those of models/attention and of transformers' sdpa and eager attention; the choice of torch's kernels
and their working memory follow aten/src/ATen/native/transformers.
"""

from __future__ import annotations

from dataclasses import replace

from trainwright.models.attention.kernels import AttentionKernel
from trainwright.planning.operations.elementary import (
    as_tensor,
    broadcast,
    cat,
    contiguous,
    dropout,
    from_result,
    mul,
    scale,
    slices,
    to,
    view,
)
from trainwright.planning.operations.launches import Kernel
from trainwright.planning.operations.layers import softmax
from trainwright.planning.operations.scores import ScoresAttention, product, repeat, tokens_first
from trainwright.planning.operations.shapes import Device
from trainwright.planning.operations.tape import Tape, Tensor

_FP32 = 4
# models/attention/cpu_flash.py: packs of shorter sequences are converted to fp32 for the CPU's flash kernel.
_BF16_FROM_LENGTH = 512
# Maximum number of sequences that are simulated one by one; more are grouped.
_MOST_SEQUENCES = 12


class Attention(ScoresAttention):
    """Attention by the kernel that models/attention/kernels.py and transformers choose."""

    def packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply models/attention/packs.py within each sequence of a pack. Returns [1, T, H, D]."""
        tape, heads = self.tape, self.heads
        kernel = heads.kernel(self.device, q.width, self.batch)
        size, value = kernel.widths(heads.size, heads.value_size)
        if (size, value) == (heads.size, heads.value_size):
            return self._by(kernel, q, k, v)
        # Padded with zeros, which are cut off again.
        q, k = (_widened(tape, x, heads.size, size) for x in (q, k))
        v = _widened(tape, v, heads.value_size, value)
        whole = replace(self, heads=replace(heads, size=size, value=value))._by(kernel, q, k, v)
        return contiguous(tape, slices(tape, whole, [self.batch.tokens * heads.queries * heads.value_size])[0])

    def _by(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run a kernel for the sequences of a pack."""
        if kernel.name == "flex":
            return view(self.tape, self._flex(q, k, v))
        if kernel.memory == "flash":
            return view(self.tape, self._varlen(kernel, q, k, v))
        if kernel.name == "cpu_flash":
            return view(self.tape, self._packed_flash(q, k, v))
        return self._each_sequence(q, k, v)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
        """Apply transformers' sdpa to padded rows. Returns [B, L, H, D].

        Args:
            masked: with a mask of bytes, else causal.
        """
        tape, heads, rows, length = self.tape, self.heads, self.batch.rows, self.batch.length
        mask = rows * length**2 if masked else 0
        if heads.broadcast:
            return tokens_first(tape, self._math(q, k, v, rows, length, mask), heads)
        if heads.group > 1 and (masked or (self.device.is_gpu and heads.size > 256)):
            k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
        out = self._sdpa(q, k, v, rows, length, mask)
        return tokens_first(tape, out, heads)

    def _packed_flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run the CPU's flash kernel on each sequence, as one operator."""
        heads, batch, device = self.heads, self.batch, self.device
        tokens, longest, before = batch.tokens, batch.longest, batch.second_longest
        work = _FP32 if longest < _BF16_FROM_LENGTH else q.width
        copied = q.numel + k.numel + v.numel if work != q.width else 0
        # The output of a sequence still exists while the next one runs; converted ones of equal length run at once.
        equal = copied and len({length for length, _ in batch.sequences}) == 1
        together = tokens if equal else longest + before
        of_token = heads.queries * (heads.size * work + _FP32)
        workspace = copied * work + together * of_token + _flash_workspace(longest, heads.size, work, device)
        copied += 2 * q.numel if copied else 0
        of_token = (heads.queries + 2 * heads.keys) * heads.size * work
        backward_workspace = copied * work + together * of_token + _flash_backward_room(longest, work, device)
        sums = heads.queries * tokens
        pairs = heads.queries * batch.pairs
        return _flash(self.tape, q, k, v, pairs, heads.size, workspace, backward_workspace + _FP32 * sums, sums)

    def _varlen(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run flash attention over all sequences of a pack.

        The backward pass accumulates gradients of queries in fp32, and those of keys and values for every query head.
        """
        heads, batch = self.heads, self.batch
        count = sum(number for _, number in batch.sequences)
        padded = batch.tokens + 128 * count
        rounded = -(-heads.size // 32) * 32
        sums = heads.queries * padded * _FP32
        expanded = 2 * batch.tokens * heads.queries * heads.size * q.width if heads.group > 1 else 0
        backward_workspace = sums * (rounded + 1) + expanded
        pairs, sums = heads.queries * batch.pairs, heads.queries * batch.tokens
        generation = kernel.generation
        return _flash(self.tape, q, k, v, pairs, heads.size, 0, backward_workspace, sums, generation=generation)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run flex_attention over all sequences of a pack; sinks scale its result."""
        tape, heads, batch = self.tape, self.heads, self.batch
        pairs, sums = heads.queries * batch.pairs, heads.queries * batch.tokens
        size, numel = (heads.size + heads.value_size) // 2, sums * heads.value_size
        out = _flash(tape, q, k, v, pairs, size, 0, 2 * _FP32 * sums, sums, numel=numel)
        if self.sinks is None:
            return out
        share = from_result(tape, broadcast(tape, as_tensor(tape, self.sinks, _FP32), sums))
        return mul(tape, out, to(tape, share, q.width))

    def _each_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run the general case: windows, dropout, soft caps, sinks, values of another width than keys."""
        tape, heads = self.tape, self.heads
        k, v = repeat(tape, k, heads.group), repeat(tape, v, heads.group)
        outputs = []
        for length, count in self.batch.each_sequence(_MOST_SEQUENCES):
            numel = count * length * heads.queries
            sizes = (heads.size, heads.size, heads.value_size)
            queries, keys, values = (slices(tape, x, [numel * n])[0] for x, n in zip((q, k, v), sizes, strict=True))
            windowed = heads.window is not None and length > heads.window
            if not heads.softcap and self.sinks is None:
                mask = length**2 if windowed else 0
                out = self._sdpa(queries, keys, values, count, length, mask)
            else:
                out = self.single_operations(queries, keys, values, count, length)
            del queries, keys, values
            outputs.append(out)
        return tokens_first(tape, cat(tape, outputs, heads_first=True), heads)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, rows: int, length: int, mask: int) -> Tensor:
        """Run torch's scaled_dot_product_attention.

        Args:
            mask: bytes of a boolean mask, 0 if it is causal without one.
        """
        tape, heads, device = self.tape, self.heads, self.device
        # The CPU's kernels support neither dropout nor values of another width than the keys.
        on_cpu = not device.is_gpu and (heads.dropout or heads.value_size != heads.size)
        if on_cpu or (q.width < _FP32 and not device.fuses):
            return self._math(q, k, v, rows, length, mask)
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

    def _math(self, q: Tensor, k: Tensor, v: Tensor, rows: int, length: int, mask: int) -> Tensor:
        """Run attention in single operations in fp32, as a CPU does with dropout."""
        tape, heads = self.tape, self.heads
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


def _attend(tape: Tape, inputs: int, out: int, pairs: int, size: int, products: int, generation: int) -> None:
    """Record an attention kernel: ``products`` matrix products over the pairs of all heads."""
    flops = 2 * products * pairs * size
    tape.kernels.append(Kernel(tape.operation, "attention", inputs, out, flops, generation=generation))


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
    generation: int = 2,
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
        _attend(tape, q.bytes + k.bytes + v.bytes + masked, made[0].bytes, pairs, size, 2, generation)
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
            _attend(tape, read + grad.bytes, sum(sizes) * width, pairs, size, 5, generation)
            return made

        tape.record([out, logarithms], [q, k, v], apply)
    return out


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


def _widened(tape: Tape, x: Tensor, size: int, width: int) -> Tensor:
    return x if size == width else cat(tape, [x, tape.new(x.numel // size * (width - size), x.width)])
