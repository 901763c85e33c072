"""Every operation of a simulated run passes here: it is checked and noted, and then does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.planning.simulation.device import known
from trainwright.planning.simulation.device.kernels import check, grouped_product
from trainwright.planning.simulation.recorders import Logs, collective_of
from trainwright.planning.trace.values import tensors_in

# Operations whose result has a size or a value that the host waits for.
_WAITS = {
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::_local_scalar_dense": "reading a value",
    "aten::equal": "equal",
}


class Simulated(TorchDispatchMode):
    """Note what operations on the simulated device do. To be entered inside a ``FakeTensorMode``.

    Args:
        capability: of the simulated card.
    """

    supports_higher_order_operators = True

    def __init__(self, logs: Logs, capability: tuple[int, int]) -> None:
        super().__init__()
        self.logs = logs
        self._capability = capability

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check an operation, call it on fake tensors, and note it."""
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):  # a higher-order operator, such as flex_attention
            return self._noted(func(*args, **kwargs))
        if any(kind not in _OURS for kind in types):
            return NotImplemented  # a subclass, such as a DTensor, takes itself apart first
        inputs = tensors_in((args, kwargs))
        if (collective := collective_of(func, args, kwargs)) is not None:
            self.logs.collectives.note(collective)
            out = self._noted(func(*args, **kwargs))
            if func.namespace == "c10d":
                known.exchanged(collective.kind, args, collective.ranks)
            return out
        name = func._schema.name
        on_device = any(tensor.device.type == "cuda" for tensor in inputs)
        if on_device:
            check(name, args, self._capability)
            self._note_wait(name, args, kwargs)
        if name == "aten::_local_scalar_dense":
            return known.scalar(args[0])
        if name == "aten::equal":
            return _equal(*args)
        out = known.sized(func, args, kwargs, inputs)
        out = grouped_product(func, args, kwargs) if out is None else out
        if out is not None:
            return self._noted(out)
        out = self._noted(func(*args, **kwargs))
        for tensor in tensors_in(out):
            if tensor.device.type != "cuda" and (
                kwargs.get("pin_memory") or (on_device and kwargs.get("non_blocking"))
            ):
                tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
        known.follow(func, args, kwargs, out, inputs)
        if not on_device and name == "aten::_to_copy" and _is_cuda(kwargs.get("device")):
            self._note_upload(args[0], kwargs)
        return out

    def _noted(self, out: Any) -> Any:
        for tensor in tensors_in(out):
            if tensor.device.type == "cuda":
                self.logs.memory.note(tensor)
        return out

    def _note_wait(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _WAITS:
            self.logs.waits.note(_WAITS[name])
        elif name == "aten::_to_copy":
            to = kwargs.get("device")
            if to is not None and torch.device(to).type == "cpu" and not kwargs.get("non_blocking"):
                self.logs.waits.note("copy to the host")
        elif name == "aten::copy_":
            self._note_copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name in ("aten::index.Tensor", "aten::index", "aten::index_put_", "aten::_index_put_impl_"):
            if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
                self.logs.waits.note("indexing by a mask")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self.logs.waits.note("repeat_interleave")

    def _note_copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        devices = into.device.type, source.device.type
        if devices == ("cpu", "cuda") and not (non_blocking and is_pinned(into)):
            self.logs.waits.note("copy to the host")
        elif devices == ("cuda", "cpu") and source.dim() and not (non_blocking and is_pinned(source)):
            self.logs.waits.note("copy from pageable memory" if non_blocking else "copy to the device")

    def _note_upload(self, source: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if not is_pinned(source):
            self.logs.waits.note("copy from pageable memory")
        elif not kwargs.get("non_blocking"):
            self.logs.waits.note("copy to the device")


_OURS = (torch.Tensor, FakeTensor, torch.nn.Parameter)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor is in pinned memory."""
    return getattr(tensor.untyped_storage(), "pinned", False)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {one.device} and {other.device}")
    return one.shape == other.shape


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
    """Let ``tensor.data = other`` change the device too, which torch's own does not."""
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
