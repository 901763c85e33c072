"""Windows of token shards: every token is predicted once, documents are kept apart, the split leaks nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.test_tokenize import made, rows, text
from trainwright.data.sources.shards import Shards
from trainwright.data.stream.stream import BatchSizes, MicroBatch, Stream, StreamSettings
from trainwright.data.stream.windows import WindowDataset, build_whole_spans, collate_windows, split_spans
from trainwright.data.tokens.dataset import divide_epoch
from trainwright.errors import RequestError
from trainwright.models.causal_lm import CausalLM

LENGTHS = [1, 2, 3, 40, 41, 42, 400, 7]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    directory = tmp_path_factory.mktemp("windows")
    texts = [text(4_000, seed)[: length - 1].ljust(length - 1, "x") or "x" for seed, length in enumerate(LENGTHS)]
    return made(directory / "out", rows(directory / "rows.jsonl", texts), shard_tokens=100)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("length", [2, 13, 64, 1000])
def test_every_token_but_the_first_is_predicted_once_from_those_before_it(
    shards: Shards, contiguous: bool, length: int
) -> None:
    dataset = WindowDataset.of([build_whole_spans(shards, length, contiguous=contiguous)], None)
    edges = [0, shards.token_count] if contiguous else [0, *shards.ends.tolist()]
    found = iter(range(len(dataset)))
    for begin, end in itertools.pairwise(edges):
        whole, predicted = shards.read(begin, end), []
        for place in range(0, end - begin - 1, length):
            example = next(found)
            tokens, targets = dataset.sequence(example)
            assert tokens[0] == whole[place]
            assert dataset.length(example) == len(tokens) - 1 == dataset.example_lengths()[example] <= length
            assert not targets[0]
            assert targets[1:].all()
            predicted += tokens[1:].tolist()
        assert predicted == whole[1:].tolist()
    assert next(found, None) is None
    assert dataset.token_count == sum(dataset.length(i) for i in range(len(dataset)))


@pytest.mark.parametrize("cut", [None, 16, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_predicts_each_token_from_the_one_before(shards: Shards, packed: bool, cut: int | None) -> None:
    dataset = WindowDataset.of([build_whole_spans(shards, 16, contiguous=False)], None)
    stream = Stream(dataset, StreamSettings(global_batch_size=9, seed=0, rows=4, pack_length=32 if packed else None))
    for micro in stream.divide(stream.examples(0), max_length=cut).micro_batches:
        batch = collate_windows(dataset, micro, packed=packed, pad_token_id=0)
        windows = [dataset.sequence(example)[0] for example in micro.examples]
        short = cut or 16
        wanted = [ids[at : at + short + 1] for ids in windows for at in range(0, len(ids) - 1, short)]
        assert batch.targets.tolist() == np.concatenate([ids[1:] for ids in windows]).tolist()
        assert stream.positions(micro) == (micro.tokens if packed else batch.input_ids.numel())
        assert batch.targets.tolist() == np.concatenate([ids[1:] for ids in wanted]).tolist()
        seen = batch.input_ids.reshape(-1)[batch.target_index]
        assert seen.tolist() == np.concatenate([ids[:-1] for ids in wanted]).tolist()
        assert len(batch.targets) == micro.weight == micro.tokens == batch.tokens
        lengths = [len(ids) - 1 for ids in wanted]
        edges = None if batch.boundaries is None else batch.boundaries.tolist()
        assert edges == ([0, *itertools.accumulate(lengths)] if packed else None)
        assert batch.longest == max(lengths)
        positions = batch.position_ids.reshape(-1)[batch.target_index]
        assert positions.tolist() == [place for length in lengths for place in range(length)]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_no_window_sees_another_of_its_micro_batch(shards: Shards, contiguous: bool, packed: bool) -> None:
    dataset = WindowDataset.of([build_whole_spans(shards, 16, contiguous=contiguous)], None)
    config = LlamaConfig(
        vocab_size=int(shards.read(0, shards.token_count).max()) + 1,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=1.0,  # so that what is attended to shows in the losses
    )
    torch.manual_seed(0)
    model = CausalLM(LlamaForCausalLM(config), packed=packed).eval()

    def losses(*examples: int) -> list[float]:
        sizes = [dataset.length(example) for example in examples]
        rows = (examples,) if packed else tuple((example,) for example in examples)
        micro = MicroBatch(0, rows, tokens=sum(sizes), targets=sum(sizes), weight=sum(sizes))
        batch = collate_windows(dataset, micro, packed=packed, pad_token_id=0)
        found: list[float] = model(batch, losses=True).tolist()
        return found

    together = losses(*range(5, 11))
    assert together == pytest.approx([loss for one in range(5, 11) for loss in losses(one)], rel=1e-5)


def test_a_part_of_the_documents_is_held_out_by_their_content_and_the_seed(shards: Shards) -> None:
    train, held = split_spans(shards, 16, 0.25, 0, contiguous=False, key="data.train")
    assert len(held.begins) == 2
    assert sorted([*train.ends, *held.ends]) == shards.ends.tolist()
    others = {tuple(split_spans(shards, 16, 2, seed, contiguous=False, key="")[1].ends) for seed in range(8)}
    assert len(others) > 1


@pytest.mark.parametrize("validation", [0.4, 0.33, 13])
def test_equal_documents_are_on_one_side(tmp_path: Path, validation: float | int) -> None:
    texts = [text(50, seed % 5) for seed in range(40)]
    shards = made(tmp_path / "out", rows(tmp_path / "rows.jsonl", texts))
    train, held = split_spans(shards, 16, validation, 0, contiguous=False, key="data.train")
    index = {int(end): texts[i] for i, end in enumerate(shards.ends)}
    sides = [{index[int(end)] for end in side.ends} for side in (train, held)]
    assert sides[0] and sides[1]
    assert not sides[0] & sides[1]


def test_of_a_stream_the_end_is_held_out(shards: Shards) -> None:
    total = shards.token_count
    train, held = split_spans(shards, 16, 0.1, 0, contiguous=True, key="data.train")
    assert (train.begins[0], train.ends[0], held.ends[0]) == (0, held.begins[0], total)
    assert held.tokens == round(0.1 * total)


def test_a_corpus_of_one_document_is_not_divided_by_documents(tmp_path: Path) -> None:
    shards = made(tmp_path / "out", rows(tmp_path / "rows.jsonl", [text(500)]))
    with pytest.raises(RequestError, match=r"1 documents of data\.train leaves none.*contiguous"):
        split_spans(shards, 16, 0.1, 0, contiguous=False, key="data.train")


def test_a_mixture_draws_by_its_shares(shards: Shards) -> None:
    parts = [build_whole_spans(shards, 16, contiguous=True), build_whole_spans(shards, 16, contiguous=False)]
    sizes = [int(part.counts().sum()) for part in parts]
    mixture = divide_epoch(sizes, [1, 3])
    dataset = WindowDataset.of(parts, mixture)
    stream = Stream(dataset, StreamSettings(global_batch_size=len(dataset), seed=0, rows=1))
    seen = stream.examples(0)
    assert sum(example < sizes[0] for example in seen) == pytest.approx(sum(sizes) / 4, abs=1)
    assert dataset.fingerprint != WindowDataset.of(parts, None).fingerprint


def test_batches_grow_to_their_size_and_the_stream_loses_nothing(shards: Shards) -> None:
    dataset = WindowDataset.of([build_whole_spans(shards, 4, contiguous=True)], None)
    sizes = BatchSizes(final=10, initial=2, steps=4)
    total = sizes.before(7)
    stream = Stream(dataset, StreamSettings(global_batch_size=10, seed=0, rows=1, total_examples=total, warm_up=sizes))
    counts = [stream.global_batch(step).examples for step in range(len(stream))]
    assert counts == [2, 4, 6, 8, 10, 10, 10]
    seen = [example for step in range(len(stream)) for example in stream.examples(step)]
    plain = Stream(dataset, StreamSettings(global_batch_size=1, seed=0, rows=1))
    assert seen == [plain.examples(step)[0] for step in range(total)]
    for examples in range(1, 60):
        steps = sizes.count_steps_for(examples)
        assert sizes.before(steps - 1) < examples <= sizes.before(steps)
