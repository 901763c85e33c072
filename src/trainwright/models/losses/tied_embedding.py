"""Compute one gradient for an embedding that is tied to the head.

Autograd creates a gradient for each use, both as large as the vocabulary, and adds them: for SmolLM2, 113 MB of zeros
except for the rows of tokens in the batch. Here those rows are added to the gradient of the head in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn


@contextmanager
def shared_gradient(embedding: nn.Module, head: nn.Module) -> Iterator[Callable[[], torch.Tensor]]:
    """Patch ``embedding`` while a model runs it; provide a function that returns the weight for its head afterwards.

    Only applies on a CPU, where rows are added in the order of the tokens, in fp32 or higher, where this is as exact as
    a separate sum, and if no quantization or sharding has changed the modules.
    """
    if not _applies(embedding, head):
        # Read when it is used: a sharding strategy may gather it until then.
        yield lambda: cast(torch.Tensor, head.weight)
        return
    assert isinstance(embedding, nn.Embedding)
    of_head: list[torch.Tensor] = [embedding.weight]

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor
        hidden, of_head[0] = _Lookup.apply(embedding.weight, tokens, embedding.padding_idx)
        return hidden

    embedding.forward = forward  # type: ignore[assignment, method-assign]
    try:
        yield lambda: of_head[0]
    finally:
        del embedding.forward


def _applies(embedding: nn.Module, head: nn.Module) -> bool:
    if type(embedding) is not nn.Embedding or "forward" in vars(embedding) or not torch.is_grad_enabled():
        return False
    if embedding._forward_pre_hooks or embedding._forward_hooks:
        return False
    if embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse:
        return False
    weight = embedding.weight
    exact = weight.dtype in (torch.float32, torch.float64)
    return head.weight is weight and weight.requires_grad and weight.device.type == "cpu" and exact


class _Lookup(torch.autograd.Function):
    """Look up rows of a weight [V, H] for tokens [...]; also return the weight for a later use."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, tokens: torch.Tensor, padding: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tokens)
        ctx.padding = padding
        return nn.functional.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, of_rows: torch.Tensor, of_weight: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        tokens, of_rows = tokens.reshape(-1), of_rows.reshape(-1, of_rows.shape[-1])
        if ctx.padding is not None:  # padding has no gradient, as in nn.Embedding
            kept = tokens != ctx.padding
            tokens, of_rows = tokens[kept], of_rows[kept]
        return of_weight.index_add_(0, tokens, of_rows), None, None
