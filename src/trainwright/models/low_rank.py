"""Compute a frozen linear layer and its LoRA matrices in one function of autograd.

PEFT's layer adds ``scale * B(A(x))`` to the layer's result by four operations, of which two read and write the whole
result, and so does its backward pass. Here the products add in place (``addmm_``), forward and backward, and nothing is
kept that PEFT's layer does not keep. Sums are in another order; in low precision there is a rounding less.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwright.models.quantization import QuantizedLinear


def join_adapters(model: nn.Module) -> int:
    """Let LoRA layers of ``model`` use the function, in passes with gradients; return how many do.

    Layers with dropout, DoRA or biases of their own keep PEFT's code, and so do those that are not linear.
    """
    from peft.tuners.lora.layer import Linear

    layers: list[Any] = [module for module in model.modules() if isinstance(module, Linear) and _is_plain(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def separate_adapters(block: nn.Module) -> None:
    """Let the LoRA layers of ``block`` use PEFT's code again."""
    for module in block.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward


def _is_plain(layer: Any) -> bool:
    base = layer.get_base_layer()
    if type(base) is not nn.Linear and not isinstance(base, QuantizedLinear):
        return False
    rates = [getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()]
    return not any(rates) and not layer.lora_variant and all(b.bias is None for b in layer.lora_B.values())


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = [name for name in self.active_adapters if name in self.lora_A]
    base, matrices = self.get_base_layer(), [m.weight for name in names for m in (self.lora_A[name], self.lora_B[name])]
    off = args or kwargs or self.disable_adapters or self.merged or not names or not torch.is_grad_enabled()
    dtypes = {matrix.dtype for matrix in (*matrices, x if isinstance(base, QuantizedLinear) else base.weight)}
    if off or base.weight.requires_grad or dtypes != {x.dtype}:
        return type(self).forward(self, x, *args, **kwargs)
    expand = base.expand if isinstance(base, QuantizedLinear) else None
    how = _How(expand, tuple(self.scaling[name] for name in names))
    return _Joined.apply(x, base.weight, base.bias, how, *matrices)


class _How(NamedTuple):
    """How a layer computes. ``expand``: dequantizes its weight. ``scales``: of each pair of matrices."""

    expand: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None
    scales: tuple[float, ...]

    def weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [out, in]."""
        return weight if self.expand is None else self.expand(weight, dtype)


class _Joined(torch.autograd.Function):
    """``x @ weight.T + bias + sum of scale * (x @ a.T) @ b.T`` for pairs of matrices a [r, in] and b [out, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: _How, *matrices: torch.Tensor
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = nn.functional.linear(rows, how.weight(weight, x.dtype), bias)
        inner = []
        for a, b, scale in zip(matrices[::2], matrices[1::2], how.scales, strict=True):
            inner.append(rows @ a.t())
            out.addmm_(inner[-1], b.t(), alpha=scale)
        ctx.how = how
        ctx.save_for_backward(x, weight, *matrices, *inner)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how: _How = ctx.how
        pairs = len(how.scales)
        x, weight, *low_rank_tensors = ctx.saved_tensors
        matrices, inner = low_rank_tensors[: 2 * pairs], low_rank_tensors[2 * pairs :]
        needs_gradient = ctx.needs_input_grad
        rows, slopes = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = slopes @ how.weight(weight, slopes.dtype) if needs_gradient[0] else None
        of_matrices: list[torch.Tensor | None] = []
        for index, scale in enumerate(how.scales):
            a, b = matrices[2 * index : 2 * index + 2]
            of_inner = (slopes @ b).mul_(scale)
            of_matrices.append(of_inner.t() @ rows if needs_gradient[4 + 2 * index] else None)
            of_matrices.append((slopes.t() @ inner[index]).mul_(scale) if needs_gradient[5 + 2 * index] else None)
            if of_x is not None:
                of_x.addmm_(of_inner, a)
        return None if of_x is None else of_x.view(x.shape), None, None, None, *of_matrices
