"""The cases of a calibration: the operations of a training step, over the sizes of models.

Each case is one operation at one size, run as in training: the same kernels, newly allocated outputs, gradients by
autograd. Names and sizes are those of ``machine.measured.calibration.ProcessRates``.
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

if TYPE_CHECKING:
    from trainwright.data.stream.batch import Batch

Run = Callable[[], object]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp16", "tf32", "fp32")}

_Shape = tuple[int, int, int]
# (m, n, k): tokens, output width, input width. Few tokens, narrow and wide matrices, and some sizes that are not
# powers of two.
_PRODUCTS: dict[str, tuple[_Shape, ...]] = {
    "cpu": (
        (64, 512, 512),
        (256, 256, 256),
        (1024, 128, 512),
        (256, 1024, 768),
        (1024, 576, 576),
        (1024, 1536, 576),
        (1024, 576, 1536),
        (2048, 256, 1024),
        (1024, 4096, 512),
        (512, 2048, 2048),
        (1024, 8192, 320),
    ),
    "cuda": (
        (1024, 1024, 1024),
        (4096, 576, 576),
        (2048, 2048, 2048),
        (8192, 1024, 4096),
        (16384, 1536, 1536),
        (4096, 4096, 4096),
        (8192, 4096, 4096),
        (8192, 14336, 4096),
        (8192, 4096, 14336),
        (4096, 32768, 2048),
    ),
}
_HELD_OUT_PRODUCTS: dict[str, tuple[_Shape, ...]] = {
    "cpu": ((128, 768, 768), (2048, 512, 384), (1024, 1024, 1024), (768, 2304, 640)),
    "cuda": ((4096, 1536, 576), (4096, 2560, 2560), (8192, 8192, 4096), (4096, 11008, 4096)),
}
# Elements of the tensors that a kernel reads.
_TRAFFIC = {"cpu": (2**14, 2**17, 2**20, 2**22, 2**23, 2**24), "cuda": (2**16, 2**20, 2**23, 2**25, 2**27)}
_HELD_OUT_TRAFFIC = {"cpu": (2**19, 3 * 2**21), "cuda": (2**22, 2**26)}
# Lengths of sequences; for a CPU below and above the length from which its bf16 kernel is used.
_ATTENTION = {"cpu": (32, 64, 128, 256, 511, 512, 1024, 2048), "cuda": (128, 512, 2048, 8192, 16384)}
_HELD_OUT_ATTENTION = {"cpu": (192, 768), "cuda": (1024, 4096)}
_ATTENTION_SHAPE = {"cpu": (512, 8, 64), "cuda": (16384, 32, 128)}  # tokens, heads, head size
_OPTIMIZER = {"cpu": (2**18, 2**21, 2**24), "cuda": (2**20, 2**24, 2**28)}
_HELD_OUT_OPTIMIZER = {"cpu": (2**23,), "cuda": (2**26,)}
_DATA = ((1, 64), (8, 1024), (2, 2048), (32, 4096))  # sequences, tokens
_HELD_OUT_DATA = ((4, 1024), (16, 2048))
_LOSS = {"cpu": (2**18, 2**22), "cuda": (2**24, 2**27)}  # logits
_HELD_OUT_LOSS = {"cpu": (2**20,), "cuda": (2**26,)}
_LOSS_ROW = 2**13
_LEAST_WIDTH = 8
_HOST_LINK = (2**20, 2**24, 2**28)
_HELD_OUT_HOST_LINK = (2**26,)


@dataclass(frozen=True)
class CalibrationCase:
    """A case of the calibration.

    ``build`` creates the inputs and returns the function to time; the curve's seconds are its seconds divided by
    ``amount``. ``joint``: it waits for the other processes, so all must call it equally often. ``typical``: its typical
    time counts, not its minimum. ``cold``: its inputs are not in the caches, as in a step of a large model; only the
    quick measurement has such cases.
    """

    curve: str
    sizes: tuple[float, ...]
    held_out: bool
    build: Callable[[], Run]
    amount: float = 1.0
    joint: bool = False
    typical: bool = False
    cold: bool = False


def product_cases(device: torch.device) -> Iterator[CalibrationCase]:
    """Yield matrix products in the three layouts of a linear module's training, in every precision."""
    for shape, held_out in _both(_PRODUCTS[device.type], _HELD_OUT_PRODUCTS[device.type]):
        for precision in PRECISIONS[device.type]:
            yield from products_of(shape, precision, device, held_out)


