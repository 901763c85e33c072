"""The kernels of a simulated GPU: those that are assumed to be installed, and what they refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Builds of torch for CPUs have no CUDA kernel of these, and so take them apart into several operations, whose results
# no GPU holds.
_ONE_KERNEL = ("silu_backward", "mish_backward")
_ATEN = torch.library.Library("aten", "IMPL", "CUDA")

_SDPA: Any = torch.nn.functional.scaled_dot_product_attention


def install(capability: tuple[int, int]) -> None:
    """Choose attention as the plan does for a machine that is not here, and as CUDA does for padded rows."""
    from torch.nn.attention import flex_attention

    from trainwright.models.attention import packs
    from trainwright.models.attention.kernels import ASSUMED

    for name in _ONE_KERNEL:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _ATEN.impl(name, lambda gradient, inputs: torch.empty_like(inputs))
    # The compiler takes no fake tensors; uncompiled, the operator is the same.
    flexible: Any = flex_attention
    flexible._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    packs.compiled = lambda: flexible.flex_attention  # type: ignore[assignment]
    packs.missing_kernels = lambda: ASSUMED.missing  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = functools.partial(_attention, capability, _SDPA)


def _attention(
    capability: tuple[int, int],
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel that CUDA chooses (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), not the CPU's.

    cuDNN's kernel takes the memory of flash attention, which is simulated in its place.
    """
    aten: Any = torch.ops.aten
    head, narrow = query.shape[-1], query.dtype != torch.float32
    equal = head == value.shape[-1]
    if query.device.type != "cuda":
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and narrow and equal and head <= 256 and capability >= (8, 0):
        inputs = (_widened(x, 8) for x in (query, key, value))
        output: torch.Tensor = aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
        return output[..., :head]
    alike = query.shape[1] == key.shape[1] and not enable_gqa
    if (
        query.device.type == "cuda"
        and alike
        and head % (8 if narrow else 4) == value.shape[-1] % (8 if narrow else 4) == 0
    ):
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        keeps_sums = torch.is_grad_enabled() and query.requires_grad
        options = (bias, keeps_sums, dropout_p, is_causal)
        efficient: torch.Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, *options, scale=scale
        )[0]
        return efficient
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _widened(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the tensor with its last dimension filled up to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers for every head, in rows that are aligned as the kernel needs them."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    mask = _widened(mask, 16)[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])


def check(name: str, args: tuple[Any, ...], capability: tuple[int, int]) -> None:
    """Raise RuntimeError, in the kernel's words, for arguments that a GPU's kernel refuses."""
    if name == "torch_attn::_varlen_attn":
        _check_flash(capability, *args[:5])


def grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the result of a grouped matrix product in another dtype than bf16, which only fake tensors refuse.

    None for any other operation.
    """
    if func._schema.name != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
        return None

    def as_bf16(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")

    with _disable_current_modes():
        shaped = func(*map(as_bf16, args), **{key: as_bf16(value) for key, value in kwargs.items()})
    return torch.empty_strided(shaped.shape, shaped.stride(), dtype=args[0].dtype, device=args[0].device)


def _check_flash(capability: tuple[int, int], query: Any, key: Any, value: Any, *edges: Any) -> None:
    """Raise what mha_varlen_fwd does (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    _require(capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer.")
    _require(
        query.dtype in (torch.bfloat16, torch.float16),
        f"FlashAttention only support fp16 and bf16 data type, not {query.dtype}",
    )
    _require(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    head = query.shape[-1]
    _require(head % 8 == 0 and head <= 256, f"FlashAttention forward only supports head dimension 8 to 256, not {head}")
    _require(value.shape == key.shape and key.shape[-1] == head, "query, key and value must have the same head size")
    _require(
        all(one.stride(-1) == 1 for one in (query, key, value)), "Input tensor must have contiguous last dimension"
    )
    _require(
        all(one is None or (one.dtype == torch.int32 and one.device == query.device) for one in edges),
        "cu_seqlens must be int32 tensors on the device of the query",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
