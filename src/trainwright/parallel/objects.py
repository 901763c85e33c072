"""Objects that ranks exchange, as JSON: what another rank sends is data, and nothing in it is called.

Floats keep their bits (json writes their shortest exact form), and arrays and tensors those of their elements.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import numpy as np
import torch

_TYPE = "__type__"
_TENSOR_TYPES = {str(each): each for each in (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
)}  # fmt: skip


def dumps(value: Any, *types: type) -> bytes:
    """Return a value as bytes: None, numbers, text, lists, tuples, dictionaries, arrays, tensors, and ``types``.

    Args:
        types: dataclasses and named tuples that may be in it.

    Raises:
        TypeError: something else is in it.
    """
    return json.dumps(_plain(value, types)).encode()


def loads(content: bytes, *types: type) -> Any:
    """Return the value of ``dumps`` with the same ``types``. Raises ValueError for anything else."""
    try:
        return _value(json.loads(content), {each.__name__: each for each in types})
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # RecursionError is one
        raise ValueError(f"another rank sent what is no object: {type(error).__name__}: {error}") from error


def _plain(value: Any, types: tuple[type, ...]) -> Any:
    def plain(each: Any) -> Any:
        return _plain(each, types)

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if type(value) in types:
        names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
        return {_TYPE: type(value).__name__, "fields": {name: plain(getattr(value, name)) for name in names}}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_TYPE: "tuple", "items": [plain(each) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TYPE not in value:
            return {key: plain(each) for key, each in value.items()}
        return {_TYPE: "dict", "items": [[plain(key), plain(each)] for key, each in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor, kind = torch.from_numpy(value.copy()), "array"
    elif isinstance(value, torch.Tensor):
        tensor, kind = value.detach().cpu(), "tensor"
    else:
        raise TypeError(f"ranks exchange plain data, no {type(value).__name__}")
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # with a stride of 1
    content = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return {_TYPE: kind, "dtype": str(tensor.dtype), "shape": list(value.shape), "data": content}


def _value(plain: Any, types: dict[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(each, types) for each in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_TYPE)
    if kind is None:
        return {key: _value(each, types) for key, each in plain.items()}
    if kind == "tuple":
        return tuple(_value(each, types) for each in plain["items"])
    if kind == "dict":
        return {_value(key, types): _value(each, types) for key, each in plain["items"]}
    if kind in ("array", "tensor"):
        data = bytearray(base64.b64decode(plain["data"], validate=True))
        dtype = _TENSOR_TYPES[plain["dtype"]]
        tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = tensor.reshape(plain["shape"])
        return tensor if kind == "tensor" else tensor.numpy()
    return types[kind](**{name: _value(each, types) for name, each in plain["fields"].items()})
