from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.lengths import Lengths, count_lengths, estimate, load_lengths, save_lengths
from trainwright.data.tokens.packing import best_fit_decreasing
from trainwright.recipe.schema import DataSection
from trainwright.recipe.sections.model import ModelSection

MODEL = ModelSection(config={"model_type": "llama"}, tokenizer="bytes")


def dataset(lengths: list[int]) -> TokenDataset:
    return TokenDataset.from_examples([([1] * n, [False] * (n // 2) + [True] * (n - n // 2)) for n in lengths], "x")


def test_lengths_of_a_tokenized_source_are_counted() -> None:
    lengths = count_lengths(dataset([4, 10, 2, 8]))
    assert lengths == Lengths((2, 4, 8, 10), examples=4, target_fraction=0.5, max_target_fraction=0.5)
    assert (lengths.mean, lengths.longest) == (6.0, 10)


def test_targets_of_the_longest_examples_are_counted() -> None:
    """Of 300 examples, each with a prompt of ten tokens; memory is that of the longest ones."""
    examples = [([1] * n, [False] * 10 + [True] * (n - 10)) for n in (*[20] * 236, *[100] * 64)]
    lengths = count_lengths(TokenDataset.from_examples(examples, "x"))
    assert lengths.target_fraction == pytest.approx((236 * 10 + 64 * 90) / (236 * 20 + 64 * 100))
    assert lengths.max_target_fraction == pytest.approx(0.9)


@pytest.mark.slow
def test_many_examples_are_kept_as_equally_spaced_quantiles() -> None:
    lengths = count_lengths(dataset([2 * n + 2 for n in range(5000)]))
    assert len(lengths.quantiles) == 1024
    assert (lengths.quantiles[0], lengths.longest) == (2, 10_000)
    assert lengths.mean == pytest.approx(5001, rel=1e-3)


def test_rows_without_packing_are_examples() -> None:
    assert Lengths((10, 20, 30), 3, 1.0).rows(7, None) == (7.0, 30)


def test_equal_examples_fill_packs_exactly() -> None:
    # Three of 30 fit into 100: 12 examples are four packs of 90.
    assert Lengths((30,), 1, 1.0).rows(12, 100) == (4.0, 90)


def test_rows_agree_with_packing_the_examples_themselves() -> None:
    lengths = Lengths(tuple(range(10, 200)), 190, 1.0)
    rows, fullest = lengths.rows(64, 256)
    packed = len(best_fit_decreasing(list(range(10, 200)), 256)) * 64 / 190
    assert rows == pytest.approx(packed, rel=0.05)
    assert 250 < fullest <= 256


def test_a_source_is_remembered_until_it_changes(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"text": "some text"}))
    data = DataSection(train=str(source))
    assert load_lengths(MODEL, data, 0, tmp_path) is None
    save_lengths(MODEL, data, 0, dataset([4, 6]), tmp_path)
    found = load_lengths(MODEL, data, 0, tmp_path)
    assert found is not None and found.quantiles == (4, 6) and found.exact
    other = MODEL.model_copy(update={"tokenizer": "elsewhere"})
    assert load_lengths(other, data, 0, tmp_path) is None
    assert load_lengths(MODEL, data.model_copy(update={"max_length": 64}), 0, tmp_path) is None
    source.write_text(json.dumps({"text": "another, longer text"}))
    assert load_lengths(MODEL, data, 0, tmp_path) is None


def test_a_damaged_memory_is_none(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"text": "some text"}))
    data = DataSection(train=str(source))
    save_lengths(MODEL, data, 0, dataset([4, 6]), tmp_path)
    (kept,) = (tmp_path / "datasets" / "lengths").iterdir()
    kept.write_text("{")
    assert load_lengths(MODEL, data, 0, tmp_path) is None


def test_estimates_count_text_and_not_roles() -> None:
    rows = [{"messages": [{"role": "user", "content": "x" * 38}, {"role": "assistant", "content": "y" * 76}]}]
    words, letters = estimate([rows], 1000, bytewise=False), estimate([rows], 1000, bytewise=True)
    assert words is not None and letters is not None
    assert words.quantiles == (10 + 20 + 12,) and not words.exact
    assert letters.quantiles == (38 + 76 + 12,)


def test_estimates_are_cut_as_examples_are_and_need_rows() -> None:
    found = estimate([[{"text": "x" * 10_000}], [{"text": "x"}]], 512, bytewise=False)
    assert found is not None and found.quantiles == (6, 512)
    assert estimate([], 512, bytewise=False) is None
