"""The fused kernels in Triton: each reads its inputs and writes its outputs once, and computes in fp32 between them.

They are launched by ``operators``. The loss follows the online softmax (arXiv 1805.02867, algorithm 3).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Compute tanh to fp32 rounding: near 0 by its series, as the difference of exponentials cancels there."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    small = tl.exp(-2 * tl.abs(x))
    far = (1 - small) / (1 + small)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def _finish_logits(x, softcap, logit_scale, CAPPED: tl.constexpr):
    x = x * logit_scale
    if CAPPED:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def cross_entropy(
    logits,
    targets,
    weights,
    losses,
    correct,
    row_stride,
    softcap,
    logit_scale,
    z_loss,
    smoothing,
    VOCABULARY: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of a row of logits; overwrite the row with its gradient, or note whether the target is largest.

    ``weights`` are read if WEIGHTED, ``correct`` is written if not GRADIENT.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    target_logit = _finish_logits(tl.load(logits + target).to(tl.float32), softcap, logit_scale, CAPPED)
    largest = -float("inf")
    total = 0.0
    mean = 0.0
    better = 0
    for begin in range(0, VOCABULARY, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < VOCABULARY
        x = _finish_logits(
            tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32), softcap, logit_scale, CAPPED
        )
        if SMOOTHED:
            mean += tl.sum(tl.where(inside, x, 0.0), 0)
        x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
        if not GRADIENT:  # of equal logits the first is the prediction
            ahead = (x > target_logit) | ((x == target_logit) & (columns < target))
            better += tl.sum(tl.where(ahead & inside, 1, 0), 0)
    log_sum = largest + tl.log(total)
    loss = log_sum - target_logit
    if SMOOTHED:
        loss = log_sum - (1 - smoothing) * target_logit - smoothing * (mean / VOCABULARY)
    loss += z_loss * log_sum * log_sum
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    tl.store(losses + row, loss * weight)
    if GRADIENT:
        tl.debug_barrier()  # all threads have read the target's logit
        scale = (1 + 2 * z_loss * log_sum) / total
        for begin in range(0, VOCABULARY, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            raw = tl.load(logits + columns, mask=inside, other=0.0)
            x = _finish_logits(raw.to(tl.float32), softcap, logit_scale, CAPPED)
            slope = tl.exp(x - largest) * scale
            slope -= tl.where(columns == target, 1 - smoothing, 0.0)
            if SMOOTHED:
                slope -= smoothing / VOCABULARY
            if CAPPED:
                ratio = x / softcap
                slope *= 1 - ratio * ratio
            slope *= logit_scale * weight
            tl.store(logits + columns, slope.to(raw.dtype), mask=inside)
    else:
        tl.store(correct + row, better == 0)


@triton.jit
def rms_norm(
    inputs,
    residual,
    weight,
    total,
    out,
    inverses,
    width,
    eps,
    ADDED: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the root-mean-square norm of a row, and keep the inverse of its root mean square.

    ADDED: the row is ``inputs`` and ``residual`` added, which is stored in ``total``. ROUNDED: normalized numbers are
    rounded to the dtype of ``inputs`` before they are multiplied. OFFSET: 1 is added to ``weight``.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    raw = tl.load(inputs + row * width + columns, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(residual + row * width + columns, mask=inside, other=0.0)
        raw = (raw.to(tl.float32) + more.to(tl.float32)).to(raw.dtype)
        tl.store(total + row * width + columns, raw, mask=inside)
    x = raw.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(inverses + row, inverse)
    normal = x * inverse
    if ROUNDED:
        normal = normal.to(raw.dtype).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        factors += 1
    tl.store(out + row * width + columns, (normal * factors).to(raw.dtype), mask=inside)


@triton.jit
def rms_norm_backward(
    gradient,
    inputs,
    weight,
    inverses,
    of_total,
    of_inputs,
    of_weight,
    rows,
    width,
    ADDED: tl.constexpr,
    OFFSET: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of some rows, and their part of that of the weight (fp32).

    ADDED: those of the rows have another part, ``of_total``.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        factors += 1
    part = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(PER_PROGRAM):
        row = program * PER_PROGRAM + number
        present = inside & (row < rows)
        raw = tl.load(inputs + row * width + columns, mask=present, other=0.0)
        slope = tl.load(gradient + row * width + columns, mask=present, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        normal = raw.to(tl.float32) * inverse
        part += slope * normal
        slope *= factors
        result = inverse * (slope - normal * (tl.sum(slope * normal, 0) / width))
        if ADDED:
            result += tl.load(of_total + row * width + columns, mask=present, other=0.0).to(tl.float32)
        tl.store(of_inputs + row * width + columns, result.to(raw.dtype), mask=present)
    tl.store(of_weight + program * width + columns, part, mask=inside)


@triton.jit
def _activate(x, SILU: tl.constexpr):
    """Return SiLU, or GELU by its tanh formula, and its derivative."""
    if SILU:
        chance = 1 / (1 + tl.exp(-x))
        return x * chance, chance * (1 + x * (1 - chance))
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, without the cancellation of the sum.
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    chance = 1 / (1 + tl.exp(-inner))
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    return x * chance, chance * (1 + x * (1 - chance) * slope)


@triton.jit
def gated(gate, up, out, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``act(gate) * up``; the activation is rounded to the dtype before, as without fusion."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    raw = tl.load(gate + index, mask=inside, other=0.0)
    active, _ = _activate(raw.to(tl.float32), SILU)
    up_value = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, (active.to(raw.dtype).to(tl.float32) * up_value).to(raw.dtype), mask=inside)


@triton.jit
def gated_backward(gradient, gate, up, of_gate, of_up, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute both gradients of ``act(gate) * up`` from its inputs."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    raw = tl.load(gate + index, mask=inside, other=0.0)
    slope = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32)
    up_value = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    active, derivative = _activate(raw.to(tl.float32), SILU)
    tl.store(of_gate + index, (slope * up_value * derivative).to(raw.dtype), mask=inside)
    tl.store(of_up + index, (slope * active).to(raw.dtype), mask=inside)


@triton.jit
def _rotate_heads(
    inputs,
    out,
    cos,
    sin,
    row,
    position,
    heads,
    strides,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate all heads of a token: channel i with channel i + ROTATED / 2. Channels after ROTATED are copied."""
    batch_in, head_in, token_in, batch_out, head_out, token_out = strides
    inputs += row * batch_in + position * token_in
    out += row * batch_out + position * token_out
    numbers = tl.arange(0, HEADS)[:, None]
    channels = tl.arange(0, HALF)[None, :]
    inside = (numbers < heads) & (channels < ROTATED // 2)
    first = tl.load(inputs + numbers * head_in + channels, mask=inside, other=0.0)
    second = tl.load(inputs + numbers * head_in + channels + ROTATED // 2, mask=inside, other=0.0)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    paired = channels < ROTATED // 2
    cos_first = tl.load(cos + channels, mask=paired, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + channels + ROTATED // 2, mask=paired, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + channels, mask=paired, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + channels + ROTATED // 2, mask=paired, other=0.0).to(tl.float32)
    if INVERSE:
        sin_first, sin_second = -sin_second, -sin_first
    tl.store(out + numbers * head_out + channels, (first * cos_first - second * sin_first).to(kind), mask=inside)
    rotated_second = (second * cos_second + first * sin_second).to(kind)
    tl.store(out + numbers * head_out + channels + ROTATED // 2, rotated_second, mask=inside)
    if SIZE > ROTATED:
        rest = ROTATED + tl.arange(0, REST)[None, :]
        inside = (numbers < heads) & (rest < SIZE)
        rest_values = tl.load(inputs + numbers * head_in + rest, mask=inside, other=0.0)
        tl.store(out + numbers * head_out + rest, rest_values, mask=inside)


@triton.jit
def rotary(
    query,
    key,
    query_out,
    key_out,
    cos,
    sin,
    tokens,
    cos_batch,
    cos_token,
    query_heads,
    key_heads,
    query_strides,
    key_strides,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate the queries and keys of a token by its position, or back if INVERSE."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // tokens, token % tokens
    cos += row * cos_batch + position * cos_token
    sin += row * cos_batch + position * cos_token
    _rotate_heads(
        query, query_out, cos, sin, row, position, query_heads, query_strides,
        QUERY_HEADS, SIZE, ROTATED, HALF, REST, INVERSE,
    )  # fmt: skip
    _rotate_heads(
        key, key_out, cos, sin, row, position, key_heads, key_strides,
        KEY_HEADS, SIZE, ROTATED, HALF, REST, INVERSE,
    )  # fmt: skip
