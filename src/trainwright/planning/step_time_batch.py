"""The micro-batch that a step's time hangs on: that of the process with the most to do. Imports no torch."""

from __future__ import annotations

import math

from trainwright.planning.operations import MicroBatch
from trainwright.planning.workload import Choice, Workload


def typical_batch(workload: Workload, choice: Choice) -> MicroBatch:
    """A micro-batch of mean size, of the process that the others wait for."""
    most = choice.micro_batch_size * workload.row_tokens
    if workload.packed:
        tokens = round(min(most, _tokens_of_a_process(workload, choice) / choice.gradient_accumulation_steps))
        documents = _documents(max(1, tokens), workload.document)
        return MicroBatch(
            rows=1,
            length=max(1, tokens),
            documents=documents,
            targets=workload.targets(tokens, sum(count for _, count in documents)),
            packed=True,
            masked=False,
        )
    rows = max(1, min(choice.micro_batch_size, math.ceil(workload.global_batch_rows / choice.num_processes)))
    length = round(_padded(workload, rows))
    return MicroBatch(
        rows=rows,
        length=length,
        documents=((length, rows),),
        targets=workload.targets(round(rows * workload.document), rows),
        packed=False,
        masked=rows > 1 and workload.longest > workload.document,
    )


def _tokens_of_a_process(workload: Workload, choice: Choice) -> float:
    """Of the busiest one in a step: packs are dealt whole, and the last of a global batch is not full."""
    mean = workload.tokens / choice.num_processes
    packs = choice.gradient_accumulation_steps * choice.micro_batch_size
    return min(workload.tokens, max(mean, packs * workload.row_tokens))


def _documents(tokens: int, mean: float) -> tuple[tuple[int, int], ...]:
    """Documents of equal length that fill ``tokens``, but for what is left over."""
    length = max(1, min(tokens, round(mean)))
    count, rest = divmod(tokens, length)
    return ((length, count), (rest, 1)) if rest else ((length, count),)


def _padded(workload: Workload, rows: int) -> float:
    """Mean length that rows are padded to: a micro-batch has neighbours in length of a global batch."""
    others = max(1.0, workload.global_batch_rows - 1)
    return workload.document + (workload.row_tokens - workload.document) * min(1.0, (rows - 1) / others)


def seen_pairs(workload: Workload, window: int | None) -> float:
    """Positions that a token sees on average, itself included: all before it in its document, or a window of them."""
    length = workload.document
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (1 - (window - 1) / (2 * length))
