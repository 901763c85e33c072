"""Attention of a pack sequence by sequence, with torch's scaled_dot_product_attention or plain operations."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from trainwright.models.attention.cpu_flash import working
from trainwright.models.attention.sequences import Call, Sequences


def are_equal(call: Call) -> bool:
    """Return whether there are several sequences of equal length, without reading the boundaries."""
    sequences = call.boundaries.shape[0] - 1
    return sequences > 1 and sequences * call.longest == call.query.shape[2]


def equal_sequences(call: Call) -> torch.Tensor:
    """Compute sequences of equal length as a batch, such as contiguous windows."""
    query, length = call.query, call.longest
    # On a GPU, heads of keys are repeated: torch's memory-efficient kernel takes no groups, and without it all scores
    # would be stored (can_use_mem_efficient_attention in sdp_utils.cpp).
    key, value = _repeated(call) if (query.is_cuda or query.is_xpu) and call.grouped else (call.key, call.value)
    # Not x[0]: the gradient of indexing is a zero tensor with the rest copied into it.
    parts = [x.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value)]
    q, k, v = parts if query.is_cuda or query.is_xpu else working(length, *parts)
    grouped = k.shape[1] != q.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=grouped)
    return output.transpose(1, 2).flatten(0, 1)[None].to(query.dtype)


def _repeated(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with as many heads as the queries."""
    group = call.query.shape[1] // call.key.shape[1]
    return call.key.repeat_interleave(group, dim=1), call.value.repeat_interleave(group, dim=1)


def each_sequence(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Compute the general case: dropout, sliding windows, softcapping, attention sinks."""
    edges = call.boundaries.tolist() if sequences is None else sequences.edges
    query, (key, value) = call.query, _repeated(call)
    outputs = []
    for begin, end in itertools.pairwise(edges):
        q, k, v = query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end]
        allowed = _causal(end - begin, call.window, query.device)
        if call.softcap is None and call.sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=call.dropout, is_causal=allowed is None, scale=call.scale
            )
        else:
            out = _scores_attention(call, q, k, v, allowed)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of allowed positions [length, length], or None for plain causal attention."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _scores_attention(
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
