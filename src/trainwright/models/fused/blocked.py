"""Norms, gated activations and rotary positions on a CPU, with the results of the plain operations to the bit.

Each is the same operations of torch on a few rows at a time, whose intermediate results stay in the processor's cache,
and its backward pass computes them again from the inputs, so that only these are kept. Plans see fake implementations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.library import custom_op
from torch.nn import functional

from trainwright.parallel.constants import PART_TOKENS


def _parts(tokens: int, rows: int = 1) -> Iterator[slice]:
    """Yield slices of tokens of each row; their number changes no result, as every token is computed by itself."""
    size = max(1, PART_TOKENS * torch.get_num_threads() // rows)
    return (slice(begin, begin + size) for begin in range(0, tokens, size))


def workspace(operator: str, args: Sequence[Any], part: int) -> tuple[int, ...]:
    """Return the bytes that an operator allocates, or releases (below 0), one after the other, beside its results.

    Args:
        operator: its name; an operator of another file has none.
        args: its arguments.
        part: the number of tokens that it takes at a time.
    """
    if not operator.startswith("blocked_"):
        return ()
    backward = operator.endswith("_backward")
    first: torch.Tensor = args[0]
    width = first.element_size()
    if operator.startswith("blocked_rotary"):
        size = part * first.shape[1] * first.shape[-1] * width // 2
        return size, -size
    size = part * first.shape[2:].numel() if first.dim() > 2 else part * first.shape[-1]
    if operator.startswith("blocked_gated"):
        return size * width, -size * width
    size *= 12 if width == 2 else 8
    if not backward:
        return size, -size
    changes = [] if _is_viewed(first) else [first.nbytes]
    *_, offset, rounded, of_weight = args
    if not of_weight:
        return (*changes, size, -size, *(-change for change in changes))
    wide = width if rounded and not offset else 4
    converted = [] if wide == width else [wide * first.numel()]
    changes += [wide * first.numel(), size, -size, *converted, wide * first.numel()]
    return (*changes, -sum(changes))


def rms_norm(
    inputs: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``operators.rms_norm`` does for inputs [..., H]; the inverses are [N, 1]."""
    out: tuple[torch.Tensor, torch.Tensor] = _norm(inputs, inputs, weight, eps, offset, rounded)
    return out


