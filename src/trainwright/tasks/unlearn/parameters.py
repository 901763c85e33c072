"""Select the parameters that unlearning trains, and negate what they have learned.

Task-vector negation (arXiv 2212.04089, section 3) is theta_0 - scale (theta_forget - theta_0): the run trains on the
forget rows, and only the exported model is negated; checkpoints and metrics are those of the trained weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainwright.errors import RequestError
from trainwright.models.adapters.attaching import lora_layers
from trainwright.models.causal_lm import find_blocks

Named = Iterable[tuple[str, torch.Tensor]]


def freeze_others(model: nn.Module, patterns: Sequence[str] | None, last_block: int | None) -> None:
    """Freeze parameters whose names do not fully match any of ``patterns``; None freezes none.

    Args:
        last_block: the loss depends on the output of this block, so later parameters are frozen too.

    Raises:
        RequestError: a pattern matches nothing, or no trainable parameters remain.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns or ():
        if not any(re.fullmatch(pattern, name) for name in names):
            raise RequestError(
                f"unlearn.trainable: {pattern} matches none of the {len(names)} names of the model's parameters, such "
                f"as {names[len(names) // 2]}"
            )
    beyond = set[nn.Parameter]()
    if last_block is not None:
        beyond = _after(model, last_block)
    for name, parameter in model.named_parameters():
        wanted = patterns is None or any(re.fullmatch(pattern, name) for pattern in patterns)
        parameter.requires_grad_(wanted and parameter not in beyond)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(
            f"unlearn.trainable: it only matches parameters after unlearn.layer {last_block}, which do not affect its "
            "output; match earlier blocks, or choose a later layer"
        )


def _after(model: nn.Module, last_block: int) -> set[nn.Parameter]:
    """Return parameters of later blocks and the head, on which the output of a block does not depend."""
    blocks = find_blocks(model)
    embeddings = set(model.get_input_embeddings().parameters())  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    later = [*blocks[last_block + 1 :], *([head] if head is not None else [])]
    return {parameter for module in later for parameter in module.parameters()} - embeddings


def check_layer(layer: int, blocks: int) -> None:
    """Raise RequestError unless a model with ``blocks`` blocks has this layer."""
    if layer >= blocks:
        raise RequestError(
            f"unlearn.layer: {layer} does not exist: the model has {blocks} blocks, 0 to {blocks - 1}; choose one of "
            "the first half"
        )


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
