"""Run the kernels of a traced block in a row, on random numbers: a step of a model without its modules.

``transformers`` is not imported, which alone takes longer than the whole quick measurement.
"""

from __future__ import annotations

from functools import partial

import torch

from trainwright.doctor.calibrate_cases import (
    DTYPES,
    CalibrationCase,
    Run,
    attention,
    product,
    random_numbers,
    unequal_lengths,
)
from trainwright.machine.measured.kernels import KINDS, Kernel, MeasuredBlock

_CHANNELS = 64  # of a head of attention
_CPU = torch.device("cpu")


def block_case(curve: str, sizes: tuple[float, ...]) -> CalibrationCase:
    """Return a pass over a block as a case; ``sizes`` of its sample."""
    build = partial(replay, MeasuredBlock.of(sizes), curve.endswith("backward"))
    return CalibrationCase(curve, sizes, build, typical=True, cold=True)


def replay(block: MeasuredBlock, backward: bool) -> Run:
    """Return a function that runs the kernels. Each reads tensors of its own, as large as those of the model."""
    lengths = unequal_lengths(block.sequences, block.length)
    runs = [_run(kernel, lengths, backward=backward) for kernel in block.kernels for _ in range(kernel.launches)]

    def run_all() -> None:
        for run in runs:
            run()

    return run_all


def _run(kernel: Kernel, lengths: tuple[int, ...], *, backward: bool) -> Run:
    kind, precision = KINDS[kernel.kind], "bf16" if kernel.width == 2 else "fp32"
    if kind == "product":
        return _product(kernel, precision, backward)
    if kind == "attention":  # with as many heads as its FLOPs need
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        heads = round(kernel.flops / kernel.launches / (2 * (5 if backward else 2) * pairs * _CHANNELS))
        return attention(precision, "backward" if backward else "forward", lengths, (max(1, heads), _CHANNELS), _CPU)
    width = DTYPES[precision].itemsize
    read, written = (max(1, round(size / kernel.launches / width)) for size in (kernel.read, kernel.written))
    first = random_numbers((written,), precision, _CPU)
    if kind == "reduction":
        return partial(torch.sum, random_numbers((written, max(1, read // written)), precision, _CPU), -1)
    if kind == "copy":
        return first.clone
    return partial(torch.mul, first, first.clone() if 2 * read >= 3 * written else 1.5)


def _product(kernel: Kernel, precision: str, backward: bool) -> Run:
    m, n, k = kernel.m, kernel.n, kernel.k
    if kernel.times > 1:
        first, second = (random_numbers((kernel.times, *shape), precision, _CPU) for shape in ((m, k), (k, n)))
        return partial(torch.bmm, first, second)
    if not backward:
        return product(precision, "forward", (m, n, k), _CPU)
    return product(precision, *(("input", (m, k, n)) if kernel.weights else ("weight", (k, m, n))), _CPU)
