"""Examples in batches, shared out, in halves where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from trainwright.errors import MachineError
from trainwright.inference.answering import batch_by_length, map_over_ranks
from trainwright.parallel.world import World
from trainwright.utils.heartbeat import Use

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def test_neighbours_in_length_share_a_batch_the_longest_first() -> None:
    lengths = [3, 9, 4, 9, 1, 5]
    assert batch_by_length(lengths, tokens=18, rows=3) == [[1, 3], [5, 2, 0], [4]]
    assert batch_by_length(lengths, tokens=5, rows=3) == [[1], [3], [5], [2], [0], [4]]
    assert batch_by_length([], tokens=5, rows=3) == []


def test_results_come_in_the_order_of_the_examples() -> None:
    told: list[int] = []
    batches = [[4, 0], [2], [1, 3]]
    found = map_over_ranks(ALONE, batches, [1, 5, 2], lambda batch: [index * 10 for index in batch], told.append)
    assert found == [0, 10, 20, 30, 40] and sum(told) == 5


def test_every_batch_is_progress(marks: list[Use]) -> None:
    map_over_ranks(ALONE, [[4, 0], [2], [1, 3]], [1, 5, 2], lambda batch: batch)
    assert len(marks) == 3


def test_where_memory_runs_out_a_batch_is_done_in_halves_and_later_ones_too() -> None:
    tried: list[list[int]] = []

    def work(batch: Sequence[int]) -> list[int]:
        tried.append(list(batch))
        if len(batch) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return [-index for index in batch]

    found = map_over_ranks(ALONE, [list(range(8)), list(range(8, 16))], [2.0, 1.0], work)
    assert found == [-index for index in range(16)]
    assert [len(batch) for batch in tried] == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


def test_a_single_example_that_does_not_fit_is_told() -> None:
    def work(batch: Sequence[int]) -> list[int]:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(MachineError, match=r"memory ran out with a single example .rank 0"):
        map_over_ranks(ALONE, [[0, 1, 2]], [1.0], work)


def test_other_errors_are_no_want_of_memory() -> None:
    def work(batch: Sequence[int]) -> list[int]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        map_over_ranks(ALONE, [[0]], [1.0], work)
