"""Inspect data before training: which tokens are targets, how long examples are, and how full packs are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from trainwright.data.stream.stages import Stages
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.recipe.sections.train import BatchUnit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pieces = list[tuple[str, bool]]
_SAMPLED_BATCHES = 64


def decode_pieces(tokenizer: PreTrainedTokenizerBase, dataset: TokenDataset, sequence: int) -> Pieces:
    """Return a sequence as runs of text ``(text, whether its tokens are targets)``, including control tokens."""
    tokens, targets = dataset.sequence(sequence)
    ids, flags = tokens.tolist(), [False, *targets[1:].tolist()]  # the first token is never predicted
    runs: Pieces = []
    end, before = 0, ""
    for target, run in groupby(flags):
        end += len(list(run))
        # A tokenizer may decode a run without its context differently, for example without the leading space.
        text = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        runs.append((text[len(before) :], target))
        before = text
    return runs


@dataclass(frozen=True)
class Bin:
    """The number of examples with ``low`` to ``high`` tokens, both inclusive."""

    low: int
    high: int
    examples: int


def build_histogram(dataset: TokenDataset, bins: int = 12) -> list[Bin]:
    """Return a histogram of example lengths in tokens, in bins of equal width."""
    lengths = dataset.example_lengths()
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // bins))
    counts = np.bincount((lengths - low) // width)
    return [Bin(low + i * width, min(high, low + (i + 1) * width - 1), int(count)) for i, count in enumerate(counts)]


@dataclass(frozen=True)
class Fill:
    """Means over global batches: ``rows``, ``tokens`` of examples, and ``fill``, their fraction of computed tokens."""

    rows: float
    tokens: float
    fill: float


def fill(
    dataset: TokenDataset,
    *,
    global_batch_size: int,
    seed: int,
    rows: int | None,
    pack_length: int | None,
    unit: BatchUnit = "examples",
    stages: Stages | None = None,
) -> Fill:
    """Measure how full rows are, over the first batches of an epoch, or over the stages of a run.

    Args:
        rows: rows of a micro-batch that is not packed, padded to the longest; None: the whole global batch.
        unit: what a global batch is counted in.
    """
    size = min(global_batch_size, len(dataset)) if unit != "tokens" else global_batch_size
    stream = Stream(
        dataset,
        StreamSettings(
            global_batch_size=size,
            seed=seed,
            rows=1 if pack_length is not None else rows or len(dataset),
            pack_length=pack_length,
            total_examples=len(dataset),
            unit=unit,
            stages=stages,
        ),
    )
    full_steps = len(stream) - 1 if unit != "examples" or stages is not None else len(dataset) // size
    steps = max(1, min(full_steps, _SAMPLED_BATCHES))
    every = 1 if stages is None else max(1, full_steps // steps)
    batches = [stream.global_batch(step * every) for step in range(steps)]
    counts = [sum(len(micro.rows) for micro in batch.micro_batches) for batch in batches]
    if pack_length is not None:
        capacity = sum(counts) * pack_length
    else:
        capacity = sum(stream.positions(micro) for batch in batches for micro in batch.micro_batches)
    tokens = sum(batch.tokens for batch in batches)
    return Fill(sum(counts) / steps, tokens / steps, tokens / capacity)


def list_first_examples(stream: Stream[TokenDataset], count: int) -> list[list[int]]:
    """Return the first examples in training order, of every stage if the run has several."""
    begins = [0] if stream.staged is None else stream.staged.first_positions
    end = len(stream.dataset) if stream.staged is None else stream.total_examples or 0
    return [[stream.find_example(position) for position in range(begin, min(begin + count, end))] for begin in begins]
