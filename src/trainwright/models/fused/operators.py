"""The fused kernels as operators of torch: what they return, their gradients, and how they are launched.

Plans see them through their fake implementations. They are launched where their tensors are: on a GPU, or on a CPU by
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

_LARGEST_BLOCK = 4096  # columns of a row of logits that a program has in registers
_ELEMENTS = 1024  # of a program of elementwise kernels
_PROGRAMS = 512  # that share the rows of a norm's backward pass: some for each unit of a large GPU


@custom_op("trainwright::cross_entropy", mutates_args=("logits",))
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
    z_loss: float,
    smoothing: float,
) -> torch.Tensor:
    """Return the loss of each row [n] of logits [n, V], fp32, and overwrite the logits with the gradient of their sum.

    See ``linear_losses.Terms`` for the terms.
    """
    return _launch_loss(logits, targets, weights, None, (softcap, logit_scale, z_loss, smoothing))


@cross_entropy.register_fake
def _(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


@custom_op("trainwright::loss_and_correct", mutates_args=())
def loss_and_correct(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, logit_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of each row [n] of logits [n, V], fp32, and whether its target is the prediction."""
    correct = targets.new_empty(len(targets), dtype=torch.bool)
    return _launch_loss(logits, targets, None, correct, (softcap, logit_scale, 0.0, 0.0)), correct


@loss_and_correct.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    return losses, logits.new_empty(len(logits), dtype=torch.bool)


def _launch_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    correct: torch.Tensor | None,
    terms: tuple[float | None, float, float, float],
) -> torch.Tensor:
    """Launch a program for each row; with ``correct``, which it writes, it leaves the logits as they are."""
    from trainwright.models.fused import kernels

    assert logits.stride(1) == 1
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    softcap, logit_scale, z_loss, smoothing = terms
    block = min(_LARGEST_BLOCK, _round_up_to_power_of_two(logits.shape[1]))
    if len(logits):
        kernels.cross_entropy[(len(logits),)](
            logits,
            targets,
            losses if weights is None else weights,
            losses,
            losses if correct is None else correct,
            logits.stride(0),
            1.0 if softcap is None else softcap,
            logit_scale,
            z_loss,
            smoothing,
            VOCABULARY=logits.shape[1],
            CAPPED=softcap is not None,
            WEIGHTED=weights is not None,
            SMOOTHED=smoothing != 0,
            GRADIENT=correct is None,
            BLOCK=block,
            num_warps=8,
        )
    return losses


