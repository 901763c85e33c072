"""A gated delta net in torch operations, as transformers computes it without external kernels.

It computes in fp32 and in chunks of 64 tokens (models/qwen3_next: torch_chunk_gated_delta_rule).
"""

from __future__ import annotations

from trainwright.planning.architectures.architecture import Architecture, DeltaNet
from trainwright.planning.operations.elementary import (
    add,
    as_tensor,
    cat,
    contiguous,
    from_input,
    from_result,
    mul,
    neg,
    plus,
    scale,
    slices,
    split,
    to,
    view,
)
from trainwright.planning.operations.layers import normalized, project, rms_norm
from trainwright.planning.operations.scores import product, repeat
from trainwright.planning.operations.shapes import BatchShape
from trainwright.planning.operations.tape import Tape, Tensor
from trainwright.planning.operations.weights import ModelWeights

_FP32 = 4
_CHUNK = 64


def delta_net(
    tape: Tape, a: Architecture, delta: DeltaNet, hidden: Tensor, weights: ModelWeights, batch: BatchShape
) -> Tensor:
    """Apply the layer that replaces attention, including the output matrix."""
    tokens, heads = batch.tokens, delta.value_heads
    tape.operation = "delta.in"
    mixed = project(tape, hidden, weights, "delta.in")
    rates = project(tape, hidden, weights, "delta.rates")
    query, key, value, z = split(
        tape, mixed, [tokens * n for n in (delta.keys, delta.keys, delta.values, delta.values)]
    )
    write, decay = split(tape, rates, [tokens * heads] * 2)
    value, z, write, decay = (contiguous(tape, x) for x in (value, z, write, decay))
    query, key = contiguous(tape, query), contiguous(tape, key)
    del mixed, rates
    tape.operation = "delta.convolution"
    joined = _convolved(tape, cat(tape, [query, key, value]), weights)
    query, key, value = split(tape, joined, [tokens * n for n in (delta.keys, delta.keys, delta.values)])
    del joined
    tape.operation = "delta"
    write = from_result(tape, write)
    steps = from_input(tape, add(tape, to(tape, decay, _FP32), weights["delta.steps"]))
    speed = neg(tape, from_result(tape, as_tensor(tape, weights["delta.decay"], _FP32)))
    out = _rule(tape, delta, query, key, value, write, mul(tape, steps, speed), batch)
    del query, key, value, write, steps, decay, speed
    tape.operation = "delta.norm"
    normed = rms_norm(tape, out, weights["delta.norm"], tokens * heads)
    gated = to(tape, mul(tape, to(tape, normed, _FP32), from_input(tape, to(tape, z, _FP32))), hidden.width)
    del out, normed, z
    tape.operation = "output"
    return project(tape, gated, weights, "output")


def _convolved(tape: Tape, x: Tensor, weights: ModelWeights) -> Tensor:
    """Apply a causal convolution to each channel, and silu."""
    weight = weights["delta.convolution"]
    made = mul(tape, x, as_tensor(tape, weight, x.width))
    return from_input(tape, made)


def _rule(
    tape: Tape,
    delta: DeltaNet,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    write: Tensor,
    decay: Tensor,
    batch: BatchShape,
) -> Tensor:
    width, heads = query.width, delta.value_heads
    chunks = -(-batch.length // _CHUNK)
    count, rows = batch.rows * heads * chunks, batch.rows * chunks * _CHUNK * heads
    if heads != delta.key_heads:
        query, key = (repeat(tape, x, heads // delta.key_heads) for x in (query, key))
    query, key, value, write, decay = (to(tape, contiguous(tape, x), _FP32) for x in (query, key, value, write, decay))
    query, key = scale(tape, normalized(tape, query, rows)), normalized(tape, key, rows)
    written_values, written_keys = mul(tape, value, write), mul(tape, key, write)
    total = plus(tape, decay, 0)  # the cumulative sum up to each token
    pairs = _between(tape, total, count)
    system = mul(tape, product(tape, written_keys, key, _CHUNK, _CHUNK, delta.key_dim, count, 1), pairs)
    within = mul(tape, product(tape, query, key, _CHUNK, _CHUNK, delta.key_dim, count, 1), pairs)
    grown = from_result(tape, total)
    values = product(tape, system, written_values, _CHUNK, delta.value_dim, _CHUNK, count, 1)
    keys = product(tape, system, mul(tape, written_keys, grown), _CHUNK, delta.key_dim, _CHUNK, count, 1)
    query, key = mul(tape, query, grown), mul(tape, key, from_result(tape, neg(tape, total)))
    del pairs, system, written_keys, written_values
    made = _scan(tape, delta, query, key, values, keys, within, batch.rows * heads, chunks)
    return contiguous(tape, to(tape, slices(tape, made, [batch.tokens * delta.values])[0], width))


def _scan(
    tape: Tape,
    delta: DeltaNet,
    query: Tensor,
    key: Tensor,
    values: Tensor,
    keys: Tensor,
    within: Tensor,
    count: int,
    chunks: int,
) -> Tensor:
    """Run the chunks in order; each passes a state to the next."""
    k, v = delta.key_dim, delta.value_dim
    state, made = tape.new(count * k * v, _FP32), []
    for _ in range(chunks):
        q, k_part, old = (view(tape, x, count * _CHUNK * k) for x in (query, key, keys))
        new = add(
            tape, view(tape, values, count * _CHUNK * v), neg(tape, product(tape, old, state, _CHUNK, v, k, count, 1))
        )
        inside = product(tape, view(tape, within, count * _CHUNK**2), new, _CHUNK, v, _CHUNK, count, 1)
        made.append(add(tape, product(tape, q, state, _CHUNK, v, k, count, 1), inside))
        update = product(tape, k_part, new, k, v, _CHUNK, count, 1)
        state = add(tape, scale(tape, state), update)
    return cat(tape, made)


def _between(tape: Tape, total: Tensor, count: int) -> Tensor:
    """Return the decay from each token to each later one of its chunk."""
    spread = repeat(tape, total, _CHUNK)
    masked = plus(tape, spread, count * _CHUNK**2)
    return from_result(tape, masked)
