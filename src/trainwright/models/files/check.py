"""Check a saved model: what ``from_pretrained`` loads has the trained weights and computes the trained model's logits.

Weights stay memory-mapped where the file has them in their final form, so that the check needs little memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import TrainingError
from trainwright.machine.detect import detect
from trainwright.models.configuration import no_progress_bar
from trainwright.models.files.save import checksum
from trainwright.text import size

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

# Largest difference of logits relative to the largest logit. Weights are compared exactly before, so this only has to
# tell another computation from rounding.
_SAME, _SAME_ON_DEVICES, _SAME_ROUNDED = 1e-3, 2e-2, 0.2


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, L, V] of a model in evaluation mode, in the dtype that it computes in."""
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def has_experts(model: nn.Module) -> bool:
    """Return whether a model is a mixture of experts, by its modules."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def logit_difference(found: torch.Tensor, expected: torch.Tensor, *, mixture: bool) -> float:
    """Return the largest difference of logits [B, L, V], relative to the largest logit.

    In a ``mixture`` of experts, rounding sends some tokens to other experts, and their logits differ by any amount. So
    it is that of the median position.
    """
    positions = (found.float() - expected.float()).abs().amax(-1).flatten()
    difference = positions.median() if mixture else positions.max()
    return float(difference / expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def check_saved(
    directory: Path, checksums: Mapping[str, int], input_ids: torch.Tensor, expected: torch.Tensor | None
) -> str | None:
    """Load the model in ``directory`` and compare it with the one that was saved.

    Args:
        checksums: what ``save_model`` returned.
        input_ids: [B, L], on any device.
        expected: the logits of the model that was saved; None: only weights are compared.

    Returns:
        Why it was not compared: it is larger than the free memory. None if it was.

    Raises:
        TrainingError: a weight or the logits differ.
    """
    from transformers import AutoModelForCausalLM

    written, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), detect().usable_bytes
    if written > free:
        return (
            f"{directory} was not compared with the trained model: it has {size(written)}, and {size(free)} of memory "
            "are free"
        )
    with no_progress_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", use_safetensors=True, local_files_only=True
        )
    stored = loaded.config.dtype
    for name, tensor in loaded.state_dict().items():
        exact = tensor.to(stored) if tensor.is_floating_point() else tensor
        if name in checksums and int(checksum(exact)) != checksums[name]:
            raise TrainingError(f"the model in {directory} is not the trained one: {name} loads with other values")
    if expected is None:
        return None
    difference = logit_difference(
        logits_of(loaded.eval(), input_ids.cpu()), expected.cpu(), mixture=has_experts(loaded)
    )
    exactly = expected.dtype is stored is torch.float32
    tolerance = _SAME_ROUNDED if not exactly else _SAME if expected.device.type == "cpu" else _SAME_ON_DEVICES
    if not difference <= tolerance:
        raise TrainingError(
            f"the model in {directory} does not compute what was trained: logits differ by {difference:.2g} of the "
            "largest"
        )
    return None
