"""The micro-batch that determines the time of a step: that of the busiest process. Imports no torch."""

from __future__ import annotations

import math

from trainwright.planning.operations import BatchShape
from trainwright.planning.workload import Choice, Workload

_PLACES = 64  # micro-batches whose lengths are read


def typical_batch(workload: Workload, choice: Choice, sorted_rows: int | None = None) -> BatchShape:
    """Return a micro-batch of mean size of the busiest process.

    ``sorted_rows``: number of rows that are sorted by length before they are divided into micro-batches; None: those of
    a step.
    """
    most = choice.micro_batch_size * workload.row_tokens
    if workload.packed:
        tokens = round(min(most, _tokens_of_a_process(workload, choice) / choice.gradient_accumulation_steps))
        documents = _documents(max(1, tokens), workload.document)
        return BatchShape(
            rows=1,
            length=max(1, tokens),
            documents=documents,
            targets=workload.targets(tokens, sum(count for _, count in documents)),
            packed=True,
            masked=False,
        )
    rows = max(1, min(choice.micro_batch_size, math.ceil(workload.global_batch_rows / choice.num_processes)))
    length = round(_padded(workload, rows, sorted_rows))
    return BatchShape(
        rows=rows,
        length=length,
        documents=((length, rows),),
        targets=workload.targets(round(rows * workload.document), rows),
        packed=False,
        masked=rows > 1 and workload.longest > workload.document,
    )


def _tokens_of_a_process(workload: Workload, choice: Choice) -> float:
    """Return the tokens of the busiest process in a step: packs are not divided, and the last may be partly empty."""
    mean = workload.tokens / choice.num_processes
    packs = choice.gradient_accumulation_steps * choice.micro_batch_size
    return min(workload.tokens, max(mean, packs * workload.row_tokens))


def _documents(tokens: int, mean: float) -> tuple[tuple[int, int], ...]:
    """Return documents of equal length that fill ``tokens``, and one for the remainder."""
    length = max(1, min(tokens, round(mean)))
    count, rest = divmod(tokens, length)
    return ((length, count), (rest, 1)) if rest else ((length, count),)


def _padded(workload: Workload, rows: int, sorted_rows: int | None) -> float:
    """Return the mean length that rows are padded to: a micro-batch has rows of similar length, padded to the longest.

    If only the mean is known, lengths are assumed to be exponentially distributed; their order statistics are sums of 1
    / k (Renyi, Acta Mathematica Hungarica 4, 1953).
    """
    total = max(rows, round(sorted_rows or workload.global_batch_rows))
    firsts = range(0, total, rows)
    firsts = firsts if len(firsts) <= _PLACES else range(0, total, rows * -(-len(firsts) // _PLACES))
    known = [workload.length_at(first) for first in firsts]
    if known[0] is not None and sorted_rows is None:
        return sum(length or 0 for length in known) / len(known)
    whole = _harmonic(total)
    longest = [workload.document * (whole - _harmonic(first)) for first in firsts]
    return min(workload.row_tokens, max(workload.document, sum(longest) / len(longest)))


def _harmonic(count: int) -> float:
    """Return the sum of 1 / k up to ``count``."""
    return math.log(count) + 0.5772156649 + 1 / (2 * count) if count else 0.0


def seen_pairs(workload: Workload, window: int | None) -> float:
    """Return the mean number of positions that a token attends to, itself included, within its document or window."""
    length = workload.document
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (1 - (window - 1) / (2 * length))
