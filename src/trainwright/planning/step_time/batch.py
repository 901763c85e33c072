"""The micro-batch that determines the time of a step: that of the busiest process. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from trainwright.planning.trace.batch import BatchShape
from trainwright.planning.workload import Choice, Workload

_PLACES = 64  # micro-batches whose lengths are read


def typical_batch(workload: Workload, choice: Choice) -> BatchShape:
    """Return a micro-batch of mean size of the busiest process."""
    limit = choice.micro_batch_size * workload.row_tokens
    if workload.packed:
        tokens = round(min(limit, _tokens_of_a_process(workload, choice) / choice.gradient_accumulation_steps))
        sequences = _sequences(max(1, tokens), workload)
        return BatchShape(
            rows=1,
            length=max(1, tokens),
            sequences=sequences,
            targets=workload.targets(tokens, sum(count for _, count in sequences)),
            packed=True,
            masked=False,
        )
    rows = max(1, min(choice.micro_batch_size, math.ceil(workload.global_batch_rows / choice.num_processes)))
    length = round(_padded(workload, rows))
    return BatchShape(
        rows=rows,
        length=length,
        sequences=((length, rows),),
        targets=workload.targets(round(rows * workload.mean_length), rows),
        packed=False,
        masked=rows > 1 and workload.longest > workload.mean_length,
    )


def _tokens_of_a_process(workload: Workload, choice: Choice) -> float:
    """Return the tokens of the busiest process in a step: packs are not divided, and the last may be partly empty."""
    mean = workload.tokens / choice.num_processes
    packs = choice.gradient_accumulation_steps * choice.micro_batch_size
    return min(workload.tokens, max(mean, packs * workload.row_tokens))


def _sequences(tokens: int, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return sequences that fill ``tokens``: of the data's lengths where these are known, or else all of mean length.

    Attention takes a time per token that grows with the length of its sequence, so a few long ones take most of it.
    """
    mean = max(1, min(tokens, round(workload.mean_length)))
    count, rest = divmod(tokens, mean)
    known = workload.lengths
    if not known or count < 2:
        return ((mean, count), (rest, 1)) if rest else ((mean, count),)
    edges = [place * len(known) / count for place in range(count + 1)]
    typical = [_mean_between(known, begin, end) for begin, end in pairwise(edges)]
    scale = tokens / sum(typical)
    ends = [round(scale * end) for end in accumulate(typical, initial=0.0)]
    return tuple(Counter(end - begin for begin, end in pairwise(ends) if end > begin).items())


def _mean_between(values: Sequence[float], begin: float, end: float) -> float:
    """Return the mean of a step function that has ``values[i]`` from i to i + 1."""
    parts = range(int(begin), min(len(values), math.ceil(end)))
    return sum(values[i] * (min(end, i + 1) - max(begin, i)) for i in parts) / (end - begin)


def _padded(workload: Workload, rows: int) -> float:
    """Return the mean length that rows are padded to: a micro-batch has rows of similar length, padded to the longest.

    If only the mean is known, lengths are assumed to be exponentially distributed; their order statistics are sums of 1
    / k (Renyi, Acta Mathematica Hungarica 4, 1953).
    """
    total = max(rows, round(workload.global_batch_rows))
    firsts = range(0, total, rows)
    firsts = firsts if len(firsts) <= _PLACES else range(0, total, rows * -(-len(firsts) // _PLACES))
    known = [workload.length_at(first) for first in firsts]
    if known[0] is not None:
        return sum(length or 0 for length in known) / len(known)
    harmonic = _harmonic(total)
    longest = [workload.mean_length * (harmonic - _harmonic(first)) for first in firsts]
    return min(workload.row_tokens, max(workload.mean_length, sum(longest) / len(longest)))


def _harmonic(count: int) -> float:
    """Return the sum of 1 / k up to ``count``."""
    return math.log(count) + 0.5772156649 + 1 / (2 * count) if count else 0.0


def seen_pairs(workload: Workload, window: int | None) -> float:
    """Return the mean number of positions that a token attends to, itself included, within its sequence or window."""
    if workload.lengths:
        pairs = (length * _seen_by_each(length, window) for length in workload.lengths)
        return sum(pairs) / sum(workload.lengths)
    return _seen_by_each(workload.mean_length, window)


def _seen_by_each(length: float, window: int | None) -> float:
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (1 - (window - 1) / (2 * length))
