"""Run the kernels of a traced block in a row, on numbers without meaning: a step of a model without its modules.

``transformers`` is not imported, which alone takes longer than the whole quick measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from trainwright.doctor.calibrate_cases import CalibrationCase, Run, unequal_lengths
from trainwright.machine.measured.kernels import KINDS, Kernel, MeasuredBlock
from trainwright.models.attention.cpu_flash import flash_backward, flash_forward

_CHANNELS = 64  # of a head of attention


def block_case(curve: str, sizes: tuple[float, ...]) -> CalibrationCase:
    """Return a pass over a block as a case; ``sizes`` of its sample."""
    build = partial(replay, MeasuredBlock.of(sizes), curve.endswith("backward"))
    return CalibrationCase(curve, sizes, build, typical=True, cold=True)


def replay(block: MeasuredBlock, backward: bool) -> Run:
    """Return a function that runs the kernels. Each reads tensors of its own, as large as those of the model."""
    lengths = unequal_lengths(block.sequences, block.length)
    runs = [
        run
        for kernel in block.kernels
        for _ in range(kernel.launches)
        for run in _runs(kernel, lengths, backward=backward)
    ]

    def run_all() -> None:
        for run in runs:
            run()

    return run_all


def _runs(kernel: Kernel, lengths: tuple[int, ...], *, backward: bool) -> Iterator[Run]:
    kind, dtype = KINDS[kernel.kind], {4: torch.float32, 2: torch.bfloat16}.get(kernel.width, torch.float32)
    if kind == "product":
        yield _product(kernel, dtype, backward)
    elif kind == "attention":
        yield _attention(kernel, lengths, dtype, backward)
    else:
        read, written = (
            max(1, round(size / kernel.launches / dtype.itemsize)) for size in (kernel.read, kernel.written)
        )
        if kind == "reduction":
            yield partial(torch.sum, _ones(dtype, written, max(1, read // written)), -1)
        elif kind == "copy":
            yield _ones(dtype, written).clone
        else:
            other = _ones(dtype, written) if 2 * read >= 3 * written else 1.5
            yield partial(torch.mul, _ones(dtype, written), other)


def _product(kernel: Kernel, dtype: torch.dtype, backward: bool) -> Run:
    """Return a product with a matrix that is transposed as in training."""
    batch = (kernel.times,) if kernel.times > 1 else ()
    first, second = _ones(dtype, *batch, kernel.m, kernel.k), _ones(dtype, *batch, kernel.k, kernel.n)
    if not kernel.weights and backward:  # of a weight's gradient: dy^T @ x
        first = _ones(dtype, *batch, kernel.k, kernel.m).mT
    elif not backward:  # x @ W^T
        second = _ones(dtype, *batch, kernel.n, kernel.k).mT
    return partial(torch.matmul, first, second)


def _attention(kernel: Kernel, lengths: tuple[int, ...], dtype: torch.dtype, backward: bool) -> Run:
    """Return attention of a pack with as many heads as the kernel's FLOPs need."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    heads = max(1, round(kernel.flops / kernel.launches / (2 * (5 if backward else 2) * pairs * _CHANNELS)))
    query, key, value = (_ones(dtype, 1, sum(lengths), heads, _CHANNELS).transpose(1, 2) for _ in range(3))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    scale = _CHANNELS**-0.5
    if not backward:
        return partial(flash_forward, query, key, value, boundaries, scale)
    output, logsumexp = flash_forward(query, key, value, boundaries, scale)
    return partial(flash_backward, torch.ones_like(output), query, key, value, output, logsumexp, boundaries, scale)


def _ones(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01, dtype=dtype)
