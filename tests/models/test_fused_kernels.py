"""The fused kernels in Triton's interpreter, compared with the formulas that they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.interpreted import needs_interpreter
from trainwright.models import linear_losses
from trainwright.models.fused import operators
from trainwright.models.linear_losses import Head, Terms, compute_token_statistics, linear_cross_entropy

pytestmark = needs_interpreter

# The interpreter rounds to bf16 towards zero, by up to a unit of the last of 8 bits.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    return logits.to(dtype), torch.randint(vocabulary, (rows,), generator=generator)


@pytest.mark.parametrize("vocabulary", [7, 256, 5003])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.2)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient(
    vocabulary: int, softcap: float | None, z_loss: float, smoothing: float, weighted: bool, dtype: torch.dtype
) -> None:
    logits, targets = logits_of(5, vocabulary, dtype)
    weights = torch.linspace(-1, 2, 5) if weighted else None
    exact = logits.double().requires_grad_()
    finished = 0.7 * exact if softcap is None else softcap * torch.tanh(0.7 * exact / softcap)
    each = F.cross_entropy(finished, targets, reduction="none", label_smoothing=smoothing)
    each = each + z_loss * finished.logsumexp(1).square()
    each = each if weights is None else each * weights
    each.sum().backward()
    losses = operators.cross_entropy(logits, targets, weights, softcap, 0.7, z_loss, smoothing)
    torch.testing.assert_close(losses, each.detach().float(), rtol=1e-6, atol=1e-6)
    rounding = ROUNDING[dtype]
    assert exact.grad is not None
    torch.testing.assert_close(logits.double(), exact.grad, rtol=rounding, atol=1e-6)


def test_a_loss_without_targets() -> None:
    logits, targets = logits_of(0, 50, torch.float32)
    assert operators.cross_entropy(logits, targets, None, None, 1.0, 0.0, 0.0).shape == (0,)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_the_prediction_is_the_first_of_the_largest(softcap: float | None) -> None:
    logits, _ = logits_of(6, 5003, torch.float32)
    logits[:, 4000] = logits[:, 17] = 50.0
    before, targets = logits.clone(), torch.tensor([17, 4000, 3, 17, 4000, 5002])
    losses, correct = operators.loss_and_correct(logits, targets, softcap, 0.3)
    assert correct.tolist() == [True, False, False, True, False, False]
    assert torch.equal(logits, before)
    finished = 0.3 * logits.double() if softcap is None else softcap * torch.tanh(0.3 * logits.double() / softcap)
    expected = F.cross_entropy(finished, targets, reduction="none").float()
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


def llama_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("shape", [(1, 3, 64), (2, 5, 4, 100), pytest.param((700, 576), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("formula", "offset", "rounded"), [(llama_norm, False, True), (gemma_norm, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(shape: tuple[int, ...], formula, offset: bool, rounded: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)
    x, weight, slope = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[-1:], shape))
    results = []
    for compute in (formula, lambda a, b, eps: operators.rms_norm(a, b, eps, offset, rounded)[0]):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = compute(*inputs, 1e-3)
        results.append((out, *torch.autograd.grad(out, inputs, slope)))
    names = ("output", "gradient of the inputs", "gradient of the weight")
    for name, one, other in zip(names, *results, strict=True):
        error = (one.double() - other.double()).norm() / one.double().norm()
        assert one.dtype == other.dtype and error < ROUNDING[dtype], name


@pytest.mark.parametrize("shape", [(1, 3, 64), (2, 5, 4, 100), pytest.param((700, 576), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("formula", "offset", "rounded"), [(llama_norm, False, True), (gemma_norm, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_their_norms(shape: tuple[int, ...], formula, offset: bool, rounded: bool, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)
    x, residual, of_total, slope = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1:], generator=generator).to(dtype)
    results = []
    for fused in (False, True):
        inputs = [x.clone().requires_grad_(), residual.clone().requires_grad_(), weight.clone().requires_grad_()]
        if fused:
            total, out, _ = operators.add_rms_norm(*inputs, 1e-3, offset, rounded)
        else:
            total = inputs[0] + inputs[1]
            out = formula(total, inputs[2], 1e-3)
        results.append((total, out, *torch.autograd.grad((total, out), inputs, (of_total, slope))))
    for one, other in zip(*results, strict=True):
        error = (one.double() - other.double()).norm() / one.double().norm()
        assert one.dtype == other.dtype and error < 2 * ROUNDING[dtype]  # two roundings


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(silu: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up, slope = ((2 * torch.randn(3, 7, 130, generator=generator)).to(dtype) for _ in range(3))
    inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    out = operators.gated(*inputs, silu)
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    expected = (F.silu(exact[0]) if silu else F.gelu(exact[0], approximate="tanh")) * exact[1]
    results = (out, *torch.autograd.grad(out, inputs, slope))
    for one, other in zip(results, (expected, *torch.autograd.grad(expected, exact, slope.double())), strict=True):
        tolerance = ROUNDING[dtype] * (1 if dtype is torch.float32 else 2)  # two roundings
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max()


def eager_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


@pytest.mark.parametrize(("heads", "shared"), [((4, 4), True), ((9, 3), False), ((8, 1), True)])
@pytest.mark.parametrize(
    ("size", "rotated"),
    [(64, 64), (96, 48), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((128, 32), (256, 256)))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions(heads: tuple[int, int], shared: bool, size: int, rotated: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, 5, count, size, generator=generator).to(dtype).transpose(1, 2) for count in heads)
    cos, sin = (torch.randn(1 if shared else 2, 5, rotated, generator=generator).to(dtype) for _ in range(2))
    slopes = [torch.randn(x.shape, generator=generator).to(dtype) for x in (query, key)]
    results = []
    for fused in (False, True):
        inputs = [query.clone().requires_grad_(), key.clone().requires_grad_()]
        out = operators.rotary(*inputs, cos, sin, False) if fused else [eager_rotary(x, cos, sin) for x in inputs]
        results.append((*out, *torch.autograd.grad(out, inputs, slopes)))
    for one, other in zip(*results, strict=True):
        tolerance = ROUNDING[dtype] * (1 if dtype is torch.float32 else 2)  # three roundings of numbers up to 4
        torch.testing.assert_close(other, one, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [50 * 500 * 4, pytest.param(2**30, marks=pytest.mark.slow)])
def test_a_head_with_the_fused_loss(dtype: torch.dtype, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FUSED_CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (0.5 * torch.randn(rows, 24, generator=generator) for rows in (130, 500))
    targets, weights = torch.randint(500, (130,), generator=generator), torch.linspace(-1, 2, 130)
    results = []
    for fused in (False, True):
        inputs = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        head = Head(*inputs, None, 3.0, 0.7, fused)
        total = linear_cross_entropy(head, targets, target_weights=weights, terms=Terms(0.1, 0.2))
        results.append((total, *torch.autograd.grad(total / 7, inputs), *compute_token_statistics(head, targets)))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= ROUNDING[dtype] * one.double().norm()


def test_a_head_in_double_precision_has_the_plain_loss() -> None:
    hidden, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    losses = [linear_cross_entropy(Head(hidden, weight, None, fused=fused), torch.arange(3)) for fused in (False, True)]
    assert torch.equal(*losses)