def products_of(
    shape: _Shape, precision: str, device: torch.device, held_out: bool = False
) -> Iterator[CalibrationCase]:
    """Yield the products of one linear module: (tokens, output width, input width)."""
    for layout in ("forward", "input", "weight"):
        build = partial(_product, precision, layout, shape, device)
        yield CalibrationCase(f"product/{precision}/{layout}", _multiplied(layout, shape), held_out, build)


def traffic_cases(device: torch.device) -> Iterator[CalibrationCase]:
    """Yield kernels that are bound by memory, or on a CPU by the work per element."""
    for elements, held_out in _both(_TRAFFIC[device.type], _HELD_OUT_TRAFFIC[device.type]):
        for precision in ("fp32", "bf16"):
            for kind in _KINDS:
                yield traffic_of(precision, kind, elements, device, held_out)


def traffic_of(
    precision: str, kind: str, elements: int, device: torch.device, held_out: bool = False
) -> CalibrationCase:
    """Return kernels of one kind on tensors of ``elements`` elements."""
    kernels, numbers = _KINDS[kind]
    size = DTYPES[precision].itemsize * elements * numbers / kernels
    build = partial(_traffic, precision, kind, elements, device)
    return CalibrationCase(f"traffic/{precision}/{kind}", (size,), held_out, build, amount=kernels)


def attention_cases(device: torch.device) -> Iterator[CalibrationCase]:
    """Yield causal attention within sequences, as in packed training."""
    for length, held_out in _both(_ATTENTION[device.type], _HELD_OUT_ATTENTION[device.type]):
        for precision in ("fp32", "bf16"):
            yield from attention_of(precision, length, device, held_out)


def attention_of(
    precision: str, length: int, device: torch.device, held_out: bool = False
) -> Iterator[CalibrationCase]:
    """Yield both directions of attention over sequences of about one length."""
    _, heads, channels = _ATTENTION_SHAPE[device.type]
    amount = sum(_attention_lengths(length, device)) * heads * channels
    for direction in ("forward", "backward"):
        build = partial(_attention, precision, direction, length, device)
        yield CalibrationCase(f"attention/{precision}/{direction}", (length,), held_out, build, amount)


def other_cases(device: torch.device) -> Iterator[CalibrationCase]:
    """Yield the optimizer, the loss, preparing a batch, and copies between a GPU and the host."""
    for elements, held_out in _both(_OPTIMIZER[device.type], _HELD_OUT_OPTIMIZER[device.type]):
        yield CalibrationCase("optimizer", (elements,), held_out, partial(_optimizer, elements, device))
    for logits, held_out in _both(_LOSS[device.type], _HELD_OUT_LOSS[device.type]):
        for precision in ("fp32", "bf16"):
            yield loss_of(precision, logits, device, held_out)
    for (sequences, tokens), held_out in _both(_DATA, _HELD_OUT_DATA):
        yield CalibrationCase("data", (sequences, tokens), held_out, partial(_data, sequences, tokens, device))
    if device.type == "cuda":
        for elements, held_out in _both(_OPTIMIZER["cpu"], _HELD_OUT_OPTIMIZER["cpu"]):
            yield CalibrationCase(
                "host_optimizer", (elements,), held_out, partial(_optimizer, elements, torch.device("cpu"))
            )
        for count, held_out in _both(_HOST_LINK, _HELD_OUT_HOST_LINK):
            for direction in ("to", "from"):
                yield CalibrationCase(
                    f"host/{direction}", (count,), held_out, partial(_host_copy, direction, count, device)
                )


def loss_of(precision: str, logits: int, device: torch.device, held_out: bool = False) -> CalibrationCase:
    """Return cross-entropy of ``logits`` logits with its gradient."""
    return CalibrationCase(f"loss/{precision}", (logits,), held_out, partial(_loss, precision, logits, device))


def optimizer_of(elements: int, device: torch.device) -> CalibrationCase:
    """Return AdamW's kernel without ``torch.optim``, whose first step imports torch's compiler."""
    return CalibrationCase("optimizer", (elements,), False, partial(_update, elements, device))


def _both(used: tuple[Any, ...], held_out: tuple[Any, ...]) -> list[tuple[Any, bool]]:
    return [(size, False) for size in used] + [(size, True) for size in held_out]


