"""The largest micro-batch of a process, which determines its memory. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

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
    longest = min(longest, tokens)
    full_sequences, rest = divmod(tokens - longest, mean)
    sequences = [(mean, full_sequences), (longest, 1), (rest, 1)]
    remaining = tuple((length, count) for length, count in sequences if length and count)
    targets = workload.targets(tokens, sum(count for _, count in remaining), most=True)
    return BatchShape(1, tokens, remaining, targets, packed=True, masked=False)


def _sum_filled_tokens(workload: Workload, first: int, rows: int) -> int:
    """Return the tokens, without padding, of ``rows`` padded rows from index ``first`` of the global batch."""
    lengths = [workload.find_length(first + row) for row in range(min(rows, _PLACES))]
    lengths_in_range = [length for length in lengths if length is not None]
    if lengths_in_range:
        return round(sum(lengths_in_range) / len(lengths_in_range) * rows)
    share = min(1.0, rows / max(1.0, workload.global_batch_rows))
    return round(rows * (workload.longest - share * (workload.longest - max(1, round(workload.mean_length)))))
