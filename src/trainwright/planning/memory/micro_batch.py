"""The largest micro-batch of a process, which determines its memory. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import compute_padded_size
from trainwright.planning.trace.units import BatchShape
from trainwright.planning.workload import Choice, Workload

_PLACES = 256  # rows whose lengths are read one by one


def compute_batch_shape(workload: Workload, choice: Choice, cluster: Cluster, later: bool = False) -> BatchShape:
    """Return ``find_largest_micro_batch`` as computed: on a CPU, rows are padded in half precision
    (models/linear_losses.py).
    """
    batch = find_largest_micro_batch(workload, choice, later)
    padded = cluster.device == "cpu" and choice.width == 2
    return replace(batch, length=compute_padded_size(batch.length)) if padded else batch


def find_largest_micro_batch(workload: Workload, choice: Choice, later: bool = False) -> BatchShape:
    """Return the largest micro-batch of a process; with ``later``, of those after the first of their step.

    Padded rows are sorted (data/stream/stream.py), the longest first; packs fill the last micro-batch only partly.
    """
    rows, row, longest = choice.micro_batch_size, workload.row_tokens, workload.longest
    mean = max(1, round(workload.mean_length))
    if not workload.packed:
        # Rows of similar length share a micro-batch: the fullest one has the longest rows.
        first = rows * choice.num_processes if later else 0
        longest = workload.find_length(first) or longest
        masked = rows > 1 and mean < longest
        targets = workload.targets(_sum_filled_tokens(workload, first, rows), rows, most=True)
        return BatchShape(rows, longest, ((longest, rows),), targets, packed=False, masked=masked)
    tokens = rows * row
    if workload.most_batch_tokens is not None:  # of a step with few packs, which fill no micro-batch
        tokens = min(tokens, max(1, round(workload.most_batch_tokens)))
    if later and choice.gradient_accumulation_steps == 2 and workload.most_batch_tokens is not None:
        # The tokens that the packs of the first pass leave over.
        remaining_tokens = workload.most_batch_tokens - choice.num_processes * tokens
        tokens = min(tokens, max(round(remaining_tokens), mean))
    sequences = _fill_longest_first(tokens, workload)
    targets = workload.targets(tokens, sum(count for _, count in sequences), most=True)
    return BatchShape(1, tokens, sequences, targets, packed=True, masked=False)


def _sum_filled_tokens(workload: Workload, first: int, rows: int) -> int:
    """Return the tokens, without padding, of ``rows`` padded rows from index ``first`` of the global batch."""
    lengths = [workload.find_length(first + row) for row in range(min(rows, _PLACES))]
    lengths_in_range = [length for length in lengths if length is not None]
    if lengths_in_range:
        return round(sum(lengths_in_range) / len(lengths_in_range) * rows)
    share = min(1.0, rows / max(1.0, workload.global_batch_rows))
    return round(rows * (workload.longest - share * (workload.longest - max(1, round(workload.mean_length)))))


def _fill_longest_first(tokens: int, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return sequences that fill ``tokens`` as the first packs of a step do (data/tokens/packing.py): longest first."""
    mean = max(1, round(workload.mean_length))
    longest = min(workload.longest, tokens)
    sequences, free_tokens = [(longest, 1)], tokens - longest
    if workload.lengths:
        # More sequences have the same lengths: these are means of as few parts.
        considered_tokens = min(round(workload.tokens), max(tokens, _PLACES * mean))
        step = sorted(build_sequences(considered_tokens, workload), reverse=True)
        others = [(step[0][0], step[0][1] - 1), *step[1:]]  # than the longest
        for length, count in others:
            count = min(count, free_tokens // length)
            sequences.append((length, count))
            free_tokens -= length * count
    sequences += [(mean, free_tokens // mean), (free_tokens % mean, 1)]
    return tuple((length, count) for length, count in sequences if length and count)


def build_sequences(tokens: int, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return sequences that fill ``tokens``: of the data's lengths where these are known, or else all of mean length.

    Attention takes a time per token that grows with the length of its sequence, so a few long ones take most of it, and
    most of the memory where scores are kept.
    """
    data_lengths, count = workload.lengths, round(tokens / workload.mean_length)
    if not data_lengths or count < 2:
        mean = max(1, min(tokens, round(workload.mean_length)))
        count, rest = divmod(tokens, mean)
        return ((mean, count), (rest, 1)) if rest else ((mean, count),)
    edges = [index * len(data_lengths) / count for index in range(count + 1)]
    typical = [_average_between(data_lengths, begin, end) for begin, end in pairwise(edges)]
    scale = tokens / sum(typical)
    ends = [round(scale * end) for end in accumulate(typical, initial=0.0)]
    return tuple(Counter(end - begin for begin, end in pairwise(ends) if end > begin).items())


def _average_between(values: Sequence[float], begin: float, end: float) -> float:
    """Return the mean of a step function that has ``values[i]`` from i to i + 1."""
    parts = range(int(begin), min(len(values), math.ceil(end)))
    return sum(values[i] * (min(end, i + 1) - max(begin, i)) for i in parts) / (end - begin)
