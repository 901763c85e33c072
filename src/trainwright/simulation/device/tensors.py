"""What fake tensors lack of real ones: values that the host reads, pinned memory, a device that can be assigned."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as nn_module

from trainwright.simulation.device import known
from trainwright.simulation.device.mode import Logs, is_pinned


def install(logs: Logs) -> None:
    """Add to fake tensors what the product's code needs of real ones."""
    # It would ask the driver, and take is_available() at its word.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    _reading(logs)
    _pinning()
    _assigning()
    _resizing(logs)


def _reading(logs: Logs) -> None:
    """Give the values that the host reads from fake tensors."""
    plain_list, plain_array = torch.Tensor.tolist, torch.Tensor.numpy

    def tolist(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return plain_list(self)
        if self.device.type == "cuda":
            logs.waits.note("reading values")
        return known.nested(self)

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        import numpy as np

        if not isinstance(self, FakeTensor):
            return plain_array(self, **options)
        if self.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        value = known.known(self)
        if value is not None:
            return plain_array(value)
        kind = np.dtype(str(self.dtype).removeprefix("torch."))
        return np.zeros(tuple(self.shape), kind)

    for kind in (torch.Tensor, FakeTensor):
        kind.tolist = tolist  # type: ignore[method-assign]
        kind.numpy = numpy  # type: ignore[method-assign,assignment]


def _pinning() -> None:
    def pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        pinned = self.clone()
        pinned.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return pinned

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda self, *args: is_pinned(self)  # type: ignore[method-assign]


def _assigning() -> None:
    """Let ``tensor.data = other`` change the device too, which torch's own leaves as it was."""
    plain = torch.Tensor.data

    def set_data(self: FakeTensor, value: torch.Tensor) -> None:
        plain.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    FakeTensor.data = property(lambda self: plain.__get__(self), set_data)  # type: ignore[assignment,attr-defined]

    # nn.Module.to swaps fake parameters with new ones, which weak references of their modules forbid.
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)
        return self

    nn_module.Module.to = to  # type: ignore[method-assign,assignment]


def _resizing(logs: Logs) -> None:
    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = plain(self, size)
        logs.memory.resized(self)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
