"""The cases of a measurement: the operations of a training step, over the sizes of models.

Each case is one operation at one size, run as in training: the same kernels, newly allocated outputs. Names and sizes
are those of ``machine.measured.calibration.ProcessRates``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainwright.machine.measured.quick import KINDS as CURVES
from trainwright.machine.measured.quick import Kernel, MeasuredBlock
from trainwright.machine.vendors import look_up_processor
from trainwright.models.attention.plain import flash_backward, flash_forward

if TYPE_CHECKING:
    from trainwright.data.stream.batch import Batch


Run = Callable[[], object]
Shape = tuple[int, int, int]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"cpu": ("fp32", "bf16"), "gpu": ("bf16", "fp16", "tf32", "fp32")}

# Sizes that are measured, and sizes that are held out, by operation.
# "product": (m, n, k): tokens, output width, input width. Few tokens, narrow and wide matrices, and some sizes that are
# not powers of two. "traffic": elements of the tensors that a kernel reads. "attention": lengths of sequences; for a
# CPU below and above the length from which its bf16 kernel is used. "loss": logits. "data": sequences, tokens.
_CPU_PRODUCTS = [
    *((64, 512, 512), (256, 256, 256), (1024, 128, 512), (256, 1024, 768), (1024, 576, 576), (1024, 1536, 576)),
    *((1024, 576, 1536), (2048, 256, 1024), (1024, 4096, 512), (512, 2048, 2048), (1024, 8192, 320)),
]
_GPU_PRODUCTS = [
    *((1024, 1024, 1024), (4096, 576, 576), (2048, 2048, 2048), (8192, 1024, 4096), (16384, 1536, 1536)),
    *((4096, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 32768, 2048)),
]
_SIZES: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "cpu": {
        "product": (_CPU_PRODUCTS, [(128, 768, 768), (2048, 512, 384), (1024, 1024, 1024), (768, 2304, 640)]),
        "traffic": ([2**14, 2**17, 2**20, 2**22, 2**23, 2**24], [2**19, 3 * 2**21]),
        "attention": ([32, 64, 128, 256, 511, 512, 1024, 2048], [192, 768]),
        "optimizer": ([2**18, 2**21, 2**24], [2**23]),
        "loss": ([2**18, 2**22], [2**20]),
        "data": ([(1, 64), (8, 1024), (2, 2048), (32, 4096)], [(4, 1024), (16, 2048)]),
    },
    "gpu": {
        "product": (_GPU_PRODUCTS, [(4096, 1536, 576), (4096, 2560, 2560), (8192, 8192, 4096), (4096, 11008, 4096)]),
        "traffic": ([2**16, 2**20, 2**23, 2**25, 2**27], [2**22, 2**26]),
        "attention": ([128, 512, 2048, 8192, 16384], [1024, 4096]),
        "optimizer": ([2**20, 2**24, 2**28], [2**26]),
        "loss": ([2**24, 2**27], [2**26]),
        "data": ([(1, 64), (8, 1024), (2, 2048), (32, 4096)], [(4, 1024), (16, 2048)]),
        "host": ([2**20, 2**24, 2**28], [2**26]),
    },
}
_ATTENTION_SHAPE = {"cpu": (512, 8, 64), "gpu": (16384, 32, 128)}  # tokens, heads, head size
_LOSS_ROW, _LEAST_WIDTH, _ROW = 2**13, 8, 512
# Kernels that are timed together, and the elements that they read and write per element.
KINDS = {"copy": (1, 2), "elementwise": (2, 6), "reduction": (1, 1)}


@dataclass(frozen=True)
class CalibrationCase:
    """A case of a measurement.

    ``build`` creates the inputs and returns the function to time; the curve's seconds are its seconds divided by
    ``amount``. ``joint``: it waits for the other processes, so all must call it equally often. ``typical``: its typical
    time counts, not its minimum, and it takes longer to build than to run. ``cold``: its inputs are not in the caches,
    as in a step of a large model.
    """

    curve: str
    sizes: tuple[float, ...]
    build: Callable[[], Run]
    held_out: bool = False
    amount: float = 1.0
    joint: bool = False
    typical: bool = False
    cold: bool = False


def build_operation_cases(device: torch.device) -> dict[str, list[CalibrationCase]]:
    """Return the operations of a calibration by part, in every precision."""
    processor = look_up_processor(device.type)

    def over(name: str) -> Iterator[tuple[Any, bool]]:
        fit_sizes, held_out = _SIZES[processor][name]
        return itertools.chain(((size, False) for size in fit_sizes), ((size, True) for size in held_out))

    precisions = ("fp32", "bf16")
    other_cases = [build_optimizer_case(elements, device, out) for elements, out in over("optimizer")]
    other_cases += [
        build_loss_case(precision, logits, device, out) for logits, out in over("loss") for precision in precisions
    ]
    other_cases += [
        CalibrationCase("data", size, partial(_prepare_data, size, device), out) for size, out in over("data")
    ]
    if device.type != "cpu":
        fit_sizes, held_out = _SIZES["cpu"]["optimizer"]
        for elements in (*fit_sizes, *held_out):
            other_cases.append(build_optimizer_case(elements, _CPU, elements in held_out, "host_optimizer"))
        for count, out in over("host"):
            for direction in ("to", "from"):
                build = partial(prepare_host_copy, direction, count, device)
                other_cases.append(CalibrationCase(f"host/{direction}", (count,), build, out))
    return {
        "products": [
            case
            for shape, out in over("product")
            for precision in PRECISIONS[processor]
            for case in build_product_cases(shape, precision, device, out)
        ],
        "traffic": [
            build_traffic_case(precision, kind, elements, device, out)
            for elements, out in over("traffic")
            for precision in precisions
            for kind in KINDS
        ],
        "attention": [
            case
            for length, out in over("attention")
            for precision in precisions
            for case in build_attention_cases(precision, length, device, _ATTENTION_SHAPE[processor], out)
        ],
        "others": other_cases,
    }


def build_product_cases(
    shape: Shape, precision: str, device: torch.device, held_out: bool = False
) -> list[CalibrationCase]:
    """Return the products of one linear module: (tokens, output width, input width)."""
    tokens, wide, narrow = shape
    sizes = {"forward": shape, "input": (tokens, narrow, wide), "weight": (wide, narrow, tokens)}
    return [
        CalibrationCase(
            f"product/{precision}/{layout}", size, partial(prepare_product, precision, layout, shape, device), held_out
        )
        for layout, size in sizes.items()
    ]


def build_traffic_case(
    precision: str, kind: str, elements: int, device: torch.device, held_out: bool = False
) -> CalibrationCase:
    """Return kernels of one kind on tensors of ``elements`` elements, bound by memory or by the work per element."""
    kernels, numbers = KINDS[kind]
    size = DTYPES[precision].itemsize * elements * numbers / kernels
    build = partial(_prepare_traffic, precision, kind, elements, device)
    return CalibrationCase(f"traffic/{precision}/{kind}", (size,), build, held_out, amount=kernels)


def build_attention_cases(
    precision: str, length: int, device: torch.device, shape: Shape, held_out: bool = False, *, dense: bool = False
) -> list[CalibrationCase]:
    """Return both directions of causal attention within sequences of about one length.

    Args:
        shape: tokens, heads, size of a head.
        dense: on a GPU sequences are equal, and torch's SDPA computes them: the kernels of packs import its compiler.
    """
    tokens, heads, channels = shape
    count = max(1, tokens // length)
    lengths = (length,) * count if dense and device.type != "cpu" else vary_lengths(count, length)
    amount = sum(lengths) * heads * channels

    def case(direction: str) -> CalibrationCase:
        build = partial(prepare_attention, precision, direction, lengths, (heads, channels), device, dense)
        return CalibrationCase(f"attention/{precision}/{direction}", (length,), build, held_out, amount)

    return [case("forward"), case("backward")]


def build_loss_case(precision: str, logits: int, device: torch.device, held_out: bool = False) -> CalibrationCase:
    """Return cross-entropy of ``logits`` logits with its gradient."""
    return CalibrationCase(f"loss/{precision}", (logits,), partial(_prepare_loss, precision, logits, device), held_out)


def build_optimizer_case(
    elements: int, device: torch.device, held_out: bool = False, curve: str = "optimizer"
) -> CalibrationCase:
    """Return AdamW's kernel without ``torch.optim``, whose first step imports torch's compiler."""
    return CalibrationCase(curve, (elements,), partial(_prepare_update, elements, device), held_out)


def vary_lengths(sequences: int, length: int) -> tuple[int, ...]:
    """Return lengths within 10 % of ``length``, as equal sequences would be computed as one batch."""
    spread = range(1 - sequences, sequences, 2)
    return tuple(length + round(0.1 * length * index / max(1, sequences - 1)) for index in spread)


def draw_random_tensor(shape: tuple[int, ...], precision: str, device: torch.device) -> torch.Tensor:
    """Return random numbers: a GPU's power, and so its clock, depends on the bits that change.

    They are repeated, as generating all of them takes longer than the timed operation.
    """
    count, some = math.prod(shape), _draw_random_values(precision, device)
    return some.repeat(-(-count // len(some)))[:count].view(shape)


@cache
def _draw_random_values(precision: str, device: torch.device) -> torch.Tensor:
    return torch.randn(2**16, device=device).to(DTYPES[precision])


def prepare_product(precision: str, layout: str, shape: Shape, device: torch.device) -> Run:
    """Return a product of a linear module of a shape (tokens, output width, input width)."""
    m, n, k = shape
    if layout == "forward":
        run = partial(
            F.linear, draw_random_tensor((m, k), precision, device), draw_random_tensor((n, k), precision, device)
        )
    else:
        grad = draw_random_tensor((m, n), precision, device)
        first, right = (grad, (n, k)) if layout == "input" else (grad.t(), (m, k))
        run = partial(torch.mm, first, draw_random_tensor(right, precision, device))
    return partial(_run_in_tf32, run) if precision == "tf32" else run


def _run_in_tf32(run: Run) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run()
    finally:
        torch.set_float32_matmul_precision(before)


def _prepare_traffic(precision: str, kind: str, elements: int, device: torch.device) -> Run:
    x, y = (draw_random_tensor((elements // _ROW, _ROW), precision, device) for _ in range(2))
    runs: dict[str, Run] = {
        "copy": lambda: x.clone(),
        "elementwise": lambda: (x * y, x + y),
        "reduction": lambda: x.sum(-1),
    }
    return runs[kind]


def prepare_attention(
    precision: str,
    direction: str,
    lengths: Sequence[int],
    shape: tuple[int, int],
    device: torch.device,
    dense: bool = False,
) -> Run:
    """Return causal attention within sequences. ``shape``: heads, size of a head; ``dense``: as in
    ``build_attention_cases``.
    """
    heads, channels = shape
    tokens, scale = sum(lengths), channels**-0.5
    # The order in memory in which projections return them.
    query, key, value = (
        draw_random_tensor((1, tokens, heads, channels), precision, device).transpose(1, 2) for _ in range(3)
    )
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    if device.type == "cpu":
        if direction == "forward":
            return partial(flash_forward, query, key, value, boundaries, scale)
        output, logsumexp = flash_forward(query, key, value, boundaries, scale)
        grad = torch.randn_like(output)
        return partial(flash_backward, grad, query, key, value, output, logsumexp, boundaries, scale)

    def forward() -> torch.Tensor:
        if dense:
            q, k, v = (x.unflatten(2, (len(lengths), -1))[0].transpose(0, 1) for x in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        from trainwright.models.attention.packs import packed_attention

        pack = {"cu_seq_lens_q": boundaries, "max_length_q": max(lengths), "scaling": scale}
        return packed_attention(torch.nn.Module(), query, key, value, None, **pack)[0]

    if direction == "forward":
        return torch.no_grad()(forward)
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    output = forward()
    return partial(torch.autograd.grad, output, (query, key, value), torch.randn_like(output), retain_graph=True)


def _prepare_update(elements: int, device: torch.device) -> Run:
    weight, gradient, first, second = (draw_random_tensor((elements,), "fp32", device) for _ in range(4))
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    numbers |= {"amsgrad": False, "maximize": False}
    step = torch.ones((), device=device)
    second.abs_()
    return lambda: torch._fused_adamw_([weight], [gradient], [first], [second], [], [step], **numbers)


def _prepare_loss(precision: str, logits: int, device: torch.device) -> Run:
    from trainwright.models.linear_losses import Head, linear_cross_entropy

    # The minimum width of hidden states: the products are measured separately.
    hidden = draw_random_tensor((logits // _LOSS_ROW, _LEAST_WIDTH), precision, device)
    weight = draw_random_tensor((_LOSS_ROW, _LEAST_WIDTH), precision, device)
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=device)
    return lambda: linear_cross_entropy(Head(hidden, weight, None), targets)


def _prepare_data(size: tuple[int, int], device: torch.device) -> Run:
    sequences, tokens = size
    make = pack([[0] * (tokens // sequences)] * sequences)
    return lambda: make().to(device)


def pack(sequences: Sequence[list[int]]) -> Callable[[], Batch]:
    """Return a function that makes a flat micro-batch of these sequences, in which every token is a target."""
    from trainwright.data.stream.batch import collate
    from trainwright.data.stream.stream import MicroBatch
    from trainwright.data.tokens.dataset import TokenDataset

    tokens = sum(map(len, sequences))
    rows = [(sequence, [True] * len(sequence)) for sequence in sequences]
    dataset = TokenDataset.from_examples(rows, "calibration")
    micro = MicroBatch(0, (tuple(range(len(rows))),), tokens, tokens, float(tokens))
    return lambda: collate(dataset, micro, packed=True, pad_token_id=0)


def prepare_host_copy(direction: str, count: int, device: torch.device) -> Run:
    """Return a copy of ``count`` bytes to a GPU or from it."""
    on_gpu = torch.empty(count, dtype=torch.uint8, device=device)
    on_host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    target, source = (on_gpu, on_host) if direction == "to" else (on_host, on_gpu)
    return lambda: target.copy_(source, non_blocking=True)


_CHANNELS = 64  # of a head of attention
_CPU = torch.device("cpu")


def build_block_case(curve: str, sizes: tuple[float, ...]) -> CalibrationCase:
    """Return a pass over a block as a case; ``sizes`` of its sample."""
    build = partial(prepare_replay, MeasuredBlock.of(sizes), curve.endswith("backward"))
    return CalibrationCase(curve, sizes, build, typical=True, cold=True)


def prepare_replay(block: MeasuredBlock, backward: bool) -> Run:
    """Return a function that runs the kernels. Each reads tensors of its own, as large as those of the model."""
    lengths = vary_lengths(block.sequences, block.length)
    runs = [
        _prepare_kernel(kernel, lengths, backward=backward) for kernel in block.kernels for _ in range(kernel.launches)
    ]

    def run_all() -> None:
        for run in runs:
            run()

    return run_all


def _prepare_kernel(kernel: Kernel, lengths: tuple[int, ...], *, backward: bool) -> Run:
    kind, precision = CURVES[kernel.kind], "bf16" if kernel.width == 2 else "fp32"
    if kind == "product":
        return _prepare_kernel_product(kernel, precision, backward)
    if kind == "attention":  # with as many heads as its FLOPs need
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        heads = round(kernel.flops / kernel.launches / (2 * (5 if backward else 2) * pairs * _CHANNELS))
        direction = "backward" if backward else "forward"
        return prepare_attention(precision, direction, lengths, (max(1, heads), _CHANNELS), _CPU)
    width = DTYPES[precision].itemsize
    read, written = (max(1, round(size / kernel.launches / width)) for size in (kernel.read, kernel.written))
    first = draw_random_tensor((written,), precision, _CPU)
    if kind == "reduction":
        return partial(torch.sum, draw_random_tensor((written, max(1, read // written)), precision, _CPU), -1)
    if kind == "copy":
        return first.clone
    return partial(torch.mul, first, first.clone() if 2 * read >= 3 * written else 1.5)


def _prepare_kernel_product(kernel: Kernel, precision: str, backward: bool) -> Run:
    m, n, k = kernel.m, kernel.n, kernel.k
    if kernel.times > 1:
        first, second = (draw_random_tensor((kernel.times, *shape), precision, _CPU) for shape in ((m, k), (k, n)))
        return partial(torch.bmm, first, second)
    if not backward:
        return prepare_product(precision, "forward", (m, n, k), _CPU)
    return prepare_product(precision, *(("input", (m, k, n)) if kernel.weights else ("weight", (k, m, n))), _CPU)
