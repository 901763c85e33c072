"""Check whether one process can train a model, and cut the model if it cannot."""

from __future__ import annotations

from pathlib import Path

from trainwright.errors import MachineError
from trainwright.machine.machine import Machine
from trainwright.recipe.sections.model import ModelSection
from trainwright.text import count, size

# fp32 master weights, gradients and AdamW's two moments.
_BYTES = 16
# The rest is for activations and other programs.
_USABLE = 0.8


def fitting_model(model: ModelSection, machine: Machine, directory: Path) -> tuple[ModelSection, str | None]:
    """Return the model, or one cut to its first layers if one process of this machine cannot train it in full.

    Args:
        directory: where a cut model is written.

    Returns:
        The section to train, and a message about the cut; None for the full model.

    Raises:
        MachineError: not even one layer fits, or the model cannot be cut.
    """
    from trainwright.models.cut import MOST_LAYERS, cut_model, layer_count, parameter_count
    from trainwright.models.load import load_config

    config = load_config(model)
    memory = min((gpu.memory_bytes for gpu in machine.gpus), default=machine.memory_bytes)
    where = "one GPU" if machine.gpus else "this machine"
    whole = parameter_count(config)
    if whole * _BYTES <= memory * _USABLE:
        return model, None
    problem = (
        f"{count(whole)} parameters with their optimizer need {size(whole * _BYTES)}, and {where} has {size(memory)}"
    )
    layers = layer_count(config)
    try:
        for kept in range(min(MOST_LAYERS, layers - 1), 0, -1):
            if parameter_count(config, kept) * _BYTES <= memory * _USABLE:
                cut = cut_model(model, kept, directory)
                return cut, f"both sides use only the first {kept} of {layers} layers: {problem}"
    except (ValueError, TypeError, AttributeError) as error:  # of a configuration with other names
        raise MachineError(f"{problem}; and the model cannot be cut to fewer layers: {error}") from error
    raise MachineError(f"{problem}; not even one of its {layers} layers fits, so it cannot be compared")
