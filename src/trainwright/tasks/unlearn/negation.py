"""Task-vector negation (arXiv 2212.04089, section 3): theta_0 - scale (theta_forget - theta_0).

A run of it trains on the forget rows. What is written in the end are the weights of its start less what it has learnt;
its checkpoints and the metrics on the way are of the weights that have learnt it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trainwright.models.adapters.attaching import lora_layers

Named = Iterable[tuple[str, torch.Tensor]]


def negated(tensors: Named, before: Mapping[str, torch.Tensor], scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained parameters by name, each the other way round from what it was before; all else as it is."""
    for name, tensor in tensors:
        start = before.get(name)
        if start is not None:
            start = start.to(tensor.device, tensor.dtype)
            tensor = start - scale * (tensor - start)
        yield name, tensor


def negated_adapter(tensors: Named, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the matrices of a LoRA, which began by adding nothing, so that they add the opposite."""
    return ((name, tensor * -scale if ".lora_B." in name else tensor) for name, tensor in tensors)


@contextmanager
def scaled_adapter(model: nn.Module, factor: float) -> Iterator[None]:
    """Scale what the model's adapter adds by ``factor``."""
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
