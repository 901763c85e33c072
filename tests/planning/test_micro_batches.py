"""The shapes that the micro-batches of a step are planned with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.data.tokens.lengths import Lengths
from trainwright.data.tokens.packing import best_fit_decreasing
from trainwright.machine.describe import parse_machine
from trainwright.planning.memory.micro_batch import find_largest_micro_batch
from trainwright.planning.memory.peak import estimate_memory
from trainwright.planning.step_time.step import build_typical_batch
from trainwright.planning.trace.catalog import find_model
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload

MODEL = TracedModel.of(find_model("SmolLM2-135M").config)
TWO_PASSES = Choice("single", 1, 1, 2, "no")


def test_padded_rows_come_sorted_so_that_later_micro_batches_are_shorter() -> None:
    documents = Workload(
        MODEL, 500, 2, packed=False, document_tokens=260, longest_document=500, batch_documents=(500, 20)
    )
    assert find_largest_micro_batch(documents, TWO_PASSES).length == 500
    assert find_largest_micro_batch(documents, TWO_PASSES, later=True).length == 20
    both_long = Workload(MODEL, 500, 2, packed=False, document_tokens=500, longest_document=500)
    cluster = parse_machine("1xA100-40GB")
    assert (
        estimate_memory(documents, TWO_PASSES, cluster).tensors
        < estimate_memory(both_long, TWO_PASSES, cluster).tensors
    )


def test_the_last_packs_of_a_step_are_as_full_as_what_is_left() -> None:
    packs = Workload(MODEL, 512, 1.3, document_tokens=64, longest_document=64, most_batch_tokens=700)
    assert find_largest_micro_batch(packs, TWO_PASSES).tokens == 512
    assert find_largest_micro_batch(packs, TWO_PASSES, later=True).tokens == 700 - 512


def test_packs_that_a_step_does_not_fill_are_no_full_micro_batch() -> None:
    packs = Workload(MODEL, 1000, 1.5, document_tokens=100, longest_document=400, most_batch_tokens=1600)
    assert find_largest_micro_batch(packs, Choice("single", 1, 2, 1, "no")).tokens == 1600
    assert find_largest_micro_batch(packs, Choice("single", 1, 1, 2, "no")).tokens == 1000
    lengths = Lengths(tuple(range(10, 400)), 300, 1.0)
    few, many = lengths.estimate_max_batch_tokens(10, steps=30), lengths.estimate_max_batch_tokens(10, steps=1000)
    assert 10 * lengths.mean < few < many <= 10 * 399  # of a longer run


def test_targets_of_padded_rows_leave_out_the_padding() -> None:
    rows = Workload(
        MODEL, 500, 4, packed=False, document_tokens=145, longest_document=500, batch_documents=(500, 40, 20, 20)
    )
    batch = find_largest_micro_batch(rows, Choice("single", 1, 4, 1, "no"))
    assert batch.tokens == 2000 and batch.targets == 500 + 40 + 20 + 20 - 4


def test_a_batch_of_the_longest_examples_has_their_share_of_targets() -> None:
    packs = Workload(MODEL, 1000, 4, document_tokens=50, target_fraction=0.5, max_target_fraction=0.9)
    assert find_largest_micro_batch(packs, TWO_PASSES).targets == 900
    assert packs.targets(1000, 20) == 500  # on average, which decides the time


def test_lengths_of_a_global_batch_are_given_longest_first() -> None:
    lengths = Lengths((10, 20, 400), 300, 1.0)
    found = lengths.list_longest_first(8)
    assert len(found) == 8 and list(found) == sorted(found, reverse=True) and found[0] == 400
    assert Lengths((64, 64), 300, 1.0).list_longest_first(8) == ()
    assert 8 * 10 <= lengths.estimate_max_batch_tokens(8) <= 8 * 400


def test_sequences_of_a_pack_have_the_lengths_of_the_data() -> None:
    lengths = Lengths((10,) * 6 + (20, 20, 50, 400), 300, 1.0)
    assert Lengths((64, 64), 300, 1.0).spread() == ()
    assert lengths.spread() == lengths.quantiles
    packs = Workload(
        MODEL, 1024, 1, document_tokens=lengths.mean, longest_document=400, batch_tokens=1024, lengths=lengths.spread()
    )
    batch = build_typical_batch(packs, Choice("single", 1, 1, 1, "no"))
    assert batch.tokens == sum(length * count for length, count in batch.sequences) == 1024
    assert batch.longest > 350
    equal = build_typical_batch(replace(packs, lengths=()), Choice("single", 1, 1, 1, "no"))
    assert {length for length, _ in equal.sequences} == {55, 1024 % 55} and batch.pairs > 3 * equal.pairs


def test_the_mean_of_each_part_of_the_lengths_is_kept() -> None:
    lengths = Lengths(tuple(range(1, 1025)), 4000, 1.0).spread()
    assert len(lengths) == 64 and list(lengths) == sorted(lengths)
    assert sum(lengths) / 64 == pytest.approx(512.5, abs=0.5)


def test_the_largest_pack_of_a_step_has_its_longest_sequences() -> None:
    lengths = Lengths((20,) * 8 + (500,) * 2, 40, 1.0)
    step = [20] * 16 + [500] * 4
    packs = Workload(
        MODEL,
        1020,
        3,
        document_tokens=lengths.mean,
        longest_document=500,
        batch_tokens=sum(step),
        lengths=lengths.spread(),
    )
    first = best_fit_decreasing(step, 1020)[0]
    largest = find_largest_micro_batch(packs, Choice("single", 1, 1, 3, "no"))
    assert sorted(length for length, count in largest.sequences for _ in range(count)) == sorted(step[i] for i in first)
    unknown = find_largest_micro_batch(replace(packs, lengths=()), Choice("single", 1, 1, 3, "no"))
    assert unknown.tokens == largest.tokens and unknown.pairs < 0.9 * largest.pairs
