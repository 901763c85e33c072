"""Operations on tensors without data that depend on values: integers are real, and scores select evenly.

Floating-point tensors are fake. Positions, masks, and counts of tokens are real integers, so that code can read them;
what is selected by fake scores, such as the experts of a token, is spread evenly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# Operations that select by score, and where their result has the indices.
_SELECTS = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argsort": 0, "multinomial": 0}
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [value for value in tree_leaves(tree) if isinstance(value, torch.Tensor)]


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation: of real integers if it is integers too, otherwise a fake one."""
    out = _of_integers(func, args, kwargs)
    return _faked(func, args, kwargs) if out is None else out


def _of_integers(func: Any, args: Any, kwargs: Any) -> Any:
    inputs, dtype = tensors_in((args, kwargs)), kwargs.get("dtype")
    counts = func.overloadpacket.__name__ == "arange" and all(isinstance(value, int) for value in args)
    if (dtype not in _WHOLE) if dtype is not None else not (inputs or counts):
        return None
    if any(type(tensor) is not torch.Tensor or tensor.dtype not in _WHOLE for tensor in inputs):
        return None
    with _disable_current_modes():
        out = func(*args, **kwargs)
    return out if all(tensor.dtype in _WHOLE for tensor in tensors_in(out)) else None


def _faked(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors, with real integers where it reads or selects indices."""
    name = func.overloadpacket.__name__
    if name == "_grouped_mm":  # the products of experts, which torch fakes for bf16 only
        first, second, *rest = args
        groups = [rest[0].numel() if rest else first.shape[0]] if first.dim() == second.dim() else []
        return first.new_empty([*groups, first.shape[-2], second.shape[-1]])
    if name.startswith(("index", "_index_put", "_unsafe_index")) and isinstance(args[1], (list, tuple)):
        args = (args[0], _indices(args[1]), *args[2:])
    out = func(*args, **kwargs)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    if (position := _SELECTS.get(name, len(results))) < len(results) and args[0].dim():
        among, indices = max(1, args[0].shape[-1]), results[position]
        with _disable_current_modes():
            spread = torch.arange(indices.numel()).remainder(among).view(indices.shape)
            results[position] = spread.to(indices.dtype)
    return tuple(results) if isinstance(out, (tuple, list)) else results[0]


def _indices(given: Any) -> list[Any]:
    """Return indices as integers instead of masks, so that their number is known."""
    indices: list[Any] = []
    for index in given:
        with _disable_current_modes():
            is_mask = type(index) is torch.Tensor and index.dtype in (torch.bool, torch.uint8)
            indices += index.nonzero().unbind(1) if is_mask else [index]
    return indices
