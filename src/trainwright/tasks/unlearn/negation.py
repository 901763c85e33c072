"""Task-vector negation (arXiv 2212.04089, section 3): theta_0 - scale (theta_forget - theta_0).

The run trains on the forget rows. Only the exported model is negated; checkpoints and metrics are those of the trained
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainwright.models.adapters.attaching import lora_layers

Named = Iterable[tuple[str, torch.Tensor]]


def negated(tensors: Named, before: Mapping[str, torch.Tensor], scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters by name: those in ``before`` with their change negated and scaled, others unchanged."""
    for name, tensor in tensors:
        start = before.get(name)
        if start is not None:
            start = start.to(tensor.device, tensor.dtype)
            tensor = start - scale * (tensor - start)
        yield name, tensor


def negated_adapter(tensors: Named, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Negate and scale the matrices of a LoRA, which was initially zero."""
    return ((name, tensor * -scale if ".lora_B." in name else tensor) for name, tensor in tensors)


@contextmanager
def scaled_adapter(model: nn.Module, factor: float) -> Iterator[None]:
    """Scale the contribution of the model's adapter by ``factor``."""
    scales = [layer.scaling for _, layer in lora_layers(model)]
    before = [dict(scaling) for scaling in scales]
    for scaling in scales:
        for name in scaling:
            scaling[name] *= factor
    try:
        yield
    finally:
        for scaling, old in zip(scales, before, strict=True):
            scaling.update(old)
