"""Freeze the parameters of a model that a recipe does not train."""

from __future__ import annotations

import re

from torch import nn

from trainwright.errors import RequestError
from trainwright.models.causal_lm import find_blocks
from trainwright.recipe.sections.model import ModelSection


def freeze(model: nn.Module, section: ModelSection, last_block: int | None = None) -> None:
    """Freeze parameters whose names match ``model.frozen``, or do not match ``model.trainable``; in full.

    Args:
        last_block: the loss depends on the output of this block, so later parameters are frozen too.

    Raises:
        RequestError: a pattern matches nothing, or no trainable parameters remain.
    """
    names = [name for name, _ in model.named_parameters()]
    for key in ("trainable", "frozen"):
        for pattern in getattr(section, key) or ():
            if not any(re.fullmatch(pattern, name) for name in names):
                raise RequestError(
                    f"model.{key}: {pattern} matches none of the {len(names)} names of the model's parameters, such "
                    f"as {names[len(names) // 2]}"
                )
    beyond = set[nn.Parameter]()
    if last_block is not None:
        beyond = _after(model, last_block)
    patterns = section.trained_patterns
    for name, parameter in model.named_parameters():
        trains = patterns is None or any(re.fullmatch(pattern, name) for pattern in patterns)
        parameter.requires_grad_(trains and parameter not in beyond)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if last_block is None:
            raise RequestError("model.frozen: nothing is left to train; match fewer names")
        raise RequestError(
            f"model.trainable: it only matches parameters after unlearn.layer {last_block}, which do not affect its "
            "output; match earlier blocks, or choose a later layer"
        )


def _after(model: nn.Module, last_block: int) -> set[nn.Parameter]:
    """Return parameters of later blocks and the head, on which the output of a block does not depend."""
    blocks = find_blocks(model)
    embeddings = set(model.get_input_embeddings().parameters())  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    later = [*blocks[last_block + 1 :], *([head] if head is not None else [])]
    return {parameter for module in later for parameter in module.parameters()} - embeddings
