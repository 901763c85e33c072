"""Weights of experts that are stored quantized, and the products of tokens with them.

transformers keeps the matrices of all experts in one parameter [experts, ...]. PEFT adds the products of LoRA matrices
to such weights; for quantized ones, all of them would be dequantized and kept for the backward pass, and PEFT 0.21 does
not remove its parametrization from one that has another. Here the tokens of each expert are multiplied by its matrix,
which is dequantized again in the backward pass, and by its LoRA matrices. The order of tokens and the sums are those of
transformers' grouped products (transformers/integrations/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import grouped_mm, pad

_ALIGNMENT = 4  # bytes, so that the bits can be viewed as any compute dtype
_FORMATS = "formats"  # the module of experts that has them
_RANKS = 8  # grouped products take rows of multiples of 16 bytes


class WeightFormat(nn.Module):
    """How the elements of a frozen weight are stored.

    Attributes:
        shape: of the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self._bytes = 0

    def store(self, weight: torch.Tensor) -> nn.Parameter:
        """Return the bits of ``weight``, flat, which may be viewed as any dtype of whole bytes, and keep its scales."""
        self.shape = tuple(weight.shape)
        bits = self._quantize_weight(weight.detach()).reshape(-1).view(torch.uint8)
        self._bytes = len(bits)
        return nn.Parameter(nn.functional.pad(bits, (0, -self._bytes % _ALIGNMENT)), requires_grad=False)

    def expand(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of ``bits``, in its shape."""
        return self._dequantize_bits(bits.reshape(-1).view(torch.uint8)[: self._bytes], dtype)

    def _quantize_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the bits of a weight, and register the buffers needed to dequantize them."""
        raise NotImplementedError

    def _dequantize_bits(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


def store(experts: nn.Module, name: str, weight_format: WeightFormat) -> None:
    """Store the parameter ``name`` of experts in ``weight_format``, and let the module compute with it."""
    setattr(experts, name, weight_format.store(experts.get_parameter(name)))
    experts.add_module(_FORMATS, nn.ModuleDict({**look_up_formats(experts), name: weight_format}))
    experts.forward = MethodType(_forward, experts)


def look_up_formats(module: nn.Module) -> Mapping[str, WeightFormat]:
    """Return how weights of a module of experts are stored, by their names; nothing of other modules."""
    formats: Any = dict(module.named_children()).get(_FORMATS, {})
    return dict(formats.items())


@contextmanager
def expose_weight_shapes(model: nn.Module) -> Iterator[None]:
    """Let PEFT adapt quantized experts: meanwhile their parameters have the shapes of the weights, and no memory."""
    entries = [(part, name, part.get_parameter(name)) for part in model.modules() for name in look_up_formats(part)]
    for part, name, bits in entries:
        shape = bits.new_empty((), dtype=torch.float32).expand(look_up_formats(part)[name].shape)
        setattr(part, name, nn.Parameter(shape, requires_grad=False))
    try:
        yield
    finally:
        for part, name, bits in entries:
            setattr(part, name, bits)
        layers: list[Any] = [part for part in model.modules() if entries and hasattr(part, "parameter_name")]
        for layer in layers:
            if look_up_formats(layer.get_base_layer()):
                layer.forward = MethodType(_forward, layer)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the outputs [T, H] of experts, or of PEFT's layers around them, for ``hidden_states`` [T, H], with the
    indices of each token's experts and their weights [T, K].
    """
    experts, adapters = self, {}
    while (name := getattr(experts, "parameter_name", None)) is not None:
        adapters[name], experts = experts, experts.base_layer
    sorted_experts, order = top_k_index.reshape(-1).sort(stable=True)
    every = torch.arange(experts.num_experts, device=sorted_experts.device)
    ends = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight, weight_format = getattr(experts, name), look_up_formats(experts).get(name)
        if weight_format is None:
            result = grouped_mm(rows, weight if experts.is_transposed else weight.mT, offs=ends)
        else:
            result = _GroupedProduct.apply(rows, weight, ends, weight_format.expand, experts.is_transposed)
        if name in adapters:
            result = _add_lora_products(adapters[name], rows, ends, result)
        return result + getattr(experts, f"{name}_bias")[sorted_experts] if experts.has_bias else result

    rows = hidden_states[order // top_k_index.shape[-1]]
    if experts.has_gate:
        inner = experts._apply_gate(product("gate_up_proj", rows))  # which models override
    else:
        inner = experts.act_fn(product("up_proj", rows))
    outputs = product("down_proj", inner)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    outputs = (outputs * top_k_weights.reshape(-1)[order, None])[order.argsort()]
    return outputs.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def _add_lora_products(layer: Any, rows: torch.Tensor, ends: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Add the products of the LoRA matrices of each expert, in PEFT's layouts [E * r, in] and [out, r * E]."""
    for name in () if layer.disable_adapters else layer.active_adapters:
        if name in layer.lora_A:
            rank, more = layer.r[name], -layer.r[name] % _RANKS
            a = layer.lora_A[name].weight.to(rows.dtype).view(layer.num_experts, rank, -1)
            b = layer.lora_B[name].weight.to(rows.dtype).view(-1, rank, layer.num_experts).permute(2, 1, 0)
            a, b = pad(a, (0, 0, 0, more)), pad(b, (0, 0, 0, more)).contiguous()
            inner = grouped_mm(rows, a.mT, offs=ends)
            result = result + grouped_mm(inner, b, offs=ends) * layer.scaling[name]
    return result


class _GroupedProduct(torch.autograd.Function):
    """Grouped products with weights that are dequantized for the forward pass and again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        bits: torch.Tensor,
        ends: torch.Tensor,
        expand: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(bits, ends)
        ctx.how = expand, transposed
        weight = expand(bits, rows.dtype)
        return grouped_mm(rows, weight if transposed else weight.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (bits, ends), (expand, transposed) = ctx.saved_tensors, ctx.how
        weight = expand(bits, grad.dtype)
        return grouped_mm(grad.contiguous(), weight.mT if transposed else weight, offs=ends), None, None, None, None
