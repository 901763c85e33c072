"""Every operation of a simulated run passes here: it is checked and noted, and then does nothing.

A fake tensor has no values, but the code around it decides by some: the edges of sequences, a mask without padding, a
flag that was gathered from all ranks. Operations whose inputs are all known and small are repeated on the CPU; the
result is remembered with the fake one. Everything that depends on weights stays unknown. Kernels of the simulated GPU
are those that are assumed to be installed, and refuse what the real ones refuse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from trainwright.planning.simulation.recorders import Logs, find_collective
from trainwright.planning.trace.values import list_operands, list_tensors

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
        inputs = list_tensors((args, kwargs))
        if (collective := find_collective(func, args, kwargs)) is not None:
            self.logs.collectives.note(collective)
            out = self._noted(func(*args, **kwargs))
            if func.namespace == "c10d":
                set_exchanged_value(collective.kind, args, collective.ranks)
            return out
        name = func._schema.name
        on_device = any(tensor.device.type == "cuda" for tensor in inputs)
        if on_device:
            if name == "torch_attn::_varlen_attn":
                _check_flash(self._capability, *args[:5])
            self._note_wait(name, args, kwargs)
        if name == "aten::_local_scalar_dense":
            return read_scalar(args[0])
        if name == "aten::equal":
            return _is_equal(*args)
        out = compute_data_dependent(func, args, kwargs, inputs)
        out = compute_grouped_product(func, args, kwargs) if out is None else out
        if out is not None:
            return self._noted(out)
        out = self._noted(func(*args, **kwargs))
        pins = kwargs.get("pin_memory") or (on_device and kwargs.get("non_blocking"))
        for tensor in list_tensors(out):
            if pins and tensor.device.type != "cuda":
                tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
        follow_operation(func, args, kwargs, out, inputs)
        if not on_device and name == "aten::_to_copy" and _is_cuda(kwargs.get("device")):
            self._note_upload(args[0], kwargs)
        return out

    def _noted(self, out: Any) -> Any:
        for tensor in list_tensors(out):
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
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
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


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {one.device} and {other.device}")
    return one.shape == other.shape


def install(logs: Logs) -> None:
    """Add to fake tensors what the product's code needs of real ones."""
    # It would ask the driver, and take is_available() at its word.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    _patch_reading(logs)
    _patch_pinning()
    _patch_assignment()
    _patch_resizing(logs)


def _patch_reading(logs: Logs) -> None:
    """Give the values that the host reads from fake tensors."""
    plain_list, plain_array = torch.Tensor.tolist, torch.Tensor.numpy

    def tolist(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return plain_list(self)
        if self.device.type == "cuda":
            logs.waits.note("reading values")
        return read_nested(self)

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        import numpy as np

        if not isinstance(self, FakeTensor):
            return plain_array(self, **options)
        if self.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        value = find_value(self)
        if value is not None:
            return plain_array(value)
        kind = np.dtype(str(self.dtype).removeprefix("torch."))
        return np.zeros(tuple(self.shape), kind)

    for kind in (torch.Tensor, FakeTensor):
        kind.tolist = tolist  # type: ignore[method-assign]
        kind.numpy = numpy  # type: ignore[method-assign,assignment]


def _patch_pinning() -> None:
    def pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if self.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        pinned_tensor = self.clone()
        pinned_tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
        return pinned_tensor

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda self, *args: is_pinned(self)  # type: ignore[method-assign]


def _patch_assignment() -> None:
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


def _patch_resizing(logs: Logs) -> None:
    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = plain(self, size)
        logs.memory.update_size(self)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]


_MOST = 2**20  # elements of a value that is remembered
_MOST_FLOATS = 2**17  # among them what all ranks tell each other about a step
_MADE = {"arange", "zeros", "ones", "full", "scalar_tensor", "eye", "linspace", "tril_indices", "triu_indices"}
# What a value that is not known reads as: numbers that let a run go on, with a gradient norm that is clipped.
_UNKNOWN_FLOAT, _UNKNOWN_HOST_FLOAT = 4.0, 0.0


