"""Pairs of what is forgotten and what is kept: a seeded rule of the stream, the same however it is divided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.data.stream.batch import collate
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.lengths import count_lengths
from trainwright.tasks.unlearn.losses import find_target_indices, select_role_sequences
from trainwright.tasks.unlearn.stream import (
    FORGET,
    REFUSAL,
    RETAIN,
    join_datasets,
    sample_examples,
    select_role_examples,
)

FORGOTTEN, KEPT = 6, 10


def rows(count: int, first: int, length: int) -> TokenDataset:
    """Sequences of ``length`` tokens and more, the first of each its number."""
    examples = [([first + n, *range(1, length + n % 3)], [False, *[True] * (length - 1 + n % 3)]) for n in range(count)]
    return TokenDataset.from_examples(examples, f"{first}")


@pytest.fixture
def pairs(tmp_path: Path) -> TokenDataset:
    return join_datasets(rows(FORGOTTEN, 100, 4), rows(KEPT, 200, 5), tmp_path)


def stream(dataset: TokenDataset, **settings: object) -> Stream:
    asked = {"global_batch_size": 4, "seed": 3, "rows": 2, "total_examples": 60, "example_weight": 1.0, **settings}
    return Stream(dataset, StreamSettings(**asked))  # type: ignore[arg-type]


def first_tokens(dataset: TokenDataset, example: int) -> list[int]:
    return [int(dataset.sequence(sequence)[0][0]) for sequence in dataset.sequences(example)]


def test_every_forget_row_comes_once_an_epoch_with_a_retain_row(pairs: TokenDataset) -> None:
    found = [first_tokens(pairs, example) for step in range(15) for example in stream(pairs).examples(step)]
    assert len(found) == 60
    for epoch in range(10):
        own = found[epoch * FORGOTTEN : (epoch + 1) * FORGOTTEN]
        assert sorted(forget for forget, _ in own) == list(range(100, 106))
    kept = Counter(retain for _, retain in found)
    assert set(kept) == set(range(200, 210))
    assert max(kept.values()) == min(kept.values()) == 6  # ten epochs of six are six rounds of ten
    assert len({tuple(pair) for pair in found}) > 30  # others meet in every epoch


def test_pairs_do_not_depend_on_how_they_are_divided(pairs: TokenDataset) -> None:
    for one, other in (
        (stream(pairs), stream(pairs, rows=None, micro_batches=3)),
        (stream(pairs), stream(pairs, rows=4)),
    ):
        assert all(one.examples(step) == other.examples(step) for step in range(15))
    assert stream(pairs).examples(2) != stream(pairs, seed=4).examples(2)


def test_a_pair_weighs_one_and_has_the_tokens_of_both(pairs: TokenDataset) -> None:
    batch = stream(pairs).global_batch(0)
    assert batch.weight == 4.0
    assert batch.tokens == sum(pairs.length(example) for micro in batch.micro_batches for example in micro.examples)
    lengths = count_lengths(pairs)
    assert lengths.examples == FORGOTTEN
    assert 9 <= min(lengths.quantiles) <= lengths.longest <= 13


def test_documents_know_what_they_are(pairs: TokenDataset) -> None:
    forget, retain = pairs.sequences(FORGOTTEN * 4 + 2)
    assert (pairs.role(forget), pairs.role(retain)) == (FORGET, RETAIN)
    assert first_tokens(pairs, FORGOTTEN * 4 + 2) == [102, 204]


def test_what_is_measured_is_some_of_what_is_trained_on(pairs: TokenDataset) -> None:
    measured = sample_examples(pairs, 0.5, seed=1)
    assert len(measured) == 3
    chosen = stream(measured, total_examples=3, shuffle=False)
    found = [first_tokens(measured, example) for example in chosen.examples(0)]
    assert len({forget for forget, _ in found}) == len({retain for _, retain in found}) == 3
    assert len(sample_examples(pairs, 99, seed=1)) == FORGOTTEN


@pytest.mark.parametrize("packed", [True, False])
def test_a_part_of_a_batch_is_the_batch_of_the_part(packed: bool) -> None:
    plain = rows(9, 100, 4)
    roles = np.array([FORGET, REFUSAL, RETAIN] * 3, dtype=np.int8)
    members = np.arange(9, dtype=np.int64).reshape(3, 3)
    whole = TokenDataset(plain.tokens, plain.targets, plain.offsets, "whole", members=members, roles=roles)
    kept = select_role_examples(whole, (FORGET, RETAIN))
    one, other = (
        collate(
            dataset,
            stream(dataset, rows=3, total_examples=3, shuffle=False).global_batch(0).micro_batches[0],
            packed=packed,
            pad_token_id=0,
        )
        for dataset in (whole, kept)
    )
    part = select_role_sequences(one, {FORGET, RETAIN})
    assert (part.sequences, part.roles, part.target_counts) == (other.sequences, other.roles, other.target_counts)
    assert torch.equal(part.targets, other.targets)
    flat = part.input_ids.reshape(-1)
    assert torch.equal(flat[part.target_index + 1], part.targets)
    if packed:
        assert torch.equal(part.input_ids, other.input_ids)
        assert torch.equal(part.position_ids, other.position_ids)
        assert part.boundaries is not None
        assert torch.equal(part.boundaries, other.boundaries)
    else:
        assert part.attention_mask is not None
        assert part.tokens == other.tokens == int(part.attention_mask.sum())
    assert torch.equal(one.targets[find_target_indices(one, {FORGET, RETAIN})], part.targets)
    assert len(find_target_indices(one, {FORGET}, skip=1)) == len(find_target_indices(one, {FORGET})) - 3
