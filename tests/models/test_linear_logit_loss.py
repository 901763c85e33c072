"""Losses of all logits in chunks, against the plain computation: value, gradients, and a teacher's logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainwright.models import linear_losses as chunked
from trainwright.models.linear_losses import Head, linear_logit_loss


def head(seed: int, softcap: float | None, scale: float) -> Head:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(30, 8, generator=generator), torch.randn(50, 8, generator=generator)
    bias = torch.randn(50, generator=generator)
    return Head(hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), softcap, scale)


def logits(of: Head) -> torch.Tensor:
    found = F.linear(of.hidden, of.weight, of.bias) * of.logit_scale
    return found if of.softcap is None else of.softcap * torch.tanh(found / of.softcap)


def divergence(own: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None) -> torch.Tensor:
    assert teacher is not None
    return F.kl_div(own.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="none").sum(1)


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 50 * 4, 2**30])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.5), (3.0, 1.0), (2.0, 1.5)])
def test_a_distillation_has_the_value_and_gradients_of_the_plain_computation(
    softcap: float | None, scale: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(chunked, "BLOCK_BYTES", chunk_bytes // 3)
    own, teacher = head(0, softcap, scale), head(1, softcap, scale)
    targets = torch.arange(30) % 50
    total, each, losses = linear_logit_loss(own, targets, divergence, teacher)
    expected = divergence(logits(own), targets, logits(teacher).detach())
    torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses, F.cross_entropy(logits(own), targets, reduction="none"), rtol=1e-4, atol=1e-5)
    assert not each.requires_grad and not losses.requires_grad
    leaves = [own.hidden, own.weight, own.bias]
    got = torch.autograd.grad(total / 7, leaves)  # type: ignore[arg-type]
    want = torch.autograd.grad(expected.sum() / 7, leaves)  # type: ignore[arg-type]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
