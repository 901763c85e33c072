"""Attention within each document of a flat pack, as an attention implementation for ``transformers``.

With the implementation ``DOCUMENTS``, a model passes queries, keys and values of a whole pack with the document
boundaries (``cu_seq_lens_q``). Tokens do not attend to other documents, and no mask over the pack is created. On a GPU
this is one variable-length flash attention kernel; on a CPU the flash kernel runs per document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

DOCUMENTS = "trainwright_documents"

# Measured on AVX-512 with bf16 units: below this length the backward pass of the CPU's bf16 flash kernel is slower than
# converting the pack to fp32 (100 tokens: 2.1 ms against 0.9; 1,024 tokens: 38 against 45).
BF16_FROM_LENGTH = 512


class UnpackableError(ValueError):
    """The architecture cannot be trained on packs."""


def register() -> None:
    """Register ``DOCUMENTS`` with transformers, without a mask. Can be called more than once."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(DOCUMENTS, document_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(DOCUMENTS, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of ``query`` [1, H, T, D] with ``key``, ``value`` [1, Hkv, T, D] within each document.

    Returns:
        ``(output [1, T, H, D], None)``, as required by transformers.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise UnpackableError(f"{type(module).__name__} does not know where packed documents begin")
    if kwargs.get("position_bias") is not None or is_causal is False:
        raise UnpackableError(f"{type(module).__name__} needs an attention that packed training does not have")
    chunk = _chunk_of(module)
    if chunk is not None and chunk < max_length_q:
        cu_seq_lens_q, max_length_q = _in_chunks(cu_seq_lens_q, chunk), chunk
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    plain = not dropout and softcap is None and s_aux is None
    flash = not query.is_cuda and query.shape[-1] == value.shape[-1]
    # Converted inputs differ from those saved for the backward pass, which needs a custom operator.
    converted = query.dtype != torch.float32 and max_length_q < BF16_FROM_LENGTH
    equal = _are_equal(query, cu_seq_lens_q, max_length_q)
    if query.is_cuda and plain and query.dtype in (torch.bfloat16, torch.float16):
        output = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scale, window)
    elif plain and window is None and equal and not (converted and flash):
        output = _equal_documents(query, key, value, max_length_q, scale)
    elif plain and window is None and flash:
        output = _flash_cpu(query, key, value, cu_seq_lens_q, scale, max_length_q)[0].transpose(1, 2)
    else:
        output = _each_document(query, key, value, cu_seq_lens_q, scale, window, dropout, softcap, s_aux)
    return output, None


def _chunk_of(module: torch.nn.Module) -> int | None:
    """Return the chunk size of a layer of Llama 4, whose chunks of a document do not attend to each other, or None."""
    config: Any = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return size if kinds is not None and layer is not None and kinds[layer] == "chunked_attention" else None


def _in_chunks(boundaries: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return document boundaries with a cut after every ``chunk`` tokens."""
    edges = boundaries.tolist()
    cut = [place for begin, end in itertools.pairwise(edges) for place in range(begin, end, chunk)]
    return boundaries.new_tensor([*cut, edges[-1]])


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Run one kernel over all documents (CUDA)."""
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernel needs values as wide as keys (narrower in multi-head latent attention)
        value = F.pad(value, (0, query.shape[-1] - width))
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        # The window of transformers includes the current token; that of flash attention does not.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output[None, ..., :width]


def _are_equal(query: torch.Tensor, boundaries: torch.Tensor, longest: int) -> bool:
    """Return whether there are several documents of equal length, without reading the boundaries."""
    documents = boundaries.shape[0] - 1
    return documents > 1 and documents * longest == query.shape[2]


def _equal_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """Compute documents of equal length as a batch, such as contiguous windows."""
    kind = query.dtype
    # Not x[0]: the gradient of indexing is a zero tensor with the rest copied into it.
    parts = [x.squeeze(0).unflatten(1, (-1, length)).transpose(0, 1) for x in (query, key, value)]
    q, k, v = parts if query.is_cuda else _working(length, *parts)
    output = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)[None].to(kind)


def _each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
    window: int | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the general case with plain operations: dropout, sliding windows, softcapping, attention sinks."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    outputs = []
    edges = boundaries.tolist()
    for begin, end in itertools.pairwise(edges):
        q, k, v = query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end]
        allowed = _causal(end - begin, window, query.device)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=allowed is None, scale=scale
            )
        else:
            out = _scores_attention(q, k, v, allowed, scale, dropout, softcap, sinks)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of allowed positions [length, length], or None for plain causal attention."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _scores_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    length = query.shape[2]
    scores = (query @ key.transpose(-1, -2) * scale).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed is None:
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, length, 1).float()], dim=-1)
    weights = scores.softmax(-1)[..., :length].to(value.dtype)
    return F.dropout(weights, dropout) @ value


@torch.library.custom_op("trainwright::document_flash_cpu", mutates_args=())
def _flash_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the CPU flash kernel per document, or once for documents of equal length.

    A custom operator instead of a loop in the model: torch.compile does not break the graph at it, and autograd records
    one node.

    Returns:
        Output [1, H, T, D] and log-sum-exp [1, H, T].
    """
    output, logsumexp = _empty_output(query, value)
    query, key, value = _working(longest, query, key, value)
    edges = boundaries.tolist()
    wholes = (query, key, value, output, logsumexp)
    for q, k, v, *room in zip(*(_by_document(whole, edges) for whole in wholes), strict=True):
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        for part, piece in zip(room, made, strict=True):
            part.copy_(piece)
    return output, logsumexp


def _by_document(whole: torch.Tensor, edges: list[int]) -> Iterator[torch.Tensor]:
    """Yield views [1, H, L, ...] of each document in ``whole`` [1, H, T, ...], or one view [D, H, L, ...] if equal."""
    lengths = {end - begin for begin, end in itertools.pairwise(edges)}
    if len(lengths) == 1:
        yield whole[0].unflatten(1, (-1, lengths.pop())).transpose(0, 1)
    else:
        yield from (whole[:, :, begin:end] for begin, end in itertools.pairwise(edges))


def _empty_output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


_flash_cpu.register_fake(lambda query, key, value, *_: _empty_output(query, value))


@torch.library.custom_op("trainwright::document_flash_cpu_backward", mutates_args=())
def _flash_cpu_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    boundaries: torch.Tensor,
    scale: float,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = _empty_grads(query, key, value)
    grad, query, key, value, output = _working(longest, grad, query, key, value, output)
    edges = boundaries.tolist()
    wholes = (grad, query, key, value, output, logsumexp, *grads)
    for *inputs, to_query, to_key, to_value in zip(*(_by_document(whole, edges) for whole in wholes), strict=True):
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True, scale=scale)
        for part, piece in zip((to_query, to_key, to_value), made, strict=True):
            part.copy_(piece)
    return grads


def _empty_grads(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate gradients in the memory order [1, T, H, D] that the projections around attention use."""
    query, key, value = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in tensors)
    return query, key, value


_flash_cpu_backward.register_fake(lambda grad, query, key, value, *_: _empty_grads(query, key, value))


def _working(longest: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.float() for x in tensors) if longest < BF16_FROM_LENGTH else tensors


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, boundaries, ctx.scale, ctx.longest = inputs
    ctx.save_for_backward(query, key, value, boundaries, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, boundaries, output, logsumexp = ctx.saved_tensors
    grads = _flash_cpu_backward(grad, query, key, value, output, logsumexp, boundaries, ctx.scale, ctx.longest)
    return (*grads, None, None, None)


_flash_cpu.register_autograd(_backward, setup_context=_save_for_backward)