class _Known:
    """A value, and whether it still holds; aliases of one storage share ``valid``."""

    __slots__ = ("valid", "value")

    def __init__(self, value: torch.Tensor, valid: list[bool]) -> None:
        self.value = value
        self.valid = valid


def find_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor on the CPU, or None if it is not known."""
    entry = _find_known(tensor)
    return None if entry is None else entry.value


def _find_known(tensor: torch.Tensor) -> _Known | None:
    if not isinstance(tensor, FakeTensor):
        return _Known(tensor, [True]) if type(tensor) is torch.Tensor and tensor.device.type == "cpu" else None
    entry: _Known | None = getattr(tensor, "_known_value", None)
    return entry if entry is not None and entry.valid[0] else None


def remember_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Remember the value of a fake tensor."""
    if isinstance(tensor, FakeTensor):
        tensor._known_value = _Known(value, [True])  # type: ignore[attr-defined]


def follow_operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, inputs: list[torch.Tensor]
) -> None:
    """Remember the results ``out`` of an operation if its inputs are known, and forget what it has overwritten.

    Args:
        inputs: the tensors in ``args`` and ``kwargs``.
    """
    schema = func._schema
    if not inputs and schema.name.rpartition("::")[2] not in _MADE:
        return
    results = list_operands((out,), {})
    if any(tensor.numel() > (_MOST_FLOATS if tensor.dtype.is_floating_point else _MOST) for tensor in results):
        return _forget_values(schema, args)
    if schema.name == "aten::cat":
        _complete(inputs)
    # Most operations work on weights or activations; the first input tells.
    entries = [_find_known(tensor) for tensor in inputs]
    if None in entries or torch.Tag.nondeterministic_seeded in func.tags:
        return _forget_values(schema, args)

    kwargs = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with _disable_current_modes(), torch.no_grad():
        try:
            result = func(*tree_map(_move_to_host, args), **tree_map(_move_to_host, kwargs))
        except (RuntimeError, NotImplementedError):  # no such kernel on the CPU
            return _forget_values(schema, args)
    shared = {entry.value.untyped_storage()._cdata: entry.valid for entry in entries if entry is not None}
    for result_tensor, value in zip(results, list_operands((result,), {}), strict=True):
        if isinstance(result_tensor, FakeTensor):
            result_tensor._known_value = _Known(value, shared.get(value.untyped_storage()._cdata, [True]))  # type: ignore[attr-defined]


def _complete(parts: list[torch.Tensor]) -> None:
    """Give unknown parts of a vector the numbers they read as, if others are known: a rank's numbers about a step."""
    if any(part.dtype != torch.float64 or part.dim() != 1 for part in parts):
        return
    if any(_find_known(part) is not None for part in parts):
        for part in parts:
            if _find_known(part) is None:
                with _disable_current_modes():
                    value = torch.full(tuple(part.shape), _choose_filler(part), dtype=part.dtype)
                remember_value(part, value)


def compute_data_dependent(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
) -> torch.Tensor | None:
    """Return the result of an operation whose size depends on values, if they are known; otherwise None."""
    if torch.Tag.dynamic_output_shape not in func.tags or not inputs:
        return None
    if any(_find_known(tensor) is None for tensor in inputs):
        return None
    with _disable_current_modes(), torch.no_grad():
        value = func(*tree_map(_move_to_host, args), **tree_map(_move_to_host, kwargs))
    if not isinstance(value, torch.Tensor):
        return None
    empty = torch.empty(value.shape, dtype=value.dtype, device=inputs[0].device)
    remember_value(empty, value)
    return empty


