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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference of logits relative to the largest logit. Weights are compared exactly before, so this only has to
# tell another computation from rounding.
_SAME, _SAME_ON_DEVICES, _SAME_ROUNDED = 1e-3, 2e-2, 0.2


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, L, V] of a model in evaluation mode, in the dtype that it computes in."""
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def check_saved(
    directory: Path, checksums: Mapping[str, int], input_ids: torch.Tensor, expected: torch.Tensor | None
) -> None:
    """Load the model in ``directory`` and compare it with the one that was saved.

    A model that is larger than the free memory is not loaded.

    Args:
        checksums: what ``save_model`` returned.
        input_ids: [B, L], on any device.
        expected: the logits of the model that was saved; None: only weights are compared.

    Raises:
        TrainingError: a weight or the logits differ.
    """
    from transformers import AutoModelForCausalLM

    if sum(file.stat().st_size for file in directory.glob("*.safetensors")) > detect().usable_bytes:
        return
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
        return
    logits = logits_of(loaded.eval(), input_ids.cpu())
    difference, largest = float((logits.float() - expected.float().cpu()).abs().max()), float(expected.abs().max())
    exactly = expected.dtype is stored is torch.float32
    tolerance = _SAME_ROUNDED if not exactly else _SAME if expected.device.type == "cpu" else _SAME_ON_DEVICES
    if not difference <= tolerance * largest:
        raise TrainingError(
            f"the model in {directory} does not compute what was trained: logits differ by up to {difference:.2g}, "
            f"and the largest is {largest:.2g}"
        )
