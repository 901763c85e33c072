"""Check the kernels of training in every precision against plain formulas in fp32 on the CPU."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity, read_answer
from trainwright.machine.catalog import FLOAT8, list_possible_float8
from trainwright.machine.describe import build_cluster
from trainwright.machine.machine import Machine
from trainwright.machine.processor import explain_no_triton
from trainwright.models.fused.choice import explain_not_fused

if TYPE_CHECKING:
    Formula = Callable[..., torch.Tensor]

# Relative difference of a result or a gradient, in the Euclidean norm: from rounding inputs and sums.
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 4e-2}
_SEQUENCES = ((70, 186), (128, 128), (600, 424))  # lengths; short, equal and long ones use different kernels
_HEADS, _KEY_HEADS, _CHANNELS = 4, 2, 64
_TOKENS, _HIDDEN, _VOCABULARY = 128, 256, 1000


def check(context: CheckContext) -> CheckResult:
    """Run every kernel in a separate process, on the device that training uses."""
    machine = context.machine
    arguments = machine.device, list_precisions(machine), has_fused(machine), list_float8_scales(machine)
    values = read_answer(functools.partial(_compare_all, *arguments), "kernels", context)
    findings = [finding for row in values["rows"] if (finding := _judge_kernel(row, values["device"])) is not None]
    worst = dict.fromkeys(TOLERANCES, 0.0)
    for row in values["rows"]:
        if row["error"] is None:
            worst[row["precision"]] = max(worst[row["precision"]], row["difference"])
    tested_precisions = [name for name in worst if any(row["precision"] == name for row in values["rows"])]
    text = ", ".join(f"{name} {worst[name]:.1e} (tolerance {TOLERANCES[name]:.0e})" for name in tested_precisions)
    fact = f"{len(values['rows'])} kernels on {values['device']}, largest difference: {text}"
    return CheckResult((fact,), tuple(findings))


def list_precisions(machine: Machine) -> tuple[str, ...]:
    """Return the precisions that training may use on a machine."""
    if not machine.gpus:
        return ("fp32", "bf16")
    return ("fp32", "bf16", "fp16") if machine.has_bf16 else ("fp32", "fp16")


def has_fused(machine: Machine) -> bool:
    """Return whether a machine's GPUs can have the kernels of ``model.kernels: triton``."""
    if not machine.gpus:
        return False
    card = build_cluster(machine, 1).card
    return explain_not_fused(card.vendor, card.capability, explain_no_triton()) is None


def list_float8_scales(machine: Machine) -> tuple[str, ...]:
    """Return the values of ``train.float8`` that a machine can have: a CPU has all."""
    return list_possible_float8(build_cluster(machine, 1).card) if machine.gpus else FLOAT8


def _judge_kernel(row: dict[str, object], device: str) -> Finding | None:
    precision, name = str(row["precision"]), str(row["name"])
    if row["error"] is not None:
        what = f"the kernel of {name} fails in {precision} on {device}: {row['error']}"
    elif not float(str(row["difference"])) <= TOLERANCES[precision]:  # also true for NaN
        what = f"wrong results: {name} in {precision} on {device} is {float(str(row['difference'])):.1e} off"
    else:
        return None
    return Finding(
        Severity.BROKEN,
        what,
        "training would fail, or learn from wrong gradients without an error",
        "reinstall torch in the version that Trainwright needs; if it happens again, test the device's memory, and "
        "report it with the output of --json",
    )


