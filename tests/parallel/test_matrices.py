"""Matrices that are orthogonalized by one rank for all: to the bit as by each for itself, and evenly divided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runs import Runs
from trainwright.parallel.matrix_owners import assign_matrices, count_operations, count_rows, group_into_stacks

FSDP: tuple[str, dict[str, Any]] = ("fsdp", {})
DDP: tuple[str, dict[str, Any]] = ("ddp", {})


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        pytest.param(1, [FSDP], marks=pytest.mark.slow),
        (2, [DDP, FSDP]),
        (3, [DDP, FSDP, ("fsdp", {"reshard_after_forward": False, "offload_parameters": True})]),
        pytest.param(4, [("fsdp", {"replicate_size": 2})], marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_one_process_and_divided(
    runs: Runs, processes: int, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    runs.function("tests.parallel.matrices:update_as_one", cases, processes=processes)


@pytest.mark.parametrize(
    ("processes", "case"),
    [(2, FSDP), pytest.param(3, DDP, marks=pytest.mark.slow), (4, ("fsdp", {"replicate_size": 2}))],
)
def test_updates_of_matrices_together_are_those_of_each(
    runs: Runs, processes: int, case: tuple[str, dict[str, Any]]
) -> None:
    runs.function("tests.parallel.matrices:update_as_one", [case], True, processes=processes)


def test_small_matrices_are_updated_together_on_gpus() -> None:
    """Of SmolLM2-135M: all of a rank in one round, in a stack of each shape."""
    shapes = 30 * ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
    (only,) = assign_matrices(shapes, 8, on_gpu=True)
    for owned in only:
        mine = [shapes[index] for index in owned]
        together = group_into_stacks(mine, on_gpu=True)
        assert len(together) == len(set(mine)) <= 4
        assert sorted(index for indices in together for index in indices) == list(range(len(owned)))
    assert group_into_stacks(shapes[:3], on_gpu=False) == [[0], [1], [2]]
    assert group_into_stacks(((2**13, 2**11),) * 3, on_gpu=True) == [[0, 1], [2]]


# Of Llama-3.1-8B.
_BLOCK = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


@pytest.mark.parametrize(("ranks", "longest"), [(2, 1.01), (8, 1.01), (48, 1.1), (64, 1.1)])
def test_a_real_architecture_is_divided_evenly(ranks: int, longest: float) -> None:
    """Time and memory: no round waits long for its slowest rank, and no rank has more than the largest matrix in it."""
    shapes = 32 * _BLOCK
    rounds = assign_matrices(shapes, ranks, on_gpu=False)
    assert sorted(index for one in rounds for owned in one for index in owned) == list(range(len(shapes)))
    costs = [count_operations(*shape) for shape in shapes]
    slowest = sum(max(sum(costs[index] for index in owned) for owned in by_rank) for by_rank in rounds)
    assert slowest <= longest * sum(costs) / ranks
    most = max(rows * columns for rows, columns in shapes)
    for one in rounds:
        assert len(one) == ranks
        assert max(sum(shapes[index][0] * shapes[index][1] for index in owned) for owned in one) <= most


def test_more_ranks_than_matrices_take_one_each_and_one_rank_takes_one_at_a_time() -> None:
    shapes = ((8, 8), (4, 8), (2, 8))
    (only,) = assign_matrices(shapes, 5, on_gpu=False)
    assert only == ((0,), (1,), (2,), (), ())
    assert assign_matrices(shapes, 1, on_gpu=False) == (((0,),), ((1,),), ((2,),))
    assert assign_matrices((), 3, on_gpu=False) == ()


@pytest.mark.parametrize(("rows", "ranks"), [(8, 2), (7, 3), (2, 4), (1, 1), (10, 4)])
def test_rows_are_those_that_torch_gives_each_rank(rows: int, ranks: int) -> None:
    import torch

    parts = [len(part) for part in torch.zeros(rows, 1).chunk(ranks)]
    parts += [0] * (ranks - len(parts))
    assert [count_rows(rows, ranks, rank) for rank in range(ranks)] == parts
