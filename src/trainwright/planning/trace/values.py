"""Operations on tensors without data that depend on values: integers are real, and scores select evenly.

Floating-point tensors are fake. Positions, masks, and counts of tokens are real integers, so that code can read them;
what is selected by fake scores, such as the experts of a token, is spread evenly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# Operations that select by score, and where their result has the indices.
_SELECTS = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argsort": 0, "multinomial": 0}
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def list_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def list_operands(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation, also those in lists."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [part for part in value if isinstance(part, torch.Tensor)]
    return tensors


def compute_result(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    """Return the result of an operation: of real integers if it is integers too, otherwise a fake one."""
    fake = next((x for x in inputs if type(x) is FakeTensor), None)
    if fake is None or not _decide_shape(func, inputs):
        out = _compute_integers(func, args, kwargs, inputs)
        return _run_faked(func, args, kwargs) if out is None else out
    if args[0] is fake and _is_in_place(func):
        return fake
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        with in_kernel_invocation_manager(fake.fake_mode):
            return _wrap_fake(fake, func(*args, **kwargs))
    key = _build_key(func, args, kwargs)
    if (results := _RESULTS.get(key)) is None:
        out = _run_faked(func, args, kwargs)
        if key is not None and (results := _describe_new_tensors(out, inputs)) is not None:
            _RESULTS[key] = results
        return out
    with in_kernel_invocation_manager(fake.fake_mode):
        new = [
            FakeTensor(fake.fake_mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), fake.fake_device)
            for size, stride, dtype in results
        ]
    return new[0] if len(new) == 1 else tuple(new)


# Shapes, strides and dtypes of operations' results, which FakeTensorMode takes a millisecond to find.
_RESULTS: dict[Any, list[Any]] = {}
# Operations that take indices or masks, on whose values their results' shapes do not depend.
_BY_INDEX = {"embedding", "embedding_dense_backward", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_"}
_BY_INDEX |= {"index_select", "index_add", "index_add_", "where", "masked_fill", "masked_fill_"}


def _decide_shape(func: Any, inputs: list[torch.Tensor]) -> bool:
    """Return whether the shapes of an operation's inputs decide those of its results."""
    name = func.overloadpacket.__name__
    by_index = name in _BY_INDEX
    fakes = [tensor for tensor in inputs if type(tensor) is FakeTensor]
    return name not in _SELECTS and (by_index or len(fakes) == len(inputs)) and all(x.constant is None for x in fakes)


@cache
def _is_in_place(func: Any) -> bool:
    name = func.overloadpacket.__name__
    changes_shape = torch.Tag.inplace_view in func.tags or name in ("set_", "resize_", "resize_as_")
    return name.endswith("_") and not name.endswith("__") and not changes_shape


def _describe_new_tensors(out: Any, inputs: list[torch.Tensor]) -> list[Any] | None:
    """Describe the results of an operation; None if they are not only tensors with memory of their own."""
    results = out if isinstance(out, (tuple, list)) else [out]
    storages = [tensor.untyped_storage() for tensor in inputs]
    if any(type(x) is not FakeTensor or any(x.untyped_storage() is storage for storage in storages) for x in results):
        return None
    return [(x.shape, x.stride(), x.dtype) for x in results] if len({id(x) for x in results}) == len(results) else None


def _wrap_fake(like: Any, out: Any) -> Any:
    if isinstance(out, (list, tuple)):
        return [_wrap_fake(like, part) for part in out]
    return FakeTensor(like.fake_mode, out, like.fake_device)


def _build_key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the shape of a result depends on; None if it is more than shapes and numbers."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.items()):
        if isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            if (nested_key := _build_key(None, value, {})) is None:
                return None
            parts.append(nested_key)
        else:
            parts.append((type(value), value))
    try:
        hash(key := tuple(parts))
    except TypeError:
        return None
    return key


def _compute_integers(func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
    dtype = kwargs.get("dtype")
    counts = func.overloadpacket.__name__ == "arange" and all(isinstance(value, int) for value in args)
    if (dtype not in _WHOLE) if dtype is not None else not (inputs or counts):
        return None
    if any(type(tensor) is not torch.Tensor or tensor.dtype not in _WHOLE for tensor in inputs):
        return None
    with _disable_current_modes():
        out = func(*args, **kwargs)
    return out if all(tensor.dtype in _WHOLE for tensor in list_tensors(out)) else None


def _run_faked(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors, with real integers where it reads or selects indices."""
    name = func.overloadpacket.__name__
    if name == "_grouped_mm":  # the products of experts, which torch fakes for bf16 only
        first, second, *rest = args
        groups = [rest[0].numel() if rest else first.shape[0]] if first.dim() == second.dim() else []
        return first.new_empty([*groups, first.shape[-2], second.shape[-1]])
    if name.startswith(("index", "_index_put", "_unsafe_index")) and isinstance(args[1], (list, tuple)):
        args = (args[0], _convert_indices(args[1]), *args[2:])
    out = func(*args, **kwargs)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    if (position := _SELECTS.get(name, len(results))) < len(results) and args[0].dim():
        among, indices = max(1, args[0].shape[-1]), results[position]
        with _disable_current_modes():
            spread = torch.arange(indices.numel()).remainder(among).view(indices.shape)
            results[position] = spread.to(indices.dtype)
    return tuple(results) if isinstance(out, (tuple, list)) else results[0]


def _convert_indices(given: Any) -> list[Any]:
    """Return indices as integers instead of masks, so that their number is known."""
    indices: list[Any] = []
    for index in given:
        with _disable_current_modes():
            is_mask = type(index) is torch.Tensor and index.dtype in (torch.bool, torch.uint8)
            indices += index.nonzero().unbind(1) if is_mask else [index]
    return indices
