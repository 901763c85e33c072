"""Save activation memory: recompute activations in the backward pass, or move them to the host.

Both replace the ``forward`` of a transformer block, inside the hooks of strategies: the parameters are gathered during
recomputation, as they are in the block's backward pass.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.errors import RequestError
from trainwright.models.offload import with_activations_on_host

# Operations whose results `selective` keeps: they take most of a block's time. The name of the attention operation
# depends on the kernel.
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
    "trainwright::packed_flash_cpu",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::_flash_attn_forward",
    "flex_attention",
}
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}  # mixtures of experts


def save_activation_memory(blocks: Sequence[nn.Module], recompute: str | int, *, offload: bool = False) -> None:
    """Make transformer blocks keep fewer activations on their device. Parameter names do not change.

    Call it once, before a strategy wraps the blocks. Losses and gradients do not change: recomputation uses the same
    random numbers.

    Args:
        blocks: in order.
        recompute: "none"; "full": all blocks; a number n: every n-th block; "selective": in all blocks everything
            except the results of matrix products and attention (Korthikanti et al., arXiv 2205.05198, section 5).
        offload: move kept activations to the host's memory, except the results that "selective" keeps. Has no effect on
            a CPU.

    Raises:
        RequestError: n is larger than the number of blocks.
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
            forward = functools.partial(with_activations_on_host, forward)
        if forward is not _plain:
            block.forward = types.MethodType(forward, block)


# Plain functions without closures, shared by all blocks, so that torch.compile compiles them once.


def _plain(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _selective_recompute(block: nn.Module) -> Callable[..., Any]:
    # transformers adds the biases of experts in place, and modified results cannot be kept.
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
        schema = operation._schema  # operations that write into their arguments must run again
        keep = schema.name in kept and not schema.is_mutable and not _drops(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the operation draws random numbers; skipping it would change the following ones."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool(args[index] if index < len(args) else default)
    return False