@custom_op("trainwright::rms_norm", mutates_args=())
def rms_norm(
    inputs: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square norm of inputs [..., H] times a weight [H], and the inverses of the roots [N], fp32.

    Args:
        offset: 1 is added to the weight.
        rounded: normalized numbers are rounded to their dtype before they are multiplied.
    """
    return _launch_norm(inputs, None, weight, (eps, offset, rounded))[1:]


def _launch_norm(
    inputs: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, formula: tuple[float, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of inputs and residual, if there is one, its norm, and the inverses."""
    from trainwright.models.fused import kernels

    inputs, width = inputs.contiguous(), inputs.shape[-1]
    out, rows = torch.empty_like(inputs), inputs.numel() // width
    total = inputs if residual is None else torch.empty_like(inputs)
    residual = inputs if residual is None else residual.contiguous()
    inverses = inputs.new_empty(rows, dtype=torch.float32)
    block, (eps, offset, rounded) = _round_up_to_power_of_two(width), formula
    if rows:
        kernels.rms_norm[(rows,)](
            inputs, residual, weight, total, out, inverses, width, eps,
            ADDED=total is not inputs, OFFSET=offset, ROUNDED=rounded, BLOCK=block, num_warps=_choose_warps(block),
        )  # fmt: skip
    return total, out, inverses


@rms_norm.register_fake
def _(inputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    return out, inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)


@custom_op("trainwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    inverses: torch.Tensor,
    of_total: torch.Tensor | None,
    offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the inputs, and parts of that of the weight [parts, H], fp32.

    ``of_total``: another part of the gradient of the inputs.
    """
    from trainwright.models.fused import kernels

    gradient, inputs = gradient.contiguous(), inputs.contiguous()
    rows, width = len(inverses), inputs.shape[-1]
    per_program = _choose_program_rows(rows)
    programs, block = -(-rows // per_program), _round_up_to_power_of_two(width)
    of_inputs, parts = torch.empty_like(inputs), inputs.new_empty((programs, width), dtype=torch.float32)
    if rows:
        kernels.rms_norm_backward[(programs,)](
            gradient, inputs, weight, inverses, gradient if of_total is None else of_total.contiguous(),
            of_inputs, parts, rows, width,
            ADDED=of_total is not None, OFFSET=offset, PER_PROGRAM=per_program, BLOCK=block,
            num_warps=_choose_warps(block),
        )  # fmt: skip
    return of_inputs, parts


@rms_norm_backward.register_fake
def _(gradient: torch.Tensor, inputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = inputs.shape[-1]
    rows = inputs.numel() // width
    programs = -(-rows // _choose_program_rows(rows))
    of_inputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    return of_inputs, inputs.new_empty((programs, width), dtype=torch.float32)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    numbers, weight, _, ctx.offset, _ = inputs
    ctx.save_for_backward(numbers, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _compute_norm_gradients(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    inputs, weight, inverses = ctx.saved_tensors
    of_inputs, parts = rms_norm_backward(gradient, inputs, weight, inverses, None, ctx.offset)
    of_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
    return of_inputs, of_weight, None, None, None


rms_norm.register_autograd(_compute_norm_gradients, setup_context=_keep_norm)


@custom_op("trainwright::add_rms_norm", mutates_args=())
def add_rms_norm(
    inputs: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs and residual [..., H] added, and what ``rms_norm`` returns for that."""
    return _launch_norm(inputs, residual, weight, (eps, offset, rounded))


@add_rms_norm.register_fake
def _(inputs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    inverses = inputs.new_empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(total), inverses


def _keep_sum(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, weight, _, ctx.offset, _ = inputs
    total, _, inverses = output
    ctx.save_for_backward(total, weight, inverses)
    ctx.mark_non_differentiable(inverses)


def _sum_backward(ctx: Any, of_total: torch.Tensor, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    total, weight, inverses = ctx.saved_tensors
    of_inputs, parts = rms_norm_backward(gradient, total, weight, inverses, of_total, ctx.offset)
    of_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
    return of_inputs, of_inputs, of_weight, None, None, None


add_rms_norm.register_autograd(_sum_backward, setup_context=_keep_sum)


@custom_op("trainwright::gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor, silu: bool) -> torch.Tensor:
    """Return ``act(gate) * up``, where act is SiLU, or GELU by its tanh formula."""
    from trainwright.models.fused import kernels

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        kernels.gated[(-(-gate.numel() // _ELEMENTS),)](gate, up, out, gate.numel(), SILU=silu, BLOCK=_ELEMENTS)
    return out


@gated.register_fake
def _(gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@custom_op("trainwright::gated_backward", mutates_args=())
def gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up."""
    from trainwright.models.fused import kernels

    gradient, gate, up = gradient.contiguous(), gate.contiguous(), up.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        kernels.gated_backward[(-(-gate.numel() // _ELEMENTS),)](
            gradient, gate, up, of_gate, of_up, gate.numel(), SILU=silu, BLOCK=_ELEMENTS
        )
    return of_gate, of_up


@gated_backward.register_fake
def _(gradient: torch.Tensor, gate: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def _keep_gated(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, ctx.silu = inputs
    ctx.save_for_backward(gate, up)


def _compute_gated_gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*gated_backward(gradient, *ctx.saved_tensors, ctx.silu), None)


gated.register_autograd(_compute_gated_gradients, setup_context=_keep_gated)


@custom_op("trainwright::rotary", mutates_args=())
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [B, Hq, T, D] and keys [B, Hk, T, D], rotated by cos and sin [B or 1, T, R], R of at most D.

    ``inverse``: rotate back, which is the gradient.
    """
    from trainwright.models.fused import kernels

    assert query.stride(-1) == key.stride(-1) == 1
    cos, sin = cos.contiguous(), sin.contiguous()
    size, rotated_size = query.shape[-1], cos.shape[-1]
    out, tokens = (_allocate_like(query), _allocate_like(key)), query.shape[2]
    query_heads, key_heads, half = (
        _round_up_to_power_of_two(n) for n in (query.shape[1], key.shape[1], rotated_size // 2)
    )
    if query.numel():
        kernels.rotary[(query.shape[0] * tokens,)](
            query,
            key,
            *out,
            cos,
            sin,
            tokens,
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            query.shape[1],
            key.shape[1],
            (*query.stride()[:3], *out[0].stride()[:3]),
            (*key.stride()[:3], *out[1].stride()[:3]),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            SIZE=size,
            ROTATED=rotated_size,
            HALF=half,
            REST=_round_up_to_power_of_two(max(1, size - rotated_size)),
            INVERSE=inverse,
            num_warps=max(4, _choose_warps(max(query_heads, key_heads) * half)),
        )
    return out


@rotary.register_fake
def _(query: torch.Tensor, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate_like(query), _allocate_like(key)


def _allocate_like(heads: torch.Tensor) -> torch.Tensor:
    """Return memory for [B, H, T, D] in which the heads of a token are next to each other."""
    rows, count, tokens, size = heads.shape
    return heads.new_empty((rows, tokens, count, size)).transpose(1, 2)


def register_rotary_gradients(operator: Any) -> None:
    """Register the gradients of an operator with the arguments of ``rotary``: the heads' gradients, rotated back."""

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[2:4])

    def backward(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_query, of_key = (x if x.stride(-1) == 1 else x.contiguous() for x in (of_query, of_key))
        return (*operator(of_query, of_key, *ctx.saved_tensors, True), None, None, None)

    operator.register_autograd(backward, setup_context=keep)


register_rotary_gradients(rotary)


def _choose_program_rows(rows: int) -> int:
    """Return how many rows a program of a norm's backward pass takes: a power of two, as each is compiled."""
    return _round_up_to_power_of_two(-(-rows // _PROGRAMS))


def _round_up_to_power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _choose_warps(block: int) -> int:
    """Return the warps of a program with ``block`` numbers in registers: 16 for each thread, so that all fit."""
    return min(16, max(1, block // 512))
