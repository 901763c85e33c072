"""Save activation memory: recompute activations in the backward pass, or move them to the host.

Both replace the ``forward`` of a transformer block, inside the hooks of strategies: the parameters are gathered during
recomputation, as they are in the block's backward pass.

Copies run on streams of their own: to the host while later blocks compute, and back while the backward pass of the next
block computes. So at most the activations of two blocks are on the device in the backward pass.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.errors import RequestError
from trainwright.models.low_rank import separate_adapters

# Operations whose results `selective` keeps: they take most of a block's time. The name of the attention operation
# depends on the kernel.
_PLAIN = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm_v2"),
    "trainwright::block_product",
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("torch_attn::_varlen_attn", "trainwright::packed_flash_cpu", "flash_attn::_flash_attn_varlen_forward"),
    *("flash_attn_3::_flash_attn_forward", "flex_attention"),
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
        forward = _run_plain_forward
        if recompute != "none" and number % every == 0:
            forward = _choose_selective_recompute(block) if recompute == "selective" else _recompute
        if offload:
            forward = functools.partial(offload_activations, forward)
        if forward is not _run_plain_forward:
            block.forward = types.MethodType(forward, block)


# Plain functions without closures, shared by all blocks, so that torch.compile compiles them once.


def _run_plain_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(block).forward(block, *args, **kwargs)
    return checkpoint(type(block).forward, block, *args, use_reentrant=False, **kwargs)


def _choose_selective_recompute(block: nn.Module) -> Callable[..., Any]:
    separate_adapters(block)  # which add to results of products in place, as these cannot be kept then
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
    return create_selective_checkpoint_contexts(functools.partial(_choose_policy, _PLAIN | _GROUPED))


def _keep_plain_products() -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_choose_policy, _PLAIN))


def _choose_policy(saved: set[str], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not isinstance(operation, torch._ops.OpOverload):
        keep = operation.name() in saved
    else:
        schema = operation._schema  # operations that write into their arguments must run again
        keep = schema.name in saved and not schema.is_mutable and not _has_dropout(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the operation draws random numbers; skipping it would change the following ones."""
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool(args[index] if index < len(args) else default)
    return False


# Smaller tensors stay on the device: starting a copy costs more than their memory saves.
_LEAST_BYTES = 2**16


# The compiler does not support saved-tensor hooks; the forward pass of the block is still compiled.
@torch.compiler.disable(recursive=False)
def offload_activations(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the output of ``forward`` of a block; what it saves for its backward pass is copied to the host."""
    weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in block.parameters()}
    run = _Run()

    def pack(tensor: torch.Tensor) -> torch.Tensor | _OnHost:
        if tensor.device.type == "cpu" or StorageWeakRef(tensor.untyped_storage()) in weights:
            return tensor
        if tensor.nbytes < _LEAST_BYTES or not _is_dense(tensor):
            return tensor
        return run.on_host(tensor)

    def unpack(packed: torch.Tensor | _OnHost) -> torch.Tensor:
        return packed.on_device() if isinstance(packed, _OnHost) else packed

    with saved_tensors_hooks(pack, unpack):
        return forward(block, *args, **kwargs)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a copy has the same strides, which compiled code relies on."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _Run:
    """A forward pass of a block. It lives as long as activations of it do."""

    _latest: ClassVar[weakref.ref[_Run] | None] = None

    def __init__(self) -> None:
        self._activations: dict[Any, weakref.ref[_OnHost]] = {}
        self._before: weakref.ref[_Run] | None = None  # the run before it that has activations on the host
        self._goes_back = False

    def on_host(self, tensor: torch.Tensor) -> _OnHost:
        """Copy a tensor to the host, once if several operations save it."""
        # The weak reference keeps another tensor's memory from having the same identity.
        memory = StorageWeakRef(tensor.untyped_storage()), tensor._version
        key = *memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if (reference := self._activations.get(key)) is not None and (activation := reference()) is not None:
            return activation
        if not self._activations:
            self._before, _Run._latest = _Run._latest, weakref.ref(self)
        copy = _OnHost(tensor, self)
        self._activations[key] = weakref.ref(copy)
        return copy

    def go_back(self) -> None:
        """Begin the backward pass: copy back what it needs, and then what the next backward pass needs."""
        if self._goes_back:
            return
        self._goes_back = True
        self._fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()

    def _fetch(self) -> None:
        for reference in self._activations.values():
            if (activation := reference()) is not None:
                activation.fetch()


class _OnHost:
    """A GPU tensor in pinned memory. It lives until no operation needs it any more, and its copy on the GPU as long."""

    _streams: ClassVar[dict[tuple[torch.device, str], torch.Stream]] = {}

    def __init__(self, tensor: torch.Tensor, run: _Run) -> None:
        self._device, self._run = tensor.device, run
        self._fetched: tuple[torch.Tensor, torch.Event] | None = None
        self._waited = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copying = self._stream("to the host")
        copying.wait_stream(torch.accelerator.current_stream(tensor.device))
        with copying:
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(copying)  # keeps its memory until the copy is done
        self._copied = copying.record_event()

    def fetch(self) -> None:
        """Begin to copy the tensor back, unless that was done before."""
        if self._fetched is not None:
            return
        # Allocated by the computing stream, which waits for the copy and may then free it as any other tensor.
        tensor = torch.empty_like(self._host, device=self._device)
        copying = self._stream("to the device")
        copying.wait_stream(torch.accelerator.current_stream(self._device))  # earlier work may still use the memory
        copying.wait_event(self._copied)
        with copying:
            tensor.copy_(self._host, non_blocking=True)
        self._fetched = tensor, copying.record_event()

    def on_device(self) -> torch.Tensor:
        """Return the tensor on the GPU, which waits for the copy; the host does not."""
        self._run.go_back()
        self.fetch()
        assert self._fetched is not None
        tensor, copy_event = self._fetched
        torch.accelerator.current_stream(self._device).wait_event(copy_event)
        self._waited = True
        return tensor

    def __del__(self) -> None:
        if self._fetched is not None and not self._waited:
            self._fetched[0].record_stream(self._stream("to the device"))

    def _stream(self, direction: str) -> torch.Stream:
        key = self._device, direction
        if key not in self._streams:
            self._streams[key] = torch.Stream(self._device)
        return self._streams[key]
