"""Half-precision products on a CPU have few sizes, and padding changes no loss and no gradient."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.data.stream.batch import Batch, build_flat_layout, build_padded_layout
from trainwright.models.causal_lm import CausalLM, RouterLoss
from trainwright.models.linear_losses import Head, compute_token_statistics, linear_cross_entropy, pad_batch
from trainwright.parallel.constants import compute_padded_size


def _batch(lengths: list[int], *, packed: bool, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for length in lengths:
        tokens = torch.randint(1, 90, (length,), generator=generator, dtype=torch.int32).numpy()
        pairs.append((tokens, torch.ones(length, dtype=torch.bool).numpy()))
    ids, positions, flags, mask = (
        build_flat_layout(pairs, lengths) if packed else build_padded_layout(pairs, lengths, 0)
    )
    predicted = torch.from_numpy((flags.reshape(-1) & (positions.reshape(-1) > 0)).nonzero()[0])
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        lengths=tuple(lengths),
        boundaries=edges if packed else None,
        attention_mask=None if mask is None else torch.from_numpy(mask),
        target_index=predicted - 1,
        targets=torch.from_numpy(ids.reshape(-1))[predicted],
        longest=max(lengths),
        tokens=sum(lengths),
        weight=float(len(predicted)),
        examples=tuple(range(len(lengths))),
        sequences=tuple(range(len(lengths))),
        roles=(0,) * len(lengths),
        target_counts=tuple(length - 1 for length in lengths),
    )


def _model(packed: bool) -> CausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=91,
        max_position_embeddings=64,
    )
    return CausalLM(LlamaForCausalLM(config), packed=packed)


def test_full_rows_need_no_mask_when_they_are_padded() -> None:
    full, mixed = (pad_batch(_batch(lengths, packed=False)) for lengths in ([20, 20], [20, 7]))
    for batch, is_full in ((full, True), (mixed, False)):
        assert batch.input_ids.shape[1] == compute_padded_size(20) > 20
        assert batch.attention_mask is not None
        assert bool(batch.attention_mask.all()) is is_full
        logits = torch.randn(batch.input_ids.numel(), 4, generator=torch.Generator().manual_seed(0))
        changed = logits.view(2, -1, 4).clone()
        changed[:, 20:] = 100.0  # what routers say of padding
        loss = RouterLoss(1.0, 2)
        assert torch.equal(loss.sum([logits], batch), loss.sum([changed.view(-1, 4)], batch))


def test_sizes_are_few_and_at_most_a_sixteenth_larger() -> None:
    sizes = {compute_padded_size(count) for count in range(1, 4097)}
    assert len(sizes) <= 16 * 4 + 16
    for count in range(1, 4097):
        assert count <= compute_padded_size(count) < count + max(16, count / 16 + 1)
        assert compute_padded_size(compute_padded_size(count)) == compute_padded_size(count)


@pytest.mark.parametrize("packed", [True, False])
def test_packs_of_many_lengths_have_products_of_few_sizes(packed: bool) -> None:
    lm = _model(packed).to(torch.bfloat16)
    rows: dict[str, set[int]] = {"layers": set(), "head": set()}
    layer = next(module for module in lm.blocks()[0].modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda _, inputs, __: rows["layers"].add(inputs[0].shape[1]))
    lengths = range(17, 60)
    for length in lengths:
        lm(_batch([length, 5], packed=packed)).backward()
    assert (
        len(rows["layers"]) <= len({compute_padded_size(length + 5 * packed) for length in lengths}) < len(lengths) / 4
    )


@pytest.mark.parametrize("packed", [True, False])
def test_padding_changes_no_loss_and_no_gradient(packed: bool) -> None:
    # 2 x 31 + 1 tokens: neither the tokens nor the targets are a multiple of a size.
    batch = _batch([31, 23, 9], packed=packed)
    exact = _model(packed).double()
    half = copy.deepcopy(exact).to(torch.bfloat16)
    losses = {"exact": exact.compute_token_losses(batch), "half": half.compute_token_losses(batch)}
    assert losses["half"].shape == losses["exact"].shape == (60,)
    assert losses["half"].double() == pytest.approx(losses["exact"].double(), abs=0.03)
    totals = exact(batch), half(batch)
    for total in totals:
        total.backward()
    assert totals[1].item() == pytest.approx(totals[0].item(), rel=2e-3)
    for (name, expected), actual in zip(exact.named_parameters(), half.parameters(), strict=True):
        assert expected.grad is not None and actual.grad is not None
        error = (actual.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 0.03, name
    padding = half.model.get_input_embeddings().weight.grad
    assert padding is not None and not padding[0].any(), "token 0 is only in the padding"


@pytest.mark.parametrize("rows", [1, 15, 17, 33])
def test_the_head_of_any_number_of_targets(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50, 24, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(50, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50, (rows,), generator=generator)
    total = linear_cross_entropy(Head(hidden, weight, bias), targets)
    total.backward()
    parts = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    logits = nn.functional.linear(*parts)
    expected = nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-2)
    for actual, wanted in zip((hidden, weight, bias), parts, strict=True):
        assert actual.grad is not None and wanted.grad is not None
        assert (actual.grad.double() - wanted.grad).norm() < 0.02 * wanted.grad.norm()
    each, correct = compute_token_statistics(Head(hidden, weight, bias), targets)
    assert each.shape == correct.shape == (rows,)