@custom_op("trainwright::blocked_norm", mutates_args=())
def _norm(
    inputs: torch.Tensor, squared: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm. ``squared`` are the inputs once more: their part of the gradient is separate in fp32.

    The plain operations add both parts to the other gradients of the inputs one after the other, in half precision
    only their sum, after it is rounded.
    """
    rows, out = _rows(inputs), _like(inputs)
    inverses = _inverses(inputs)
    factors = _factors(weight, offset, rounded)
    for part in _parts(len(rows)):
        wide = rows[part].float()
        inverses[part] = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        normal = wide * inverses[part]
        _rows(out)[part] = (normal.to(inputs.dtype) if rounded else normal) * factors
    return out, inverses


@_norm.register_fake
def _(inputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(inputs), _inverses(inputs)


def _inverses(inputs: torch.Tensor) -> torch.Tensor:
    """Return memory for the inverse of every root [tokens, ..., 1], fp32."""
    return inputs.new_empty((*_rows(inputs).shape[:-1], 1), dtype=torch.float32)


@custom_op("trainwright::blocked_norm_backward", mutates_args=())
def _norm_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    inverses: torch.Tensor,
    offset: bool,
    rounded: bool,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the inputs, of ``squared``, empty in half precision, and of the weight, if wanted."""
    rows, of_rows = _rows(inputs), _rows(gradient)
    of_inputs, of_squared = _like(inputs), _like(inputs, inputs.dtype == torch.float32)
    factors = _factors(weight, offset, rounded)
    normal = rows.new_empty(rows.shape if of_weight else 0, dtype=factors.dtype)
    squared_rows = _rows(of_squared) if len(of_squared) else None
    for part in _parts(len(rows)):
        _differentiate(
            (of_rows[part], rows[part], factors, inverses[part]),
            _rows(of_inputs)[part],
            None if squared_rows is None else squared_rows[part],
            normal[part] if of_weight else None,
        )
    if of_weight:  # as a whole, since the order of the sum depends on the strides
        normal = (gradient.to(factors.dtype) * normal.view_as(gradient)).sum(tuple(range(gradient.dim() - 1)))
    return of_inputs, of_squared, normal.to(weight.dtype)


def _differentiate(
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    of_inputs: torch.Tensor,
    of_squared: torch.Tensor | None,
    normal: torch.Tensor | None,
) -> None:
    """Write the gradients of some tokens, and the normalized inputs, as ``_norm_backward`` returns or needs them.

    Args:
        numbers: the gradient of the results, the inputs, what they are multiplied by, and the inverses.
    """
    gradient, inputs, factors, inverse = numbers
    wide = inputs.float()
    if normal is not None:
        normal.copy_(wide * inverse)
    of_normal = (gradient.to(factors.dtype) * factors).float()
    of_inverse = (of_normal * wide).sum(-1, keepdim=True)
    of_mean = -0.5 * of_inverse * inverse.pow(3) / inputs.shape[-1]
    through_inverse = (2 * wide).mul_(of_mean)
    if of_squared is None:
        of_inputs.copy_(of_normal.mul_(inverse).add_(through_inverse))
    else:
        torch.mul(of_normal, inverse, out=of_inputs)
        of_squared.copy_(through_inverse)


@_norm_backward.register_fake
def _(gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return _like(inputs), _like(inputs, inputs.dtype == torch.float32), _like(weight, rest[-1])


def _like(tensor: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    """Return memory for a tensor like this one, empty if it is not wanted."""
    if not wanted:
        return tensor.new_empty(0)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return [tokens, ...] of [rows, length, ...]."""
    return tensor.flatten(0, 1) if tensor.dim() > 2 else tensor


def _is_viewed(tensor: torch.Tensor) -> bool:
    """Return whether ``_rows`` of a tensor are no copy."""
    return tensor.dim() < 3 or tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


def _factors(weight: torch.Tensor, offset: bool, rounded: bool) -> torch.Tensor:
    """Return what normalized numbers are multiplied by."""
    if offset:
        return 1.0 + weight.float()
    return weight if rounded else weight.float()


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    numbers, _, weight, _, ctx.offset, ctx.rounded = inputs
    ctx.save_for_backward(numbers, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients_of_norm(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2]
    of_inputs, of_squared, of_weight = _norm_backward(gradient, *ctx.saved_tensors, ctx.offset, ctx.rounded, wanted)
    return of_inputs, of_squared if len(of_squared) else None, of_weight if wanted else None, None, None, None


_norm.register_autograd(_gradients_of_norm, setup_context=_keep_norm)


@custom_op("trainwright::blocked_gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor, silu: bool) -> torch.Tensor:
    """Return ``act(gate) * up``, where act is SiLU, or GELU by its tanh formula."""
    out = _like(gate)
    gate, up, rows = _rows(gate), _rows(up), _rows(out)
    for part in _parts(len(gate)):
        torch.mul(_active(gate[part], silu), up[part], out=rows[part])
    return out


@gated.register_fake
def _(gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return _like(gate)


@custom_op("trainwright::blocked_gated_backward", mutates_args=())
def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up."""
    outs = _like(gate), _like(gate)
    of_gate, of_up = map(_rows, outs)
    gradient, gate, up = map(_rows, (gradient, gate, up))
    aten = torch.ops.aten
    for part in _parts(len(gate)):
        torch.mul(gradient[part], _active(gate[part], silu), out=of_up[part])
        if silu:
            aten.silu_backward.grad_input(gradient[part] * up[part], gate[part], grad_input=of_gate[part])
        else:
            backward = partial(aten.gelu_backward.grad_input, approximate="tanh")
            backward(gradient[part] * up[part], gate[part], grad_input=of_gate[part])
    return outs


@gated_backward.register_fake
def _(gradient: torch.Tensor, gate: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(gate), _like(gate)


def _active(gate: torch.Tensor, silu: bool) -> torch.Tensor:
    return functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")


def _keep_gated(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.silu = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*gated_backward(gradient, *ctx.saved_tensors, ctx.silu), None)


gated.register_autograd(_gated_backward, setup_context=_keep_gated)


@custom_op("trainwright::blocked_rotary", mutates_args=())
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [B, Hq, T, D] and keys [B, Hk, T, D], rotated by cos and sin [B or 1, T, D].

    ``inverse``: rotate back, which is the gradient.
    """
    return _rotated(query, cos, sin, inverse), _rotated(key, cos, sin, inverse)


@rotary.register_fake
def _(query: torch.Tensor, key: torch.Tensor, _cos: Any, _sin: Any, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _of_heads(query, inverse), _of_heads(key, inverse)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    out = _of_heads(heads, inverse)
    half = heads.shape[-1] // 2
    first, second = slice(half), slice(half, None)
    for part in _parts(heads.shape[2], len(heads)):
        x, y, c, s = heads[:, :, part], out[:, :, part], cos[:, None, part], sin[:, None, part]
        torch.mul(x, c, out=y)
        if inverse:
            y[..., first] += x[..., second] * s[..., second]
            y[..., second] -= x[..., first] * s[..., first]
        else:
            y[..., first] -= x[..., second] * s[..., first]
            y[..., second] += x[..., first] * s[..., second]
    return out


def _of_heads(heads: torch.Tensor, inverse: bool) -> torch.Tensor:
    """Return memory in the layout of the plain operations, in whose order norms of heads sum gradients."""
    return torch.empty_like(heads, memory_format=torch.contiguous_format if inverse else torch.preserve_format)


def _keep_rotary(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])


def _rotary_backward(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*rotary(of_query, of_key, *ctx.saved_tensors, True), None, None, None)


rotary.register_autograd(_rotary_backward, setup_context=_keep_rotary)
