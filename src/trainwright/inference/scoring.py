"""Score given texts: the log-likelihood of every target token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.inference.answering import Done, batch_by_length, map_over_ranks
from trainwright.machine.vendors import look_up_processor
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World

T = TypeVar("T")

# Tokens per batch: enough to keep a processor or a GPU busy.
_TOKENS = {"cpu": 2048, "gpu": 16384}


@dataclass(frozen=True)
class TokenScores:
    """The scores of one example, in the order of its targets.

    Attributes:
        losses: negative log-likelihoods in nats, fp32 [targets].
        correct: whether the target was the most probable token [targets].
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
    together: bool = False,
) -> list[TokenScores]:
    """Score the targets of every example, each a sequence, on every rank. Every rank must call, with the full model.

    Args:
        lm: on the world's device; unless it supports packing, examples are padded to the longest of a batch.
        tokens: per batch.
        together: see ``map_over_ranks``.

    Raises:
        MachineError: memory runs out with a single example.
    """

    def work(batch: Batch, counts: Sequence[int]) -> list[TokenScores]:
        losses, correct = lm.compute_token_statistics(batch)
        pairs = zip(_split_by_example(losses.float(), counts), _split_by_example(correct, counts), strict=True)
        return [TokenScores(*pair) for pair in pairs]

    return _map_over_sequences(lm, dataset, world, work, tokens, done, together)


def score_standardized(
    lm: CausalLM, dataset: TokenDataset, world: World, *, done: Done = lambda examples: None
) -> list[npt.NDArray[np.float32]]:
    """Return the standardized log-likelihoods of the targets of every example; see ``score`` and ``CausalLM``."""

    def work(batch: Batch, counts: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        return _split_by_example(lm.compute_standardized_log_likelihood(batch), counts)

    return _map_over_sequences(lm, dataset, world, work, None, done, False)


def _map_over_sequences(
    lm: CausalLM,
    dataset: TokenDataset,
    world: World,
    work: Callable[[Batch, Sequence[int]], list[T]],
    tokens: int | None,
    done: Done,
    together: bool,
) -> list[T]:
    """Call ``work`` on batches of examples of similar length, with their targets; return the results in order."""
    lengths = [dataset.length(index) for index in range(len(dataset))]
    batches = batch_by_length(
        lengths, tokens=tokens or _TOKENS[look_up_processor(world.device.type)], rows=len(lengths) or 1
    )
    costs = [float(sum(lengths[index] for index in batch)) for batch in batches]

    def on(indices: Sequence[int]) -> list[T]:
        counts = [dataset.target_count(index) for index in indices]
        with torch.no_grad():
            return work(collate_examples(dataset, indices, packed=lm.packed).to(world.device), counts)

    training = lm.training
    lm.eval()
    try:
        return map_over_ranks(world, batches, costs, on, done, together=together, result=TokenScores)
    finally:
        lm.train(training)


def _split_by_example(values: torch.Tensor, counts: Sequence[int]) -> list[npt.NDArray[Any]]:
    return np.split(values.cpu().numpy(), np.cumsum(counts)[:-1])
