"""flex_attention over packs, against float64; uncompiled, which is the same operator on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from tests.support.slow import slow_but
from trainwright.models.attention import packs
from trainwright.models.attention.sequences import Call, Sequences, find_allowed_blocks, find_first_allowed

LENGTHS = ([1, 7, 33, 2, 50], [300, 129, 1, 128, 77], [128, 128, 256])


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # it refuses gradients on a CPU
    monkeypatch.setattr(packs, "compile_flex_attention", lambda: torch_flex.flex_attention)


def sequences(lengths: list[int]) -> Sequences:
    edges = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    return Sequences(edges, max(lengths), torch.device("cpu"))


def expected(call: Call, lengths: list[int]) -> torch.Tensor:
    """All sequences at once with a dense mask, in float64."""
    query, key, value = (x.double() for x in (call.query, call.key, call.value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sequence))
    apart = place[:, None] - place
    allowed = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (call.window or len(place)))
    scores = query @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double().view(1, -1, 1, 1).expand(1, -1, len(place), 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : len(place)] @ value).transpose(1, 2)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", slow_but(None, 8, among=(None, 8, 200)))
@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_it_is_attention(lengths: list[int], window: int | None, softcap: float | None, sinks: bool) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = ((6, 16), (2, 16), (2, 24))
    inputs = [torch.randn(1, n, sum(lengths), w, generator=random).requires_grad_() for n, w in shapes]
    weights = torch.randn(6, generator=random).requires_grad_() if sinks else None
    packed = sequences(lengths)
    call = Call(*inputs, packed.boundaries, max(lengths), 0.25, window, 0.0, softcap, weights)
    found, want = packs.attend(call, packed.block_mask(window)), expected(call, lengths)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    factor = torch.randn(found.shape, generator=random)
    given = inputs if weights is None else [*inputs, weights]
    gradients = torch.autograd.grad((found * factor).sum(), given)
    for one, other in zip(gradients, torch.autograd.grad((want * factor.double()).sum(), given), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 8, 128, 200, 4096])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_blocks_are_those_that_torch_finds_in_a_dense_mask(lengths: list[int], window: int | None) -> None:
    mask, total = sequences(lengths).block_mask(window), sum(lengths)
    dense = torch_flex.create_block_mask(mask.mask_mod, None, None, total, total, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(dense, name))
    assert torch.equal(mask.to_dense(), dense.to_dense())


def test_a_mask_is_made_once_for_all_layers() -> None:
    packed = sequences([5, 9])
    assert packed.block_mask(4) is packed.block_mask(4)
    assert packed.block_mask(4) is not packed.block_mask(None)
    assert packed.in_chunks(3) is packed.in_chunks(3)
    assert packed.in_chunks(3).edges == [0, 3, 5, 8, 11, 14]
    assert packed.in_chunks(3).longest == 3


def test_a_token_sees_its_sequence_up_to_itself() -> None:
    assert find_first_allowed([0, 3, 5], None).tolist() == [0, 0, 0, 3, 3]
    assert find_first_allowed([0, 3, 5], 2).tolist() == [0, 0, 1, 3, 3]
    partly, fully = find_allowed_blocks(find_first_allowed([0, 400], None))
    assert partly.tolist() == [[i == j for j in range(4)] for i in range(4)]
    assert fully.tolist() == [[j < i for j in range(4)] for i in range(4)]
