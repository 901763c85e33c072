"""Attacks to recover forgotten knowledge: a little training on some of it, and quantization.

Both attacks change the given model. They measure the mean probability of the answers of the forget set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.evaluation.unlearning.findings import mean_loss
from trainwright.inference.loading import Loaded
from trainwright.inference.scoring import score
from trainwright.models.quantization import Quantization, quantize
from trainwright.parallel.world import World

KINDS: tuple[Quantization, ...] = ("int8", "nf4")
_SHOWN = 0.25  # fraction of the forget set that relearning trains on
_LOOKS = 4  # number of measurements on the rest
_TOKENS = {"cpu": 2048, "cuda": 16384}  # per pass
_OF_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Relearning:
    """Settings of relearning: ``steps`` of AdamW on all the rows that it trains on."""

    steps: int = 20
    learning_rate: float = 1e-5


def quantized_probability(loaded: Loaded, forget: TokenDataset, kind: Quantization, world: World) -> float:
    """Return the probability after quantizing every linear layer (Zhang et al., arXiv 2410.16454). Every rank must
    call.

    Raises:
        RequestError: the model is already quantized.
    """
    model = loaded.lm.model
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise RequestError("--metrics quantisation: the model is already quantized")
    quantize(model, kind, double=False, keep=_OF_ADAPTERS)
    loaded.lm.to(world.device)
    return probability(loaded, forget, world)


def relearn(loaded: Loaded, forget: TokenDataset, how: Relearning, world: World) -> dict[str, float]:
    """Return the probability of the rest of the forget set, by the number of steps, while training on its first quarter
    again (Hu et al., arXiv 2406.13356).

    Every rank must call; each takes every step, so all have the same model.

    Raises:
        RequestError: the forget set has no rows to leave out.
    """
    if len(forget) < 2:
        raise RequestError(
            "--metrics relearning: the forget set has only one row, but some must be held out to measure"
        )
    shown = max(1, int(len(forget) * _SHOWN))
    rest = forget.part(range(shown, len(forget)))
    batches = _batches(forget.part(range(shown)), world)
    weights = [each for each in loaded.lm.parameters() if each.is_floating_point()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=how.learning_rate, weight_decay=0.0)
    looks = {round(how.steps * look / _LOOKS) for look in range(_LOOKS + 1)}
    found = {}
    for step in range(how.steps + 1):
        if step in looks:
            found[str(step)] = probability(loaded, rest, world)
        if step < how.steps:
            _step(loaded, batches, optimizer)
    return found


def _step(loaded: Loaded, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
    targets = sum(len(batch.targets) for batch in batches)
    with torch.enable_grad():
        for batch in batches:
            (loaded.lm(batch) / targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _batches(dataset: TokenDataset, world: World) -> list[Batch]:
    """Return all examples in batches, as large as the tokens of a pass allow."""
    parts: list[list[int]] = [[]]
    for index in range(len(dataset)):
        longest = max(map(dataset.length, [*parts[-1], index]))
        if parts[-1] and longest * (len(parts[-1]) + 1) > _TOKENS[world.device.type]:
            parts.append([])
        parts[-1].append(index)
    return [collate_examples(dataset, part, packed=False).to(world.device) for part in parts]


def probability(loaded: Loaded, dataset: TokenDataset, world: World) -> float:
    """Return the mean probability per token of the targets of every document. Every rank must call."""
    return float(np.mean([np.exp(-mean_loss(each)) for each in score(loaded.lm, dataset, world)]))
