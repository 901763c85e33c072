"""How likely a model holds given texts: the log-likelihood of every token that is a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.batch import collate
from trainwright.data.dataset import TokenDataset
from trainwright.data.stream import MicroBatch
from trainwright.inference.batching import Done, by_length, over_ranks
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World

# Tokens of a batch: enough for a processor or a GPU to be busy with.
_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class TokenScores:
    """Of one example, in the order of its targets.

    Attributes:
        losses: negative log-likelihoods in nats, fp32 [targets].
        correct: whether the target was the likeliest token [targets].
    """

    losses: npt.NDArray[np.float32]
    correct: npt.NDArray[np.bool_]


def score(
    lm: CausalLM,
    dataset: TokenDataset,
    world: World,
    *,
    tokens: int | None = None,
    done: Done = lambda examples: None,
) -> list[TokenScores]:
    """Score the targets of every example, each a document, on every rank. Every rank must call, with the whole model.

    Args:
        lm: on the world's device; where it is not packed, examples are padded to the longest of a batch.
        tokens: of a batch.

    Raises:
        MachineError: memory runs out with a single example.
    """
    lengths = [dataset.length(index) for index in range(len(dataset))]
    batches = by_length(lengths, tokens=tokens or _TOKENS[world.device.type], rows=len(lengths) or 1)
    costs = [float(sum(lengths[index] for index in batch)) for batch in batches]
    training = lm.training
    lm.eval()
    try:
        return over_ranks(world, batches, costs, lambda batch: _scores(lm, dataset, batch, world.device), done)
    finally:
        lm.train(training)


def _scores(lm: CausalLM, dataset: TokenDataset, batch: Sequence[int], device: torch.device) -> list[TokenScores]:
    counts = [dataset.target_count(index) for index in batch]
    tokens, rows = sum(map(dataset.length, batch)), tuple((index,) for index in batch)
    micro = MicroBatch(index=0, rows=rows, tokens=tokens, targets=sum(counts), weight=float(sum(counts)))
    tensors = collate(dataset, micro, packed=lm.packed, pad_token_id=0).to(device)
    with torch.no_grad():
        losses, correct = lm.token_statistics(tensors)
    ends = np.cumsum(counts)[:-1]
    parts = np.split(losses.float().cpu().numpy(), ends), np.split(correct.cpu().numpy(), ends)
    return [TokenScores(*pair) for pair in zip(*parts, strict=True)]