def _random(shape: tuple[int, ...], precision: str, device: torch.device) -> torch.Tensor:
    """Return random numbers: a GPU's power, and so its clock, depends on the bits that change."""
    count = math.prod(shape)
    some = _some_random(precision, device)
    return some.repeat(-(-count // len(some)))[:count].view(
        shape
    )  # generating all of them takes longer than the timed operation


@cache
def _some_random(precision: str, device: torch.device) -> torch.Tensor:
    return torch.randn(2**16, device=device).to(DTYPES[precision])


def _multiplied(layout: str, shape: _Shape) -> _Shape:
    """Return the sizes [m, k] @ [k, n] of a linear module's product: tokens, output width, input width."""
    tokens, wide, narrow = shape
    return {"forward": (tokens, wide, narrow), "input": (tokens, narrow, wide), "weight": (wide, narrow, tokens)}[
        layout
    ]


def _product(precision: str, layout: str, shape: _Shape, device: torch.device) -> Run:
    m, n, k = shape
    if layout == "forward":
        run = partial(F.linear, _random((m, k), precision, device), _random((n, k), precision, device))
    else:
        grad = _random((m, n), precision, device)
        first, right = (grad, (n, k)) if layout == "input" else (grad.t(), (m, k))
        run = partial(torch.mm, first, _random(right, precision, device))
    return partial(_in_tf32, run) if precision == "tf32" else run


def _in_tf32(run: Run) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run()
    finally:
        torch.set_float32_matmul_precision(before)


# Number of kernels that are timed together, and of elements that they read and write per element.
_KINDS = {"copy": (1, 2), "elementwise": (2, 6), "reduction": (1, 1)}
_ROW = 512


def _traffic(precision: str, kind: str, elements: int, device: torch.device) -> Run:
    x, y = _random((elements // _ROW, _ROW), precision, device), _random((elements // _ROW, _ROW), precision, device)
    runs: dict[str, Run] = {
        "copy": lambda: x.clone(),
        "elementwise": lambda: (x * y, x + y),
        "reduction": lambda: x.sum(-1),
    }
    return runs[kind]


def _attention_lengths(length: int, device: torch.device) -> tuple[int, ...]:
    return unequal_lengths(max(1, _ATTENTION_SHAPE[device.type][0] // length), length)


def _attention(precision: str, direction: str, length: int, device: torch.device) -> Run:
    from trainwright.models.attention.packs import packed_attention

    _, heads, channels = _ATTENTION_SHAPE[device.type]
    lengths = _attention_lengths(length, device)
    tokens = sum(lengths)
    query, key, value = (_random((1, heads, tokens, channels), precision, device).requires_grad_() for _ in range(3))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    module = torch.nn.Module()

    def forward() -> torch.Tensor:
        return packed_attention(
            module, query, key, value, None, cu_seq_lens_q=boundaries, max_length_q=max(lengths), scaling=channels**-0.5
        )[0]

    if direction == "forward":
        return torch.no_grad()(forward)
    output = forward()
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, (query, key, value), grad, retain_graph=True)


def unequal_lengths(sequences: int, length: int) -> tuple[int, ...]:
    """Return lengths within 10 % of ``length``, as equal sequences would be computed as one batch."""
    spread = range(1 - sequences, sequences, 2)
    return tuple(length + round(0.1 * length * index / max(1, sequences - 1)) for index in spread)


def _optimizer(elements: int, device: torch.device) -> Run:
    parameter = torch.nn.Parameter(torch.randn(elements, device=device))
    parameter.grad = torch.randn(elements, device=device)
    return torch.optim.AdamW([parameter], fused=True).step


def _update(elements: int, device: torch.device) -> Run:
    weight, gradient, first, second = (_random((elements,), "fp32", device) for _ in range(4))
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    numbers |= {"amsgrad": False, "maximize": False}
    step = torch.ones((), device=device)
    second.abs_()
    return lambda: torch._fused_adamw_([weight], [gradient], [first], [second], [], [step], **numbers)


def _loss(precision: str, logits: int, device: torch.device) -> Run:
    from trainwright.models.linear_losses import Head, linear_cross_entropy

    # The minimum width of hidden states: the products are measured separately.
    hidden = _random((logits // _LOSS_ROW, _LEAST_WIDTH), precision, device)
    weight = _random((_LOSS_ROW, _LEAST_WIDTH), precision, device)
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=device)
    return lambda: linear_cross_entropy(Head(hidden, weight, None), targets)


def _data(sequences: int, tokens: int, device: torch.device) -> Run:
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


def _host_copy(direction: str, count: int, device: torch.device) -> Run:
    there = torch.empty(count, dtype=torch.uint8, device=device)
    here = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    target, source = (there, here) if direction == "to" else (here, there)
    return lambda: target.copy_(source, non_blocking=True)
