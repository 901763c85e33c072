"""Frozen linear layers in 4 or 8 bits (Dettmers et al., QLoRA, arXiv 2305.14314; LLM.int8(), arXiv 2208.07339).

The quantized values are those of bitsandbytes, in a layer that multiplies in the precision of its input, on every
device and equally in training and evaluation. The layers of bitsandbytes do not: on a CPU with AVX512-BF16,
``Linear4bit`` repacks its weights in place in evaluation and multiplies in bf16 afterwards; it keeps the precision of
its first input; and ``Linear8bitLt`` also rounds activations, in columns that depend on the other rows of the batch,
but not in training on a CPU. The loss of a step would depend on the micro-batches. The layers here also keep their bits
in whatever dtype they are viewed as, which strategies need to shard them.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from trainwright.models.adapters.config import has_ending, list_expert_parameters
from trainwright.models.experts import WeightFormat, look_up_formats, store

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["nf4", "int8"]

_BLOCK = 64  # elements of NF4 per scale, and scales per second-level scale, as in the paper
_SCALES_BLOCK = 256
_AT_A_TIME = 2**20  # elements to quantize at once, which takes about 20 bytes each where there are data


class NF4(WeightFormat):
    """4 bits per element, and one scale per 64 elements."""

    scales: torch.Tensor

    def _quantize_weight(self, weight: torch.Tensor) -> torch.Tensor:
        flat = weight.reshape(-1)
        parts = [
            _import_functional().quantize_4bit(part, blocksize=_BLOCK, quant_type="nf4")
            for part in ([flat] if flat.is_meta else flat.split(_AT_A_TIME))
        ]
        self._keep_scales(torch.cat([state.absmax for _, state in parts]))
        return torch.cat([bits.reshape(-1) for bits, _ in parts])

    def _keep_scales(self, scales: torch.Tensor) -> None:
        self.register_buffer("scales", scales, persistent=False)

    def _scales(self) -> torch.Tensor:
        return self.scales

    def _dequantize_bits(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.bitsandbytes.dequantize_4bit.default(
            bits[:, None], self._scales(), _BLOCK, "nf4", self.shape, dtype
        )


class DoubleNF4(NF4):
    """4 bits per element, and one scale per 64 elements; scales minus their mean are quantized to 8 bits."""

    mean: torch.Tensor
    second_scales: torch.Tensor
    code: torch.Tensor

    def _keep_scales(self, scales: torch.Tensor) -> None:
        mean = scales.mean()
        bits, state = _import_functional().quantize_blockwise(scales - mean, blocksize=_SCALES_BLOCK)
        self.register_buffer("scales", bits, persistent=False)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("second_scales", state.absmax, persistent=False)
        self.register_buffer("code", state.code, persistent=False)

    def _scales(self) -> torch.Tensor:
        scales = torch.ops.bitsandbytes.dequantize_blockwise.default(
            self.scales, self.second_scales, self.code, _SCALES_BLOCK, torch.float32
        )
        return scales + self.mean


class Int8(WeightFormat):
    """8 bits per element, and one scale per row, which is the last dimension."""

    scales: torch.Tensor

    def _quantize_weight(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.reshape(-1, weight.shape[-1])
        rows = max(1, _AT_A_TIME // weight.shape[1])
        # bitsandbytes only supports fp16.
        parts = [_import_functional().int8_vectorwise_quant(part.to(torch.float16)) for part in weight.split(rows)]
        self.register_buffer("scales", torch.cat([scales for _, scales, _ in parts]) / 127, persistent=False)
        return torch.cat([bits for bits, _, _ in parts])

    def _dequantize_bits(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        integers = bits.view(torch.int8).view(-1, self.shape[-1])
        return integers.to(dtype).mul_(self.scales[:, None]).view(self.shape)


class QuantizedLinear(nn.Linear):
    """Compute ``x @ weight.T + bias`` with a frozen ``weight`` [out, in] that is dequantized for each product.

    Attributes:
        weight: its bits, as ``WeightFormat.store`` returns them.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: type[WeightFormat]) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.format = kind()
        self.weight = self.format.store(weight)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply by the dequantized weights."""
        return _Product.apply(input, self.weight, self.bias, self.expand)

    def expand(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight [out, in] of the bits ``weight``."""
        return self.format.expand(weight, dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The bits, under the name by which PEFT detects layers with ``dequantize``."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weight [out, in] in fp32."""
        return self.expand(self.weight, torch.float32)


class _Product(torch.autograd.Function):
    """A product with a weight that is dequantized for the forward pass and again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bits: torch.Tensor,
        bias: torch.Tensor | None,
        expand: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(bits)
        ctx.expand = expand
        return nn.functional.linear(input, expand(bits, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        return grad @ ctx.expand(bits, grad.dtype), None, None, None


def quantize(
    model: PreTrainedModel, kind: Quantization, *, double: bool, keep: Sequence[str] = (), experts: bool = False
) -> None:
    """Replace the linear layers of ``model``, except the head, one by one, and free their memory.

    Args:
        double: for nf4, whether its scales are quantized too.
        keep: name suffixes of modules that are not quantized.
        experts: also quantize weights of experts that the model keeps in one parameter (models/experts.py).
    """
    weight_format = Int8 if kind == "int8" else DoubleNF4 if double else NF4
    mapped_files = _list_mapped_ranges()
    for parent, name, layer in list(_iterate_linears(model, keep)):
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()  # Conv1D has [in, out]
        bias = None if layer.bias is None else layer.bias.detach().float()
        setattr(parent, name, QuantizedLinear(weight, bias, weight_format).train(layer.training))
        _release(layer.weight, mapped_files)
    for name in list_expert_parameters(model) if experts else ():
        if not has_ending(name, keep, inside=True):
            (path, _, short_name), weight = name.rpartition("."), model.get_parameter(name)
            store(model.get_submodule(path), short_name, weight_format())
            _release(weight, mapped_files)


def _iterate_linears(model: PreTrainedModel, keep: Sequence[str]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield parent, name and module of the layers to quantize."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for above, parent in model.named_modules():
        for name, layer in parent.named_children():
            excluded = layer is head or has_ending(f"{above}.{name}", keep, inside=True)
            if isinstance(layer, nn.Linear | Conv1D) and not excluded:
                yield parent, name, layer


def _list_mapped_ranges() -> list[tuple[int, int]]:
    """Return the address ranges of memory-mapped weight files; empty if the system does not provide them."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(".safetensors")]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def _release(tensor: torch.Tensor, mapped: list[tuple[int, int]]) -> None:
    """Release the memory pages of a tensor in a mapped file; they can be read from the file again."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if not tensor.is_contiguous() or not any(first <= begin and end <= last for first, last in mapped):
        return
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of all and of trainable parameters of ``module``; quantized ones count as dequantized."""
    sizes: dict[nn.Parameter, int] = {parameter: parameter.numel() for parameter in module.parameters()}
    sizes |= {bits: math.prod(weight_format.shape) for bits, weight_format in iterate_quantized_parameters(module)}
    return sum(sizes.values()), sum(size for parameter, size in sizes.items() if parameter.requires_grad)


def iterate_quantized_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, WeightFormat]]:
    """Yield the bits of every quantized weight, and how they are stored."""
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            yield part.get_parameter("weight"), part.format
        for name, weight_format in look_up_formats(part).items():
            yield part.get_parameter(name), weight_format


@cache
def _import_functional() -> Any:
    """Return bitsandbytes.functional; its import also registers the operators."""
    # It logs that it found no kernels on the Hub; none are requested.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes.functional")
