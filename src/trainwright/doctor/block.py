"""One block of a llama in plain torch, to measure how fast kernels are within a step.

It runs the operations of ``transformers``' block on packed sequences. The model itself is not used, because its import
alone takes longer than the whole quick measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from trainwright.doctor.calibrate_cases import DTYPES, CalibrationCase, Run, unequal_lengths
from trainwright.models.attention.cpu_flash import flash_backward, flash_forward


class Sizes(NamedTuple):
    """Sizes of a block, and of the sequences that it runs on; the sizes of samples of the curves ``block/``."""

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    sequences: int
    length: int


def blocks_of(sizes: Sizes, precision: str) -> Iterator[CalibrationCase]:
    """Yield the forward and the backward pass of a block as cases: a model has other blocks between the two."""
    for direction in ("forward", "backward"):
        build = partial(_pass, sizes, DTYPES[precision], direction)
        yield CalibrationCase(f"block/{precision}/{direction}", tuple(map(float, sizes)), False, build, cold=True)


def _pass(sizes: Sizes, dtype: torch.dtype, direction: str) -> Run:
    query, key = sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    shapes = [(query, sizes.hidden), (key, sizes.hidden), (key, sizes.hidden), (sizes.hidden, query)]
    shapes += [(sizes.intermediate, sizes.hidden)] * 2 + [(sizes.hidden, sizes.intermediate)]
    matrices = [torch.full(shape, 0.01, dtype=dtype).requires_grad_() for shape in shapes]
    norms = [torch.ones(sizes.hidden, dtype=dtype).requires_grad_() for _ in range(2)]
    tokens = sum(unequal_lengths(sizes.sequences, sizes.length))
    hidden = torch.ones(1, tokens, sizes.hidden, dtype=dtype).requires_grad_()
    angles = torch.arange(float(tokens))[:, None].expand(tokens, sizes.head_dim)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    forward = partial(_forward, hidden, matrices, norms, rotation, sizes)
    if direction == "forward":
        return forward
    output = forward()
    return lambda: backward(output, (hidden, *matrices, *norms))


def _forward(
    hidden: torch.Tensor,
    matrices: list[torch.Tensor],
    norms: list[torch.Tensor],
    rotation: tuple[torch.Tensor, torch.Tensor],
    sizes: Sizes,
) -> torch.Tensor:
    query, key, value, out, gate, up, down = matrices
    normed = _norm(hidden, norms[0])
    heads = [_heads(F.linear(normed, matrix), sizes.head_dim) for matrix in (query, key, value)]
    rotated = [_rotated(one, *rotation) for one in heads[:2]]
    attended = _attention(rotated[0], rotated[1], heads[2], sizes)
    hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), out)
    normed = _norm(hidden, norms[1])
    return hidden + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(hidden.dtype)


def _heads(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    groups = sizes.heads // sizes.key_value_heads
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    return packed_attention(query, key, value, unequal_lengths(sizes.sequences, sizes.length))


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Return causal attention [1, H, T, D] within sequences of ``lengths``, as models/attention does on a CPU."""
    attended: torch.Tensor = _PackedAttention.apply(query, key, value, lengths)
    return attended


class _PackedAttention(torch.autograd.Function):
    """The functions of the custom operators of models/attention: calling those imports torch's compiler."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        query, key, value, lengths = args
        boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        ctx.rest = boundaries, query.shape[-1] ** -0.5
        output, logsumexp = flash_forward(query, key, value, *ctx.rest)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *flash_backward(*grads, *ctx.saved_tensors, *ctx.rest), None


def backward(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run ``torch.autograd.grad`` without its import of torch's compiler."""
    engine = torch.autograd.Variable._execution_engine
    gradients = (torch.ones_like(output),)
    input_gradients: tuple[torch.Tensor, ...] = engine.run_backward(
        (output,), gradients, True, False, tuple(inputs), False, accumulate_grad=False
    )
    return input_gradients
