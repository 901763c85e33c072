"""Activations that are not kept on the device until the backward pass: computed again, or moved to the host.

Both replace a transformer block's ``forward`` and so stay inside whatever hooks a strategy puts around the block:
a recomputation finds the parameters gathered, as the block's backward pass does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.errors import RequestError

# Operations whose results `selective` keeps: most of a block's time goes into them. Attention comes under the name
# of whichever kernel the device has.
_PLAIN = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "trainwright::document_flash_cpu",
    "flex_attention",
}
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}  # of experts

# Below this a tensor stays on the device: starting a copy costs more than its memory is worth.
_LEAST_BYTES = 2**16


def save_activation_memory(blocks: Sequence[nn.Module], recompute: str | int, *, offload: bool = False) -> None:
    """Have transformer blocks keep fewer activations on their device. Parameters keep their names.

    To be called once, before the blocks are given to a strategy. Losses and gradients do not change: what is computed
    again is computed from the same random numbers.

    Args:
        blocks: in order.
        recompute: "none"; "full", all blocks; a number n, every n-th block; "selective", in all blocks everything but
            the results of matrix products and attention (Korthikanti et al., arXiv 2205.05198, section 5).
        offload: move what is kept to the host's memory, except the results that "selective" keeps. Tensors that are
            there already stay as they are, so on a CPU this changes nothing.

    Raises:
        RequestError: every n-th of less than n blocks.
    """
    assert recompute in ("none", "full", "selective") or isinstance(recompute, int)
    every = recompute if isinstance(recompute, int) else 1
    if every > len(blocks):
        raise RequestError(
            f"train.activation_checkpointing: the model has {len(blocks)} blocks, so there is no {every}th one; "
            "lower it, or set it to none"
        )
    for number, block in enumerate(blocks, start=1):
        forward = _plain
        if recompute != "none" and number % every == 0:
            forward = _selective_recompute(block) if recompute == "selective" else _recompute
        if offload:
            forward = functools.partial(_offload, forward)
        if forward is not _plain:
            block.forward = types.MethodType(forward, block)


# The same functions for every block, and no closures: torch.compile then has one result for all of them.


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _selective_recompute(block: nn.Module) -> Callable[..., Any]:
    # transformers adds biases of experts to their products in place, and what is changed cannot be kept.
    biased = any(getattr(module, "has_bias", False) for module in block.modules())
    return _recompute_all_but_plain_products if biased else _recompute_all_but_products


def _recompute_all_but_products(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, context_fn=_keep_products, **kwargs)


def _recompute_all_but_plain_products(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, context_fn=_keep_plain_products, **kwargs)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _PLAIN | _GROUPED))


def _keep_plain_products() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, _PLAIN))


def _policy(kept: set[str], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not isinstance(operation, torch._ops.OpOverload):
        keep = operation.name() in kept
    else:
        schema = operation._schema  # one that writes into its arguments has to be done again
        keep = schema.name in kept and not schema.is_mutable and not _drops(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws random numbers; left out, the ones drawn after it would be others."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool(args[index] if index < len(args) else default)
    return False


# Saved-tensor hooks are not for a compiler to see through; the block's own forward is compiled all the same.
@torch.compiler.disable(recursive=False)
def _offload(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _OnHost:
        if tensor.device.type == "cpu" or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        if tensor.nbytes < _LEAST_BYTES or not _is_dense(tensor):
            return tensor
        return _OnHost(tensor)

    def unpack(packed: torch.Tensor | _OnHost) -> torch.Tensor:
        return packed.on_device() if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        return forward(block, *args, **kwargs)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy can have the same strides, which compiled code relies on."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _OnHost:
    """A tensor of a GPU in pinned memory, copied there beside the computation."""

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        computing = torch.cuda.current_stream(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        copying = self._streams[tensor.device]
        copying.wait_stream(computing)
        with torch.cuda.stream(copying):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(copying)  # its memory is not given away before the copy is done
        self._copied = copying.record_event()

    def on_device(self) -> torch.Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._host.to(self._device, non_blocking=True)
