"""Assign the matrices that an optimizer orthogonalizes to ranks, by their cost. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

# Iterations of Newton-Schulz, of three products each (engine/optimizers/muon.py).
ITERATIONS = 5

_EMBEDDINGS = ("wte", "wpe", "lm_head", "head", "positions", "score")

_TOGETHER = 2**25  # elements that one process of a GPU updates at a time, if no matrix has more

# The matrices of every rank in a round, by their index.
Round = tuple[tuple[int, ...], ...]


def is_matrix(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a weight matrix of a block, and not an embedding or the head."""
    parts = name.split(".")
    if dimensions != 2 or parts[-1].endswith("bias"):  # experts have a bias each
        return False
    return not any("embed" in part or part in _EMBEDDINGS for part in parts)


def choose_stack_size(elements: int, *, on_gpu: bool) -> int:
    """Return how many matrices of ``elements`` one process updates together.

    Small ones do not fill a GPU, and each launches some forty kernels; on a CPU products of a batch are not faster.
    """
    return max(1, _TOGETHER // max(1, elements)) if on_gpu else 1


def group_into_stacks(shapes: Sequence[tuple[int, int]], *, on_gpu: bool) -> list[list[int]]:
    """Return the indices of matrices that one process updates together: of one shape, at most ``choose_stack_size``."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    groups = []
    for (rows, columns), alike in by_shape.items():
        count = choose_stack_size(rows * columns, on_gpu=on_gpu)
        groups += [alike[begin : begin + count] for begin in range(0, len(alike), count)]
    return groups


def count_operations(rows: int, columns: int) -> int:
    """Return the FLOPs of orthogonalizing a matrix."""
    low, high = sorted((rows, columns))
    return ITERATIONS * (4 * low * low * high + 2 * low**3)


@lru_cache(maxsize=64)
def assign_matrices(shapes: tuple[tuple[int, int], ...], ranks: int, *, on_gpu: bool) -> tuple[Round, ...]:
    """Assign every matrix to a rank and return the rounds in which the ranks update them.

    The matrix with the highest cost first, each to the rank with the least work so far. In a round, the matrices of a
    rank have together at most as many elements as the largest matrix, or on a GPU as those that are updated together:
    this bounds the memory. One rank on a CPU updates one matrix at a time. The result depends on the arguments alone,
    so all ranks agree on it.
    """
    if ranks == 1 and not on_gpu:
        return tuple(((index,),) for index in range(len(shapes)))
    largest = max((rows * columns for rows, columns in shapes), default=0)
    largest = max(largest, _TOGETHER) if on_gpu else largest
    rounds: list[list[list[int]]] = []
    last, round_elements = [-1] * ranks, [0] * ranks  # of each rank: its last round, and the elements it has there
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(shapes)), key=lambda index: (-count_operations(*shapes[index]), index)):
        work, rank = loads[0]
        heapq.heapreplace(loads, (work + count_operations(*shapes[index]), rank))
        elements = shapes[index][0] * shapes[index][1]
        if last[rank] < 0 or round_elements[rank] + elements > largest:
            last[rank], round_elements[rank] = last[rank] + 1, 0
        if last[rank] == len(rounds):
            rounds.append([[] for _ in range(ranks)])
        rounds[last[rank]][rank].append(index)
        round_elements[rank] += elements
    return tuple(tuple(map(tuple, indices_by_rank)) for indices_by_rank in rounds)


def count_rows(rows: int, ranks: int, rank: int) -> int:
    """Return the number of rows of a matrix that ``rank`` holds, of ``ranks`` that share it as FSDP2 does.

    Equal parts, the last ones smaller or empty.
    """
    rows_per_rank = -(-rows // ranks)
    return max(0, min(rows_per_rank, rows - rows_per_rank * rank))
