from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainwright.data.stream.batch import collate
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset


def dataset(examples: int = 50, seed: int = 0) -> TokenDataset:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 40, examples)
    pairs = [
        (generator.integers(3, 100, n).tolist(), [i > 0 and bool(generator.random() < 0.7) for i in range(n)])
        for n in lengths
    ]
    return TokenDataset.from_examples(pairs, fingerprint=f"test-{seed}")


def stream(data: TokenDataset, *, size: int = 8, rows: int | None = 2, pack: int | None = 64, **more: Any) -> Stream:
    return Stream(data, StreamSettings(global_batch_size=size, seed=3, rows=rows, pack_length=pack, **more))


def test_every_example_comes_once_an_epoch_over_epoch_borders() -> None:
    data = dataset(50)
    seen = [index for step in range(25) for index in stream(data, size=8).examples(step)]
    assert len(seen) == 200
    for epoch in range(4):
        assert sorted(seen[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert seen[:50] != seen[50:100]


def test_the_order_is_of_the_seed_and_the_data() -> None:
    data, other = dataset(50), replace(dataset(50), fingerprint="other")
    orders = [
        Stream(each, StreamSettings(global_batch_size=50, seed=seed, rows=1)).examples(0)
        for each in (data, other)
        for seed in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert Stream(data, StreamSettings(global_batch_size=50, seed=0, rows=1)).examples(0) == orders[0]
    unshuffled = Stream(data, StreamSettings(global_batch_size=50, seed=0, rows=1, shuffle=False))
    assert unshuffled.examples(0) == list(range(50))


def test_a_stream_with_an_end_gives_a_smaller_last_batch_and_nothing_after() -> None:
    data = dataset(50)
    ending = stream(data, size=8, total_examples=50)
    assert len(ending) == 7
    assert [len(ending.examples(step)) for step in range(7)] == [8] * 6 + [2]
    with pytest.raises(IndexError):
        ending.examples(7)


@pytest.mark.parametrize("pack", [None, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_share_a_global_batch_completely_and_run_equally_often(size: int, pack: int | None) -> None:
    data = dataset()
    for step in range(6):
        batch = stream(data, pack=pack).global_batch(step)
        shares = [batch.select_for_rank(rank, size) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        real = [micro for share in shares for micro in share if micro.weight]
        assert Counter(micro.index for micro in real) == Counter(range(len(batch.micro_batches)))
        assert sum(micro.weight for micro in real) == batch.weight


def test_micro_batches_do_not_depend_on_the_world_and_rows_change_no_example() -> None:
    data = dataset()
    for step in range(4):
        contents = [
            sorted(
                e
                for micro in stream(data, rows=rows, pack=pack).global_batch(step).micro_batches
                for e in micro.examples
            )
            for rows in (1, 2, 4)
            for pack in (None, 64)
        ]
        assert all(content == contents[0] for content in contents)


def test_a_number_of_passes_divides_the_rows() -> None:
    batch = Stream(
        dataset(), StreamSettings(global_batch_size=12, seed=0, rows=None, micro_batches=3, pack_length=None)
    ).global_batch(0)
    assert [len(micro.rows) for micro in batch.micro_batches] == [4, 4, 4]


@pytest.mark.parametrize("pack", [None, 64])
def test_fewer_rows_divide_the_same_examples_further(pack: int | None) -> None:
    whole, limited = stream(dataset(), rows=4, pack=pack), stream(dataset(), rows=4, pack=pack)
    limited.limit_rows(2)
    limited.limit_rows(3)
    for step in range(4):
        batch, divided = whole.global_batch(step), limited.global_batch(step)
        assert (divided.rows, divided.tokens, divided.weight) == (min(2, batch.rows), batch.tokens, batch.weight)
        assert [row for micro in divided.micro_batches for row in micro.rows] == [
            row for micro in batch.micro_batches for row in micro.rows
        ]
        assert divided == stream(dataset(), rows=2, pack=pack).global_batch(step)


def test_a_number_of_passes_gives_way_to_fewer_rows() -> None:
    divided = Stream(
        dataset(), StreamSettings(global_batch_size=12, seed=0, rows=None, micro_batches=3, pack_length=None)
    )
    divided.limit_rows(2)
    assert [len(micro.rows) for micro in divided.global_batch(0).micro_batches] == [2] * 6


@pytest.mark.parametrize("pack", [None, 64])
def test_the_fullest_batch_is_found(pack: int | None) -> None:
    data = dataset(200)
    found = stream(data, pack=pack)

    def positions(step: int) -> int:
        batches = (
            collate(data, micro, packed=pack is not None, pad_token_id=0)
            for micro in found.global_batch(step).micro_batches
        )
        return max(batch.input_ids.numel() for batch in batches)

    assert positions(found.find_largest_step()) == max(positions(step) for step in range(300))
    assert stream(data, pack=pack, total_examples=16).find_largest_step() in (0, 1)


def test_shares_are_balanced_by_tokens() -> None:
    data = dataset(200)
    batch = stream(data, size=64, rows=1, pack=None).global_batch(0)
    loads = [sum(micro.tokens for micro in batch.select_for_rank(rank, 4)) for rank in range(4)]
    assert max(loads) - min(loads) <= 40


@pytest.mark.parametrize("packed", [True, False])
def test_positions_begin_at_0_in_every_document(packed: bool) -> None:
    data = dataset()
    micros = stream(data, pack=64 if packed else None).global_batch(1).micro_batches
    assert max(len(micro.examples) for micro in micros) > 1
    for micro in micros:
        batch = collate(data, micro, packed=packed, pad_token_id=0)
        lengths = [data.length(example) for example in micro.examples]
        if packed:
            assert batch.position_ids.tolist() == [[place for length in lengths for place in range(length)]]
        else:
            assert batch.position_ids.tolist() == [list(range(max(lengths)))] * len(lengths)


@pytest.mark.parametrize("packed", [True, False])
def test_tensors_predict_each_target_one_position_before_it(packed: bool) -> None:
    data = dataset()
    for micro in stream(data, pack=64 if packed else None).global_batch(1).micro_batches:
        batch = collate(data, micro, packed=packed, pad_token_id=0)
        ids, positions = batch.input_ids.reshape(-1), batch.position_ids.reshape(-1)
        assert (ids[batch.target_index + 1] == batch.targets).all()
        assert (positions[batch.target_index + 1] == positions[batch.target_index] + 1).all()
        assert len(batch.targets) == micro.weight == sum(data.target_count(e) for e in micro.examples)
        assert batch.tokens == sum(data.length(e) for e in micro.examples)
        if packed:
            assert batch.boundaries is not None and batch.input_ids.shape == (1, batch.tokens)
            assert batch.boundaries.diff().tolist() == [data.length(e) for e in micro.examples]
        else:
            assert batch.attention_mask is not None and int(batch.attention_mask.sum()) == batch.tokens


def packed_steps(data: TokenDataset, packs: int, capacity: int, order: list[int]) -> list[list[int]]:
    """The examples of every step, by placing one after another into the fullest pack that has room."""
    steps, free = [[]], []
    for example in order:
        length = data.length(example)
        room = [space for space in free if space >= length]
        if room:
            free.remove(min(room))
            free.append(min(room) - length)
        elif len(free) < packs:
            free.append(capacity - length)
        else:
            steps.append([])
            free = [capacity - length]
        steps[-1].append(example)
    return steps


@pytest.mark.parametrize("packs", [1, 3, 8])
def test_a_batch_of_packs_has_the_examples_that_fit_into_so_many(packs: int) -> None:
    data = dataset(60)
    counted = stream(data, size=packs, unit="packs", total_examples=120)
    order = [index for step in range(120) for index in stream(data, size=1).examples(step)]
    expected = packed_steps(data, packs, 64, order)
    assert len(counted) == len(expected)
    assert [counted.examples(step) for step in range(len(counted))] == expected
    for step in range(len(counted)):
        batch = counted.global_batch(step)
        rows = [row for micro in batch.micro_batches for row in micro.rows]
        assert len(rows) <= packs
        assert all(sum(map(data.length, row)) <= 64 for row in rows)
        assert sorted(example for row in rows for example in row) == sorted(expected[step])


def test_batches_of_packs_are_found_from_any_step() -> None:
    data = dataset(60)
    late = stream(data, size=3, unit="packs")
    alone = late.examples(7)
    assert [stream(data, size=3, unit="packs").examples(step) for step in range(8)][7] == alone


def token_steps(data: TokenDataset, tokens: int, order: list[int]) -> list[list[int]]:
    """The examples of every step: whole ones, until the next would pass the tokens."""
    steps: list[list[int]] = [[]]
    for example in order:
        if steps[-1] and sum(map(data.length, steps[-1])) + data.length(example) > tokens:
            steps.append([])
        steps[-1].append(example)
    return steps


@pytest.mark.parametrize("tokens", [64, 100, 1000])
@pytest.mark.parametrize("pack_length", [None, 64])
def test_a_batch_of_tokens_has_the_examples_that_fit(tokens: int, pack_length: int | None) -> None:
    data = dataset(60)
    counted = stream(data, size=tokens, unit="tokens", total_examples=120, pack=pack_length)
    order = [index for step in range(120) for index in stream(data, size=1).examples(step)]
    expected = token_steps(data, tokens, order)
    assert len(counted) == len(expected)
    assert [counted.examples(step) for step in range(len(counted))] == expected
    for step, examples in enumerate(expected):
        batch = counted.global_batch(step)
        assert batch.tokens <= tokens
        assert sorted(example for micro in batch.micro_batches for example in micro.examples) == sorted(examples)
