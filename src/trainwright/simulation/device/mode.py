"""Every operation of a simulated run passes here: it is checked and noted, and then does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.simulation.device import known
from trainwright.simulation.device.kernels import check, grouped_product
from trainwright.simulation.recorders.collectives import CollectiveLog, collective_of, tensors_in
from trainwright.simulation.recorders.memory import MemoryLog
from trainwright.simulation.recorders.phases import Phases
from trainwright.simulation.recorders.waits import WaitLog

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


class Logs:
    """What a simulated rank has done, by step and phase."""

    def __init__(self) -> None:
        self.memory = MemoryLog()
        self.phases = Phases(self.memory.enter)
        self.collectives = CollectiveLog(self.phases)
        self.waits = WaitLog(self.phases)


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
        inputs = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        if (found := collective_of(func, args, kwargs)) is not None:
            self.logs.collectives.note(found)
            out = self._noted(func(*args, **kwargs))
            if func.namespace == "c10d":
                known.exchanged(found.kind, args, found.ranks)
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
