"""Keep the activations of transformer blocks in the host's memory until their backward pass.

Copies run on streams of their own: to the host while later blocks compute, and back while the backward pass of the next
block computes. So at most the activations of two blocks are on the device in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# Smaller tensors stay on the device: starting a copy costs more than their memory saves.
_LEAST_BYTES = 2**16


# The compiler does not support saved-tensor hooks; the forward pass of the block is still compiled.
@torch.compiler.disable(recursive=False)
def with_activations_on_host(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
        if (known := self._activations.get(key)) is not None and (found := known()) is not None:
            return found
        if not self._activations:
            self._before, _Run._latest = _Run._latest, weakref.ref(self)
        made = _OnHost(tensor, self)
        self._activations[key] = weakref.ref(made)
        return made

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

    _streams: ClassVar[dict[tuple[torch.device, str], torch.cuda.Stream]] = {}

    def __init__(self, tensor: torch.Tensor, run: _Run) -> None:
        self._device, self._run = tensor.device, run
        self._fetched: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._waited = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copying = self._stream("to the host")
        copying.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(copying):
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
        copying.wait_stream(torch.cuda.current_stream(self._device))  # earlier work may still use the memory
        copying.wait_event(self._copied)
        with torch.cuda.stream(copying):
            tensor.copy_(self._host, non_blocking=True)
        self._fetched = tensor, copying.record_event()

    def on_device(self) -> torch.Tensor:
        """Return the tensor on the GPU, which waits for the copy; the host does not."""
        self._run.go_back()
        self.fetch()
        assert self._fetched is not None
        tensor, copied = self._fetched
        torch.cuda.current_stream(self._device).wait_event(copied)
        self._waited = True
        return tensor

    def __del__(self) -> None:
        if self._fetched is not None and not self._waited:
            self._fetched[0].record_stream(self._stream("to the device"))

    def _stream(self, direction: str) -> torch.cuda.Stream:
        key = self._device, direction
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self._device)
        return self._streams[key]
