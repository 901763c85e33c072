"""Whether one process can hold a model while it trains it, and a cut of the model where it cannot."""

from __future__ import annotations

from pathlib import Path

from trainwright.errors import MachineError
from trainwright.machine.detect import Machine
from trainwright.recipe.sections.model import ModelSection
from trainwright.text import count, size

# fp32 masters, gradients and AdamW's two moments.
_BYTES = 16
# What is left over is for activations, and for whatever else the machine does.
_USABLE = 0.8


def fitting_model(model: ModelSection, machine: Machine, directory: Path) -> tuple[ModelSection, str | None]:
    """Return the model, or one cut to its first layers where one process of this machine cannot train the whole.

    Args:
        directory: where a cut model is written.

    Returns:
        The section to train, and what was done in words; None when it is the whole model.

    Raises:
        MachineError: not even one layer fits, or there is no cutting it.
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
                return cut, f"cut to its first {kept} of {layers} layers on both sides: {problem}"
    except (ValueError, TypeError, AttributeError) as error:  # of a configuration that says it in a way of its own
        raise MachineError(f"{problem}; and the model cannot be cut to fewer layers: {error}") from error
    raise MachineError(f"{problem}; not even one of its {layers} layers fits, so there is nothing to compare with")
