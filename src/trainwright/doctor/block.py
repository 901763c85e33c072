"""One block of a llama in plain torch, to measure how fast kernels are within a step.

It runs the operations of ``transformers``' block on packed sequences. The model itself is not used, because its import
alone takes longer than the whole quick measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trainwright.doctor.calibrate_cases import DTYPES, Case, Run
from trainwright.models.attention.cpu_flash import BF16_FROM_LENGTH


class Sizes(NamedTuple):
    """Sizes of a block, and of the documents that it runs on; the sizes of samples of the curves ``block/``."""

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    documents: int
    length: int


def blocks_of(sizes: Sizes, precision: str) -> Iterator[Case]:
    """Yield the forward and the backward pass of a block as cases: a model has other blocks between the two."""
    for direction in ("forward", "backward"):
        build = partial(_pass, sizes, DTYPES[precision], direction)
        yield Case(f"block/{precision}/{direction}", tuple(map(float, sizes)), False, build, cold=True)


def _pass(sizes: Sizes, dtype: torch.dtype, direction: str) -> Run:
    query, key = sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    shapes = [(query, sizes.hidden), (key, sizes.hidden), (key, sizes.hidden), (sizes.hidden, query)]
    shapes += [(sizes.intermediate, sizes.hidden)] * 2 + [(sizes.hidden, sizes.intermediate)]
    matrices = [torch.full(shape, 0.01, dtype=dtype).requires_grad_() for shape in shapes]
    norms = [torch.ones(sizes.hidden, dtype=dtype).requires_grad_() for _ in range(2)]
    tokens = sizes.documents * sizes.length
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
    """Return attention within each document, as models/attention computes it on a CPU."""
    dtype, groups = query.dtype, sizes.heads // sizes.key_value_heads
    work = torch.float32 if sizes.length < BF16_FROM_LENGTH else dtype
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    documents = zip(*(x.to(work).split(sizes.length, dim=2) for x in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in documents]
    return torch.cat(found, dim=2).to(dtype)


def backward(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """Run ``torch.autograd.grad`` without its import of torch's compiler."""
    engine = torch.autograd.Variable._execution_engine
    gradients = (torch.ones_like(output),)
    engine.run_backward((output,), gradients, True, False, tuple(inputs), False, accumulate_grad=False)
