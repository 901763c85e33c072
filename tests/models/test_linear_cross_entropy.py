from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainwright.models import linear_losses as module
from trainwright.models.linear_losses import Head, Terms, compute_token_statistics, linear_cross_entropy


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="none")


def leaves(
    targets: int = 130, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(targets, 24, generator=generator).requires_grad_()
    weight = torch.randn(500, 24, generator=generator).mul_(0.3).requires_grad_()
    offset = torch.randn(500, generator=generator).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(500, (targets,), generator=generator)


@pytest.mark.parametrize("chunk_bytes", [1, 50 * 500 * 4, 2**30])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_the_plain_computation(
    chunk_bytes: int, softcap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk_bytes // 3)
    hidden, weight, offset, targets = leaves(bias=bias)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    total = linear_cross_entropy(Head(hidden, weight, offset, softcap, 0.7), targets)
    expected = plain(hidden, weight, offset, targets, softcap, 0.7).sum()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(total / 7, inputs)
    want = torch.autograd.grad(expected / 7, inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_targets_count_as_much_as_their_weights_say(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 50 * 500 * 4)
    hidden, weight, offset, targets = leaves()
    assert offset is not None
    weights = torch.linspace(-2, 3, len(targets))
    total = linear_cross_entropy(Head(hidden, weight, offset, softcap), targets, target_weights=weights)
    expected = (plain(hidden, weight, offset, targets, softcap, 1.0) * weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    got = torch.autograd.grad(total, [hidden, weight, offset])
    want = torch.autograd.grad(expected, [hidden, weight, offset])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_z_loss_is_the_square_of_the_log_sum_exp(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 50 * 500 * 4)
    hidden, weight, offset, targets = leaves()
    assert offset is not None
    total = linear_cross_entropy(Head(hidden, weight, offset, softcap, 0.7), targets, terms=Terms(z_loss=0.1))
    logits = F.linear(hidden, weight, offset) * 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, targets, reduction="sum") + 0.1 * logits.logsumexp(1).square().sum()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    got = torch.autograd.grad(total, [hidden, weight, offset])
    want = torch.autograd.grad(expected, [hidden, weight, offset])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_label_smoothing_is_that_of_torch(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 50 * 500 * 4)
    hidden, weight, offset, targets = leaves()
    assert offset is not None
    smoothed = Terms(z_loss=0.1, label_smoothing=0.2)
    total = linear_cross_entropy(Head(hidden, weight, offset, softcap, 0.7), targets, terms=smoothed)
    logits = F.linear(hidden, weight, offset) * 0.7
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2)
    expected = expected + 0.1 * logits.logsumexp(1).square().sum()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    got = torch.autograd.grad(total, [hidden, weight, offset])
    want = torch.autograd.grad(expected, [hidden, weight, offset])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_the_gradient_of_a_bf16_head_is_summed_over_chunks_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = leaves(targets=2000, bias=False)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    (whole,) = torch.autograd.grad(linear_cross_entropy(Head(hidden, weight, None), targets), weight)
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * 500 * 2)  # two targets a chunk
    (parts,) = torch.autograd.grad(linear_cross_entropy(Head(hidden, weight, None), targets), weight)
    # Each part is a product in bf16; a thousand of them summed in bf16 are off by several times this.
    assert (parts.float() - whole.float()).norm() < 4e-3 * whole.float().norm()


def test_tied_weights_get_both_gradients() -> None:
    _, weight, _, targets = leaves()
    total = linear_cross_entropy(Head(F.embedding(targets, weight), weight, None), targets.flip(0))
    expected = plain(F.embedding(targets, weight), weight, None, targets.flip(0), None, 1.0).sum()
    torch.testing.assert_close(
        torch.autograd.grad(total, weight)[0], torch.autograd.grad(expected, weight)[0], rtol=1e-5, atol=1e-5
    )


def test_the_full_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 20 * 500 * 4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight, offset, targets = leaves(targets=400)
    with Watch():
        linear_cross_entropy(Head(hidden, weight, offset), targets).backward()
    assert largest <= 500 * 24  # the head itself; all logits would be 400 x 500


def test_no_targets_is_no_loss_and_a_zero_gradient() -> None:
    hidden, weight, offset, targets = leaves(targets=0)
    total = linear_cross_entropy(Head(hidden, weight, offset), targets)
    assert total.item() == 0
    assert torch.autograd.grad(total, weight)[0].abs().max() == 0


def test_statistics_are_the_losses_and_hits_of_each_target() -> None:
    hidden, weight, offset, targets = leaves()
    losses, correct = compute_token_statistics(Head(hidden, weight, offset, 3.0), targets)
    torch.testing.assert_close(losses, plain(hidden, weight, offset, targets, 3.0, 1.0), rtol=1e-5, atol=1e-5)
    assert (correct == (F.linear(hidden, weight, offset).argmax(1) == targets)).all()


def test_bf16_computes_the_softmax_in_fp32() -> None:
    hidden, weight, _, targets = leaves(bias=False)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    total = linear_cross_entropy(Head(low[0], low[1], None), targets)
    exact = plain(low[0].double(), low[1].double(), None, targets, None, 1.0).sum()
    assert total.dtype == torch.float32
    assert abs(total.item() - exact.item()) < 2e-3 * exact.item()