@dataclass(frozen=True)
class ComparedKernel:
    """A kernel, the formula of its result, its ``inputs`` (random fp32 tensors on the CPU), its only ``precision``."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    run: Formula
    plain: Formula
    precision: str | None = None


def iterate_kernels(device: torch.device) -> Iterator[ComparedKernel]:
    """Yield the kernels that a training step uses."""
    from trainwright.models.linear_losses import Head, linear_cross_entropy

    hidden, weight = torch.randn(_TOKENS, _HIDDEN), torch.randn(_VOCABULARY, _HIDDEN) / _HIDDEN**0.5
    targets = torch.randint(0, _VOCABULARY, (_TOKENS,))
    yield ComparedKernel("matrix products", (hidden, weight), F.linear, lambda x, w: (x[:, None] * w).sum(-1))
    norm_inputs = hidden, torch.rand(_HIDDEN)
    yield ComparedKernel("RMS norms", norm_inputs, lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), _compute_plain_norm)
    yield ComparedKernel(
        "SiLU gates", (hidden, hidden.flip(0)), lambda x, y: F.silu(x) * y, lambda x, y: x / (1 + (-x).exp()) * y
    )
    for lengths in _SEQUENCES:
        tokens = sum(lengths)
        shapes = [(1, heads, tokens, _CHANNELS) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)]
        parts = tuple(torch.randn(shape) for shape in shapes)
        attend = functools.partial(_compute_attention, lengths, device)
        plain = functools.partial(_compute_plain_attention, lengths)
        name = f"attention in sequences of {' and '.join(map(str, lengths))} tokens"
        yield ComparedKernel(name, parts, attend, plain)
    yield ComparedKernel(
        "cross-entropy",
        (hidden, weight),
        lambda x, w: linear_cross_entropy(Head(x, w, None), targets.to(x.device)),
        lambda x, w: -F.log_softmax(x @ w.T, -1).gather(1, targets[:, None]).sum(),
    )


def iterate_fused_kernels() -> Iterator[ComparedKernel]:
    """Yield the kernels of ``model.kernels: triton``."""
    from trainwright.models.fused import operators
    from trainwright.models.linear_losses import Head, linear_cross_entropy

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    name = "model.kernels: triton, {}".format
    hidden, operand, scale = torch.randn(_TOKENS, _HIDDEN), torch.randn(_TOKENS, _HIDDEN), torch.rand(_HIDDEN)
    yield ComparedKernel(
        name("RMS norms"),
        (hidden, scale),
        lambda x, w: operators.rms_norm(x, w, 1e-5, False, False)[0],
        _compute_plain_norm,
    )
    yield ComparedKernel(
        name("norms of sums"),
        (hidden, operand, scale),
        lambda x, y, w: torch.cat(operators.add_rms_norm(x, y, w, 1e-5, False, False)[:2]),
        lambda x, y, w: torch.cat([x + y, _compute_plain_norm(x + y, w)]),
    )
    yield ComparedKernel(
        name("SiLU gates"), (hidden, operand), lambda x, y: operators.gated(x, y, True), lambda x, y: F.silu(x) * y
    )
    angles = torch.randn(1, _TOKENS, _CHANNELS // 2).repeat(1, 1, 2)
    query, key = (torch.randn(1, heads, _TOKENS, _CHANNELS) for heads in (_HEADS, _KEY_HEADS))
    yield ComparedKernel(
        name("rotary positions"),
        (query, key),
        lambda q, k: torch.cat(
            operators.rotary(q, k, angles.cos().to(q.device, q.dtype), angles.sin().to(q.device, q.dtype), False), 1
        ),
        lambda q, k: torch.cat([x * angles.cos() + turn(x) * angles.sin() for x in (q, k)], 1),
    )
    weight, targets = torch.randn(_VOCABULARY, _HIDDEN) / _HIDDEN**0.5, torch.randint(0, _VOCABULARY, (_TOKENS,))
    yield ComparedKernel(
        name("cross-entropy"),
        (hidden, weight),
        lambda x, w: linear_cross_entropy(Head(x, w, None, fused=True), targets.to(x.device)),
        lambda x, w: -F.log_softmax(x @ w.T, -1).gather(1, targets[:, None]).sum(),
    )


def iterate_float8_products(scales: Sequence[str] = FLOAT8) -> Iterator[ComparedKernel]:
    """Yield the products of values of ``train.float8``, whose formula is what a CPU computes."""
    from trainwright.models.float8 import multiply_float8

    inputs = torch.randn(_TOKENS, _HIDDEN), torch.randn(4 * _HIDDEN, _HIDDEN) / _HIDDEN**0.5
    for name in scales:
        run = functools.partial(multiply_float8, scales=name)
        yield ComparedKernel(
            f"train.float8: {name}", inputs, run, lambda x, w, run=run: run(x.bfloat16(), w.bfloat16()).float(), "bf16"
        )


def _compare_all(device_type: str, names: tuple[str, ...], fused: bool, float8: tuple[str, ...], answer: Path) -> None:
    from trainwright.doctor.calibrate_cases import DTYPES

    torch.manual_seed(0)
    device = torch.device(device_type)
    rows = []
    optional = (*(iterate_fused_kernels() if fused else ()), *iterate_float8_products(float8))
    for kernel in (*iterate_kernels(device), *optional):
        for name in names if kernel.precision is None else (kernel.precision,):
            error, difference = None, None
            try:
                difference = compare_kernel(kernel, device, DTYPES[name])
            except RuntimeError as raised:
                error = " ".join(str(raised).split())[:300]
            rows.append({"name": kernel.name, "precision": name, "error": error, "difference": difference})
    optimizer_difference = _measure_optimizer_difference(device)
    rows.append({"name": "AdamW", "precision": "fp32", "error": None, "difference": optimizer_difference})
    device_name = "the CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    answer.write_text(json.dumps({"device": device_name, "rows": rows}), encoding="utf-8")


def compare_kernel(kernel: ComparedKernel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative difference of the result and the gradients."""
    inputs = [tensor.to(dtype) for tensor in kernel.inputs]
    actual = _compute_with_gradients(kernel.run, [tensor.to(device) for tensor in inputs])
    expected = _compute_with_gradients(kernel.plain, [tensor.float() for tensor in inputs])
    differences = [(a.float().cpu() - b).norm() / b.norm() for a, b in zip(actual, expected, strict=True)]
    return float(torch.stack(differences).max())


