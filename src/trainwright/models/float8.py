"""Compute the products of blocks' linear layers in 8 bits, or forward in 4: ``train.float8``.

``rowwise``: inputs, and gradients of results, are rounded to e4m3 with a scale for each row, weights with one for each
output in the forward pass and one for all in the backward pass, all scales powers of two; gradients of weights are
products in bf16. It is the recipe ``rowwise_with_gw_hp`` of torchao. A row is rounded as in any other batch, so losses
do not depend on how a batch is divided. ``tensorwise``: one scale for a whole tensor, which the other rows of a
micro-batch change, e5m2 for gradients, and gradients of weights in float8 too (arXiv 2209.05433). ``mxfp8``: e4m3 with
a power of two for every 32 numbers that a product sums over (OCP Microscaling Formats 1.0), rounded up as in arXiv
2506.08027; gradients of weights are products in bf16, as blocks of their sums would be of several rows. ``nvfp4``:
forward, e2m1 with a number in e4m3 for every 16 numbers that the product sums over (arXiv 2509.25149), below a power of
two for each row and one for a weight, which the result is multiplied with and which rounds nothing; backward as
``mxfp8``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.library import custom_op
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

_MULTIPLE = 16  # of the sizes of a product, on a GPU
_BLOCK, _BLOCK_OF_4_BITS = 32, 16  # numbers that have a scale in MXFP8, in NVFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of 4 bits, by the lower 3; not for compiled code
_ROUTERS = {"gate", "router"}  # small, and what they choose must not depend on rounding
_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_ROWS, _TENSOR = ScalingType.RowWise, ScalingType.TensorWise


def use_float8(blocks: Iterable[nn.Module], scales: str) -> int:
    """Let linear layers of ``blocks`` compute in float8, in place; return how many do.

    Routers and layers of sizes that are no multiples of 16, or of 32 for "mxfp8" and "nvfp4", are left as they are, and
    so are experts, which are no linear layers. ``scales``: a value of ``train.float8``.
    """
    if scales == "no":
        return 0
    _, multiple = _KINDS[scales]
    layers: list[Any] = [
        layer
        for block in blocks
        for name, layer in block.named_modules()
        if type(layer) is nn.Linear
        and layer.in_features % multiple == layer.out_features % multiple == 0
        and name.rpartition(".")[2] not in _ROUTERS
    ]
    for layer in layers:
        layer.float8 = scales
        layer.forward = MethodType(_apply_linear, layer)
    return len(layers)


def multiply_float8(x: torch.Tensor, weight: torch.Tensor, scales: str) -> torch.Tensor:
    """Return the product of rows [T, I] with a weight [O, I], transposed. ``scales``: as above, but not "no"."""
    return _KINDS[scales][0].apply(x, weight)


def _apply_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result = multiply_float8(x.flatten(0, -2), layer.weight, layer.float8).unflatten(0, x.shape[:-1])
    return result if layer.bias is None else result + layer.bias


class _ByRows(torch.autograd.Function):
    """The product, with a scale for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        rows, of_rows = _scale_by_powers(x, _compute_amax(x, 1))
        outputs, of_outputs = _scale_by_powers(weight, _compute_amax(weight, 1))
        return scaled_mm(
            rows, outputs.t(), of_rows, _ROWS, of_outputs.t(), _ROWS, output_dtype=x.dtype, use_fast_accum=x.is_cuda
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            rows, of_rows = _scale_by_powers(gradient, _compute_amax(gradient, 1))
            weight_values, weight_scale = _scale_by_powers(weight, _compute_amax(weight))
            of_inputs = weight_scale.expand(1, weight.shape[1]).contiguous()
            of_x = scaled_mm(
                rows, _lay_out_by_columns(weight_values), of_rows, _ROWS, of_inputs, _ROWS, output_dtype=x.dtype
            )
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ x
        return of_x, of_weight


class _ByTensors(torch.autograd.Function):
    """The same product, with a scale for each tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        (rows, of_rows), (outputs, of_outputs) = _scale_to_float8(x, _VALUES), _scale_to_float8(weight, _VALUES)
        return scaled_mm(
            rows, outputs.t(), of_rows, _TENSOR, of_outputs, _TENSOR, output_dtype=x.dtype, use_fast_accum=x.is_cuda
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        slopes, of_slopes = _scale_to_float8(gradients[0], _GRADIENTS)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            values, of_values = _scale_to_float8(weight, _VALUES)
            columns = _lay_out_by_columns(values)
            of_x = scaled_mm(slopes, columns, of_slopes, _TENSOR, of_values, _TENSOR, output_dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            values, of_values = _scale_to_float8(x, _VALUES)
            missing = -len(x) % _MULTIPLE  # rows of zeros: a sum over any number of tokens
            slopes, values = (nn.functional.pad(part, (0, 0, 0, missing)) for part in (slopes, values))
            left = slopes.t().contiguous()
            of_weight = scaled_mm(
                left, _lay_out_by_columns(values), of_slopes, _TENSOR, of_values, _TENSOR, output_dtype=x.dtype
            )
        return of_x, of_weight


class _ByBlocks(torch.autograd.Function):
    """The same product, with a scale for each block of what is summed over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        (rows, of_rows), (outputs, of_outputs) = _quantize_blocks(x), _quantize_blocks(weight)
        return block_product(rows, outputs.t(), of_rows, of_outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            (rows, of_rows), (inputs, of_inputs) = _quantize_blocks(gradient), _quantize_blocks(weight.t())
            of_x = block_product(rows, inputs.t(), of_rows, of_inputs)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ x
        return of_x, of_weight


class _InFourBits(_ByBlocks):
    """The same product in 4 bits; the backward pass is that of 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        limit = 6.0 * torch.finfo(_VALUES).max  # not of the module: torch.compile makes its numbers inputs of the graph
        row_factors, weight_factor = (
            _round_down_to_power(limit / largest) for largest in (_compute_amax(x, 1), _compute_amax(weight))
        )
        rows, of_rows = quantize_to_four_bits(x, row_factors)
        outputs, of_outputs = quantize_to_four_bits(weight, weight_factor)
        # Powers of two: the product in bf16 was rounded once, and is not again.
        factors = (row_factors * weight_factor).reciprocal().bfloat16()
        return block_product(rows, outputs.t(), of_rows, of_outputs) * factors


# By the value of ``train.float8``: the product, and what the sizes of a layer have to be multiples of.
_KINDS: dict[str, tuple[Any, int]] = {
    "rowwise": (_ByRows, _MULTIPLE),
    "tensorwise": (_ByTensors, _MULTIPLE),
    "mxfp8": (_ByBlocks, _BLOCK),
    "nvfp4": (_InFourBits, _BLOCK),
}


@custom_op("trainwright::block_product", mutates_args=())
def block_product(
    rows: torch.Tensor, columns: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows [T, K] with columns [K, O] in bf16, both in e4m3, or in bytes of two numbers in e2m1.

    An operator of its own, as Inductor refuses scales in the order of a GPU. A CPU multiplies the same numbers in bf16,
    which has them exactly.

    Args:
        of_rows: scales of blocks of rows: powers of two [T, K / 32], the bits of e8m0; of e2m1 [T, K / 16], of e4m3.
        of_columns: the same for blocks of columns [O, ...].
    """
    if rows.is_cuda:
        return multiply_blocks_on_gpu(rows, columns, of_rows, of_columns)
    return _dequantize_blocks(rows, of_rows) @ _dequantize_blocks(columns.t(), of_columns).t()


@block_product.register_fake
def _(rows: torch.Tensor, columns: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], columns.shape[1], dtype=torch.bfloat16)


def multiply_blocks_on_gpu(
    rows: torch.Tensor, columns: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor
) -> torch.Tensor:
    """Return the product of ``block_product`` as GPUs of compute capability 10.0 compute it."""
    kind, of_values, of_scales = ScalingType.BlockWise1x32, rows.dtype, torch.float8_e8m0fnu
    if rows.dtype == torch.uint8:
        kind, of_values, of_scales = ScalingType.BlockWise1x16, torch.float4_e2m1fn_x2, _VALUES
    values, outputs = (matrix.contiguous().view(of_values) for matrix in (rows, columns.t()))
    first, second = (swizzle_scales(scales).view(of_scales) for scales in (of_rows, of_columns))
    order = SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(values, outputs.t(), first, kind, second, kind, order, order)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [N, M] in the order of a GPU: tiles of 128 x 4, with 4 rows that are 32 apart beside each other.

    See https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout.
    """
    rows, columns = scales.shape
    padded_scales = nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    return padded_scales.view(-1, 4, 32, padded_scales.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def _quantize_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix [N, K] in e4m3, and the bits in e8m0 of the powers [N, K / 32] to multiply it with again."""
    blocks = matrix.unflatten(1, (-1, _BLOCK))
    values, scales = _scale_by_powers(blocks, _compute_amax(blocks, 2))
    return values.flatten(1).contiguous(), (scales.squeeze(2).view(torch.int32) >> 23).to(torch.uint8)


def quantize_to_four_bits(matrix: torch.Tensor, power: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix [N, K] times powers of two in e2m1, two numbers in a byte, and the bits in e4m3 of its scales.

    ``power``: [N, 1], or one for all; the scale of the largest block is not above 448.
    """
    blocks = (matrix.float() * power).unflatten(1, (-1, _BLOCK_OF_4_BITS))
    scales = (blocks.abs().amax(2) / 6.0).clamp_min(2.0**-9).to(_VALUES)  # no less than the smallest number of e4m3
    blocks = blocks / scales.float()[..., None]
    sizes = blocks.abs().clamp_max(6.0)
    # Numbers are 0.5, 1 and 2 apart, below 2, 4 and 6; halfway between two it is the one that ends in a 0, as usual.
    upper = torch.where(sizes < 4, sizes.round() + 2, (sizes / 2).round() + 4)
    codes = torch.where(sizes < 2, (2 * sizes).round(), upper)
    codes = torch.where(blocks < 0, codes + 8, codes).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.view(torch.uint8)


def _dequantize_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.uint8:
        numbers, of_scales = nn.functional.embedding(values.int(), _build_pair_table()).flatten(1), _VALUES
    else:
        numbers, of_scales = values.bfloat16(), torch.float8_e8m0fnu
    blocks = numbers.unflatten(1, (scales.shape[1], -1))
    return blocks.mul_(scales.view(of_scales).bfloat16()[..., None]).flatten(1)


@cache
def _build_pair_table() -> torch.Tensor:
    """Return the two numbers of e2m1 in each byte [256, 2], of which the first has the lower bits."""
    numbers = torch.tensor([sign * size for sign in (1, -1) for size in _E2M1], dtype=torch.bfloat16)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1)


def _compute_amax(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the largest magnitude of a tensor, or along ``dim``, which stays with a size of 1; fp32."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return largest.float().clamp_min(1e-12)


def _scale_by_powers(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in e4m3, and the powers of two to multiply it with again."""
    return _multiply_and_clamp(x, _round_down_to_power(torch.finfo(_VALUES).max / largest), _VALUES)


def _round_down_to_power(ratio: torch.Tensor) -> torch.Tensor:
    """Return the largest powers of two that are not above numbers; 0 for 0, the ratio to infinity, which gives NaN."""
    mantissa, exponent = torch.frexp(ratio)
    return torch.ldexp(mantissa.sign(), exponent - 1)


def _scale_to_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in float8, and the factor to multiply it with again."""
    return _multiply_and_clamp(x, torch.finfo(dtype).max / _compute_amax(x), dtype)


def _multiply_and_clamp(
    x: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    limit = torch.finfo(dtype).max
    return (x.float() * factors).clamp(-limit, limit).to(dtype), factors.reciprocal()


def _lay_out_by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose columns lie next to each other in memory, as the second of a product of float8 has to."""
    return matrix.t().contiguous().t()