def _move_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return find_value(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _forget_values(schema: Any, args: tuple[Any, ...]) -> None:
    if not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in list_operands((value,), {}):
                if isinstance(tensor, FakeTensor) and (old := _find_known(tensor)) is not None:
                    old.valid[0] = False


def read_scalar(tensor: torch.Tensor) -> Any:
    """Return the number that a tensor of one element reads as."""
    value = find_value(tensor)
    if value is not None:
        with _disable_current_modes():
            return value.item()
    return _choose_filler(tensor)


def _choose_filler(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    if not tensor.dtype.is_floating_point:
        return 1
    return _UNKNOWN_FLOAT if tensor.device.type == "cuda" else _UNKNOWN_HOST_FLOAT


def read_nested(tensor: torch.Tensor) -> Any:
    """Return what ``tolist`` of a tensor gives."""
    value = find_value(tensor)
    if value is not None:
        with _disable_current_modes():
            return value.tolist()
    return _fill_nested(tuple(tensor.shape), _choose_filler(tensor))


def _fill_nested(shape: tuple[int, ...], filler: Any) -> Any:
    return filler if not shape else [_fill_nested(shape[1:], filler) for _ in range(shape[0])]


def set_exchanged_value(kind: str, args: tuple[Any, ...], ranks: int) -> None:
    """Set the value of what a collective has filled, if that of its input is known: the other ranks have the same."""
    if kind == "all_reduce":
        for tensor in list_operands(args[:1], {}):
            if (value := find_value(tensor)) is not None:
                with _disable_current_modes():
                    remember_value(tensor, value * ranks)
    elif kind == "all_gather" and isinstance(args[0], torch.Tensor) and (value := find_value(args[1])) is not None:
        with _disable_current_modes():
            remember_value(args[0], value.reshape(-1).repeat(ranks).reshape(args[0].shape))


# Builds of torch for CPUs have no CUDA kernel of these, and so take them apart into several operations, whose results
# no GPU holds.
_ONE_KERNEL = ("silu_backward", "mish_backward")
_ATEN = torch.library.Library("aten", "IMPL", "CUDA")

_SDPA: Any = torch.nn.functional.scaled_dot_product_attention


def install_kernels(capability: tuple[int, int]) -> None:
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
    packs.compile_flex_attention = lambda: flexible.flex_attention  # type: ignore[assignment]
    packs.list_missing_kernels = lambda: ASSUMED.missing  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = functools.partial(_run_attention, capability, _SDPA)


def _run_attention(
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
        inputs = (_pad_last_dimension(x, 8) for x in (query, key, value))
        output: torch.Tensor = aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
        return output[..., :head]
    alike = query.shape[1] == key.shape[1] and not enable_gqa
    alignment = 8 if narrow else 4
    if alike and head % alignment == value.shape[-1] % alignment == 0:
        bias = None if attn_mask is None else _build_bias(attn_mask, query, key)
        keeps_sums = torch.is_grad_enabled() and query.requires_grad
        attend: Callable[..., tuple[torch.Tensor, ...]] = aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, bias, keeps_sums, dropout_p, is_causal, scale=scale)[0]
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _pad_last_dimension(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the tensor with its last dimension filled up to a multiple."""
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _build_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers for every head, in rows that are aligned as the kernel needs them."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    mask = _pad_last_dimension(mask, 16)[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])


def compute_grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
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
        result = func(*map(as_bf16, args), **{key: as_bf16(value) for key, value in kwargs.items()})
    return torch.empty_strided(result.shape, result.stride(), dtype=args[0].dtype, device=args[0].device)


def _check_flash(capability: tuple[int, int], query: Any, key: Any, value: Any, *edges: Any) -> None:
    """Raise RuntimeError as mha_varlen_fwd does (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    _require(capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer.")
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    _require(is_half, f"FlashAttention only support fp16 and bf16 data type, not {query.dtype}")
    _require(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    head = query.shape[-1]
    _require(head % 8 == 0 and head <= 256, f"FlashAttention forward only supports head dimension 8 to 256, not {head}")
    _require(value.shape == key.shape and key.shape[-1] == head, "query, key and value must have the same head size")
    is_contiguous = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    _require(is_contiguous, "Input tensor must have contiguous last dimension")
    are_edges_valid = all(t is None or (t.dtype == torch.int32 and t.device == query.device) for t in edges)
    _require(are_edges_valid, "cu_seqlens must be int32 tensors on the device of the query")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