def _compute_with_gradients(function: Formula, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    # The same upstream gradient for both, in a form that both precisions have exactly.
    upstream = (
        torch.ones_like(output) if output.ndim == 0 else (torch.arange(output.numel()) % 7 - 3).view(output.shape)
    )
    upstream = upstream.to(output.device, output.dtype)
    gradients = torch.autograd.grad(output, leaves, upstream)
    return [output.detach(), *gradients]


def _compute_plain_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _compute_attention(
    lengths: tuple[int, ...], device: torch.device, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    from trainwright.models.attention.packs import packed_attention

    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    output, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, cu_seq_lens_q=edges, max_length_q=max(lengths)
    )
    return output


def _compute_plain_attention(
    lengths: tuple[int, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return softmax(QK^T / sqrt(D)) V over the earlier tokens of each sequence, [1, T, H, D]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (sequence[:, None] == sequence).tril()
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _measure_optimizer_difference(device: torch.device) -> float:
    """Return the relative difference of fused AdamW's update to its formula, after three steps."""
    rate, decay, betas, eps = 1e-2, 0.1, (0.9, 0.95), 1e-8
    start, gradients = torch.randn(4096), torch.randn(3, 4096)
    parameter = torch.nn.Parameter(start.clone().to(device))
    optimizer = torch.optim.AdamW([parameter], lr=rate, betas=betas, eps=eps, weight_decay=decay, fused=True)
    weight, first, second = start.clone(), torch.zeros(4096), torch.zeros(4096)
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.to(device)
        optimizer.step()
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.square()
        scale = (second / (1 - betas[1] ** step)).sqrt() + eps
        weight = weight * (1 - rate * decay) - rate / (1 - betas[0] ** step) * first / scale
    update = weight - start
    return float((parameter.detach().cpu() - weight).norm() / update.norm())
