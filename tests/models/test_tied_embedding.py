from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.models.linear_losses import share_gradient

TOKENS = torch.tensor([[3, 1, 3, 7], [0, 3, 7, 2]])


def modules(padding: int | None = None, dtype: torch.dtype = torch.float64) -> tuple[nn.Embedding, nn.Linear]:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(9, 5, padding_idx=padding).to(dtype), nn.Linear(5, 9, bias=False).to(dtype)
    head.weight = embedding.weight
    return embedding, head


def gradient(embedding: nn.Embedding, head: nn.Linear, *, shared: bool) -> torch.Tensor:
    if shared:
        with share_gradient(embedding, head) as head_weight:
            hidden = embedding(TOKENS)
        weight = head_weight()
    else:
        hidden, weight = embedding(TOKENS), head.weight
    (hidden.tanh() @ weight.t()).square().sum().backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_is_that_of_both_uses(padding: int | None, dtype: torch.dtype) -> None:
    expected = gradient(*modules(padding, dtype), shared=False)
    torch.testing.assert_close(gradient(*modules(padding, dtype), shared=True), expected)


def test_the_weight_gets_one_gradient_and_no_tensor_of_zeros() -> None:
    embedding, head = modules()
    seen = []
    embedding.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradient(embedding, head, shared=True)
    assert len(seen) == 1
    assert "aten::embedding_dense_backward" not in {event.key for event in profile.key_averages()}


def test_gradients_of_several_passes_add_up() -> None:
    embedding, head = modules()
    once = gradient(embedding, head, shared=True).clone()
    torch.testing.assert_close(gradient(embedding, head, shared=True), 2 * once)


@pytest.mark.parametrize("changed", ["hooked", "frozen", "untied", "no gradients"])
def test_where_something_else_has_its_hands_on_it_nothing_changes(changed: str) -> None:
    embedding, head = modules()
    calls = []
    if changed == "hooked":
        embedding.register_forward_pre_hook(lambda *_: calls.append("hook"))
    if changed == "frozen":
        embedding.weight.requires_grad_(False)
    if changed == "untied":
        head.weight = nn.Parameter(torch.zeros_like(embedding.weight))
    with torch.set_grad_enabled(changed != "no gradients"), share_gradient(embedding, head) as head_weight:
        assert embedding(TOKENS).equal(nn.functional.embedding(TOKENS, embedding.weight))
        assert head_weight() is head.weight
    assert "forward" not in vars(embedding)
    assert bool(calls) == (changed == "hooked")
