"""Memory of an optimizer step that orthogonalizes matrices (engine/optimizer.py, parallel/matrix_exchange.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from trainwright.parallel.matrix_owners import assign_matrices, choose_stack_size, count_rows, group_into_stacks
from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.workload import Choice
from trainwright.recipe.optimizer_spec import list_preconditioned_sides

_FP32 = 4

Shape = tuple[int, int]


def choose_exchanged_width(on_gpu: bool) -> int:
    """Return the bytes of an element in which matrices are orthogonalized and exchanged."""
    return 2 if on_gpu else 4


def estimate_orthogonalization(inventory: Inventory, choice: Choice, on_gpu: bool) -> int:
    """Return the most bytes while Muon updates matrices, in addition to weights, gradients and optimizer state."""
    width, shapes = choose_exchanged_width(on_gpu), inventory.matrices
    if choice.num_processes == 1:
        counts = Counter(shapes).items()
        return max((_estimate_stack(shape, count, width, on_gpu) for shape, count in counts), default=0)
    return _estimate_rounds(shapes, choice.num_processes, choice.shards, on_gpu)


def estimate_preconditioning(inventory: Inventory) -> int:
    """Return the most bytes while SOAP updates a matrix, in addition to weights, gradients and optimizer state."""
    return _FP32 * max((_count_matrix_elements(shape) for shape in inventory.matrices), default=0)


def _count_matrix_elements(shape: Shape) -> int:
    """Return the most elements beside the state of a matrix: its update in both bases, or a refresh of one of them."""
    return max(4 * shape[0] * shape[1], 3 * max((side**2 for side in list_preconditioned_sides(shape)), default=0))


def _estimate_stack(shape: Shape, count: int, width: int, on_gpu: bool) -> int:
    """Return the most bytes of updating ``count`` matrices of a shape, some of them at once."""
    numel = shape[0] * shape[1]
    together = min(count, choose_stack_size(numel, on_gpu=on_gpu))
    # The stack, and beside it first the momentum in fp32 that it is made from; then the iterations, and the update in
    # the width of the iterations and in fp32.
    return together * max(
        (_FP32 + width) * numel, width * numel + _compute_iteration_bytes(*shape, width), 3 * width * numel
    )


@lru_cache(maxsize=64)
def _estimate_rounds(shapes: tuple[Shape, ...], ranks: int, shards: int, on_gpu: bool) -> int:
    highest = 0
    for owners in assign_matrices(shapes, ranks, on_gpu=on_gpu):
        owned_shapes = [[shapes[index] for index in indices] for indices in owners]
        for begin in range(0, ranks, shards):
            highest = max(highest, _estimate_round(owned_shapes[begin : begin + shards], on_gpu))
    return highest


def _estimate_round(owned: Sequence[Sequence[Shape]], on_gpu: bool) -> int:
    """Return the bytes on the fullest rank of a replica. ``owned``: the matrices of each of its ranks."""
    width = choose_exchanged_width(on_gpu)
    elements = sum(count_rows(rows, len(owned), 0) * columns for shapes in owned for rows, columns in shapes)
    share_bytes, in_fp32 = width * elements, _FP32 * elements
    matrix_bytes = width * max(sum(rows * columns for rows, columns in shapes) for shapes in owned)
    alone = max((_estimate_stacks(shapes, width, on_gpu) for shapes in owned), default=0)
    # Updates are converted to fp32 as they are added to the weights: this rank's in a row, and those of another.
    update_bytes = 2 * share_bytes + (in_fp32 if width < _FP32 else 0)
    exchanged_bytes = share_bytes + matrix_bytes if len(owned) > 1 else 0
    return max(share_bytes + in_fp32, exchanged_bytes, matrix_bytes + alone, update_bytes)


def _estimate_stacks(shapes: Sequence[Shape], width: int, on_gpu: bool) -> int:
    """Return the most bytes of updating matrices of a rank, those of one shape together."""
    counts = [(shapes[indices[0]], len(indices)) for indices in group_into_stacks(shapes, on_gpu=on_gpu)]
    return max((count * (width * m * n + _compute_iteration_bytes(m, n, width)) for (m, n), count in counts), default=0)


def _compute_iteration_bytes(rows: int, columns: int, width: int) -> int:
    """Return the most bytes of the iterations: two matrices of the shape, and two products of one with itself."""
    return 2 * width * (rows * columns + min(rows, columns) ** 2)
