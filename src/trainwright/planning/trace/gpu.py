"""What differs on a GPU: traces run on tensors that say they are on a CPU, with stand-ins for a GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from trainwright.models.attention.kernels import AttentionNeeds, choose
from trainwright.models.attention.packs import DTYPES, PackArguments, call_of, sequence_by_sequence, varlen
from trainwright.models.attention.plain import are_equal
from trainwright.models.causal_lm import CausalLM
from trainwright.planning.trace.request import Device

_NAME = "trainwright_traced"


def attend_as_on_gpu(lm: CausalLM, device: Device) -> None:
    """Let the layers of a model that is trained on packs use the stand-ins."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, partial(_attention, device=device))
    lm.model.set_attn_implementation(_NAME)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    device: Device,
    **arguments: Unpack[PackArguments],
) -> tuple[torch.Tensor, None]:
    """Compute what ``packs.packed_attention`` does on the device: flash kernels allocate and keep the same."""
    call, sequences = call_of(module, query, key, value, arguments)
    needs = AttentionNeeds(
        query.shape[-1],
        value.shape[-1],
        DTYPES.get(query.dtype, "fp32"),
        softcap=call.softcap is not None,
        sinks=call.sinks is not None,
        dropout=bool(call.dropout),
        window=call.window is not None,
        deterministic=device.deterministic,
    )
    kernel = choose(needs, device.limits).kernel
    if kernel.memory == "sequences" and call.grouped and call.is_plain and are_equal(call):  # see equal_sequences
        group = query.shape[1] // key.shape[1]
        call = call._replace(key=key.repeat_interleave(group, dim=1), value=value.repeat_interleave(group, dim=1))
    padded = call.padded(*kernel.widths(query.shape[-1], value.shape[-1]))
    compute = varlen if kernel.memory == "flash" else sequence_by_sequence
    return call.cut(compute(padded, sequences)), None


def workspace_on_gpu(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a GPU's attention kernels allocate beside their results: queries' gradients in fp32."""
    name = func.overloadpacket.__name__
    if "backward" not in name or ("attention" not in name and "attn" not in name):
        return 0
    query, key = args[1:3]
    if "varlen" in name:  # of [T, H, D]; keys' gradients for every head of the queries
        tokens, heads, size = query.shape
        sums = 4 * heads * (tokens + 128 * _SEQUENCES)
        expanded = 2 * query.nbytes if key.shape[1] != heads else 0
        return int(sums * (-(-size // 32) * 32 + 1) + expanded)
    rows = query.numel() // query.shape[-1]
    return int(4 * rows * (1 if query.element_size() == 4 else 1 + query.shape[-1]))


_SEQUENCES = 3  # of a traced pack


@contextmanager
def functions_as_on_gpu() -> Iterator[None]:
    """Let dropout be one operation that keeps a mask of bytes, and let attention be fused where a GPU's is.

    A GPU's fused attention keeps a seed for its dropout, and takes values that are narrower than keys; that of a CPU
    takes neither.
    """
    before = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, training)[0] if p and training else input

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any
    ) -> torch.Tensor:
        width = value.shape[-1]
        if width < query.shape[-1]:
            query, key = query[..., :width], key[..., :width]
        return before[1](query, key, value, *args, **kwargs)

    nn.functional.dropout, nn.functional.scaled_dot_product_attention = dropout, attention
    try:
        yield
    finally:
        nn.functional.dropout, nn.functional.scaled_dot_product_attention = before
