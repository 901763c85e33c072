"""Select the parameters that unlearning trains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from trainwright.errors import RequestError
from trainwright.models.causal_lm import find_blocks


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
