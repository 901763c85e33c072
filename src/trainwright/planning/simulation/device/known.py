"""Values of fake tensors that are known because they were computed from the host's data.

A fake tensor has no values, but the code around it decides by some: the edges of sequences, a mask without padding, a
flag that was gathered from all ranks. Operations whose inputs are all known and small are repeated on the CPU; the
result is remembered with the fake one. Everything that depends on weights stays unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from trainwright.planning.trace.values import operands

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


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor on the CPU, or None if it is not known."""
    entry = _known(tensor)
    return None if entry is None else entry.value


def _known(tensor: torch.Tensor) -> _Known | None:
    if not isinstance(tensor, FakeTensor):
        return _Known(tensor, [True]) if type(tensor) is torch.Tensor and tensor.device.type == "cpu" else None
    entry: _Known | None = getattr(tensor, "_known_value", None)
    return entry if entry is not None and entry.valid[0] else None


def remember(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Remember the value of a fake tensor."""
    if isinstance(tensor, FakeTensor):
        tensor._known_value = _Known(value, [True])  # type: ignore[attr-defined]


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, inputs: list[torch.Tensor]) -> None:
    """Remember the results ``out`` of an operation if its inputs are known, and forget what it has overwritten.

    Args:
        inputs: the tensors in ``args`` and ``kwargs``.
    """
    schema = func._schema
    if not inputs and schema.name.rpartition("::")[2] not in _MADE:
        return
    if not all(_small(result_tensor) for result_tensor in operands((out,), {})):
        return _forget(schema, args)
    if schema.name == "aten::cat":
        _complete(inputs)
    # Most operations work on weights or activations; the first input tells.
    entries = [_known(tensor) for tensor in inputs]
    if None in entries or torch.Tag.nondeterministic_seeded in func.tags:
        return _forget(schema, args)

    kwargs = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with _disable_current_modes(), torch.no_grad():
        try:
            result = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        except (RuntimeError, NotImplementedError):  # no such kernel on the CPU
            return _forget(schema, args)
    shared = {one.value.untyped_storage()._cdata: one.valid for one in entries if one is not None}
    for result_tensor, value in zip(operands((out,), {}), operands((result,), {}), strict=True):
        if isinstance(result_tensor, FakeTensor):
            result_tensor._known_value = _Known(value, shared.get(value.untyped_storage()._cdata, [True]))  # type: ignore[attr-defined]


def _complete(parts: list[torch.Tensor]) -> None:
    """Give unknown parts of a vector the numbers they read as, if others are known: a rank's numbers about a step."""
    if any(part.dtype != torch.float64 or part.dim() != 1 for part in parts):
        return
    if any(_known(part) is not None for part in parts):
        for part in parts:
            if _known(part) is None:
                with _disable_current_modes():
                    value = torch.full(tuple(part.shape), _filler(part), dtype=part.dtype)
                remember(part, value)


def sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the result of an operation whose size depends on values, if they are known; otherwise None."""
    if torch.Tag.dynamic_output_shape not in func.tags or not inputs:
        return None
    if any(_known(tensor) is None for tensor in inputs):
        return None
    with _disable_current_modes(), torch.no_grad():
        value = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
    if not isinstance(value, torch.Tensor):
        return None
    empty = torch.empty(value.shape, dtype=value.dtype, device=inputs[0].device)
    remember(empty, value)
    return empty


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return known(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _forget(schema: Any, args: tuple[Any, ...]) -> None:
    if not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in operands((value,), {}):
                if isinstance(tensor, FakeTensor) and (old := _known(tensor)) is not None:
                    old.valid[0] = False


def _small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_MOST_FLOATS if tensor.dtype.is_floating_point else _MOST)


def scalar(tensor: torch.Tensor) -> Any:
    """Return the number that a tensor of one element reads as."""
    value = known(tensor)
    if value is not None:
        with _disable_current_modes():
            return value.item()
    return _filler(tensor)


def _filler(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return True
    if not tensor.dtype.is_floating_point:
        return 1
    return _UNKNOWN_FLOAT if tensor.device.type == "cuda" else _UNKNOWN_HOST_FLOAT


def nested(tensor: torch.Tensor) -> Any:
    """Return what ``tolist`` of a tensor gives."""
    value = known(tensor)
    if value is not None:
        with _disable_current_modes():
            return value.tolist()
    return _filled(tuple(tensor.shape), _filler(tensor))


def _filled(shape: tuple[int, ...], filler: Any) -> Any:
    return filler if not shape else [_filled(shape[1:], filler) for _ in range(shape[0])]


def exchanged(kind: str, args: tuple[Any, ...], ranks: int) -> None:
    """Set the value of what a collective has filled, if that of its input is known: the other ranks have the same."""
    if kind == "all_reduce":
        for tensor in operands(args[:1], {}):
            if (value := known(tensor)) is not None:
                with _disable_current_modes():
                    remember(tensor, value * ranks)
    elif kind == "all_gather" and isinstance(args[0], torch.Tensor) and (value := known(args[1])) is not None:
        with _disable_current_modes():
            remember(args[0], value.reshape(-1).repeat(ranks).reshape(args[0].shape))
