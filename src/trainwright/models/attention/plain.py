"""Attention of a pack sequence by sequence: by torch's scaled_dot_product_attention or plain operations.

On a CPU also by its flash kernel, as one operator for all sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from trainwright.machine.processor import detect_processor
from trainwright.models.attention.sequences import Call, Sequences
from trainwright.parallel.constants import BF16_FROM_LENGTH


def are_equal(call: Call) -> bool:
    """Return whether there are several sequences of equal length, without reading the boundaries."""
    sequences = call.boundaries.shape[0] - 1
    return sequences > 1 and sequences * call.longest == call.query.shape[2]


def attend_equal_sequences(call: Call) -> torch.Tensor:
    """Compute sequences of equal length as a batch, such as contiguous windows."""
    query, length = call.query, call.longest
    # On a GPU, heads of keys are repeated: torch's memory-efficient kernel takes no groups, and without it all scores
    # would be stored (can_use_mem_efficient_attention in sdp_utils.cpp).
    key, value = (
        _repeat_key_values(call) if (query.is_cuda or query.is_xpu) and call.grouped else (call.key, call.value)
    )
    # Not x[0]: the gradient of indexing is a zero tensor with the rest copied into it.
    parts = [x.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value)]
    q, k, v = parts if query.is_cuda or query.is_xpu else upcast_short(length, BF16_FROM_LENGTH, *parts)
    grouped = k.shape[1] != q.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=grouped)
    return output.transpose(1, 2).flatten(0, 1)[None].to(query.dtype)


def _repeat_key_values(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with as many heads as the queries."""
    group = call.query.shape[1] // call.key.shape[1]
    return call.key.repeat_interleave(group, dim=1), call.value.repeat_interleave(group, dim=1)


def attend_each_sequence(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Compute the general case: dropout, sliding windows, softcapping, attention sinks."""
    edges = call.boundaries.tolist() if sequences is None else sequences.edges
    query, (key, value) = call.query, _repeat_key_values(call)
    outputs = []
    for begin, end in itertools.pairwise(edges):
        q, k, v = query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end]
        mask = _build_causal_mask(end - begin, call.window, query.device)
        if call.softcap is None and call.sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=call.dropout, is_causal=mask is None, scale=call.scale
            )
        else:
            out = _attend_by_scores(call, q, k, v, mask)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _build_causal_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of allowed positions [length, length], or None for plain causal attention."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _attend_by_scores(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
) -> torch.Tensor:
    length = query.shape[2]
    scores = (query @ key.transpose(-1, -2) * call.scale).float()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if allowed is None:
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.view(1, -1, 1, 1).expand(1, -1, length, 1).float()], dim=-1)
    weights = scores.softmax(-1)[..., :length].to(value.dtype)
    return F.dropout(weights, call.dropout) @ value


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the CPU flash kernel per sequence, or once for sequences of equal length.

    Returns:
        Output [1, H, T, D] and log-sum-exp [1, H, T].
    """
    output, logsumexp = _allocate_output(query, value)
    edges, tensors = boundaries.tolist(), (query, key, value, output, logsumexp)
    for q, k, v, *room in zip(*(_iterate_by_sequence(tensor, edges) for tensor in tensors), strict=True):
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        for part, piece in zip(room, results, strict=True):
            part.copy_(piece)
    return output, logsumexp


def _find_longest(edges: list[int]) -> int:
    return max(end - begin for begin, end in itertools.pairwise(edges))


def _iterate_by_sequence(tensor: torch.Tensor, edges: list[int]) -> Iterator[torch.Tensor]:
    """Yield views [1, H, L, ...] of each sequence in ``tensor`` [1, H, T, ...], or one view [D, H, L, ...] if equal."""
    lengths = {end - begin for begin, end in itertools.pairwise(edges)}
    if len(lengths) == 1:
        yield tensor[0].unflatten(1, (-1, lengths.pop())).transpose(0, 1)
    else:
        yield from (tensor[:, :, begin:end] for begin, end in itertools.pairwise(edges))


def _allocate_output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


# A custom operator instead of a loop in the model: torch.compile does not break the graph at it, and autograd records
# one node.
flash_cpu = torch.library.custom_op("trainwright::packed_flash_cpu", flash_forward, mutates_args=())
flash_cpu.register_fake(lambda query, key, value, *_: _allocate_output(query, value))


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``query``, ``key`` and ``value``, of their shapes."""
    return backward_from(choose_least_bf16_length(), grad, query, key, value, output, logsumexp, boundaries, scale)


@cache
def choose_least_bf16_length() -> int:
    """Return the length from which this processor's backward pass is faster in bf16."""
    return BF16_FROM_LENGTH if detect_processor().has_amx else 2**62


def backward_from(
    least: int,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients, computed in fp32 if no sequence has ``least`` tokens."""
    grads = _allocate_grads(query, key, value)
    edges = boundaries.tolist()
    grad, query, key, value, output = upcast_short(_find_longest(edges), least, grad, query, key, value, output)
    tensors = (grad, query, key, value, output, logsumexp, *grads)
    for *inputs, to_query, to_key, to_value in zip(
        *(_iterate_by_sequence(tensor, edges) for tensor in tensors), strict=True
    ):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True, scale=scale)
        for part, piece in zip((to_query, to_key, to_value), gradients, strict=True):
            part.copy_(piece)
    return grads


def _allocate_grads(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate gradients in the memory order [1, T, H, D] that the projections around attention use."""
    query, key, value = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in tensors)
    return query, key, value


_flash_cpu_backward = torch.library.custom_op("trainwright::packed_flash_cpu_backward", flash_backward, mutates_args=())
_flash_cpu_backward.register_fake(lambda grad, query, key, value, *_: _allocate_grads(query, key, value))


def upcast_short(longest: int, least: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors in fp32 if ``longest`` is below ``least``."""
    return tuple(x.float() for x in tensors) if longest < least else tensors


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, boundaries, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, boundaries, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, boundaries, output, logsumexp = ctx.saved_tensors
    grads = _flash_cpu_backward(grad, query, key, value, output, logsumexp, boundaries, ctx.scale)
    return (*grads, None, None)


flash_cpu.register_autograd(_backward, setup_context=_save_for_backward)
