"""Which tokens are targets, where long documents are split, and what tells tokens of one kind from another."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from tokenizers import processors

from tests.data.test_tokenize import made, rows, text
from trainwright.data.rows.chat_encoding import ChatEncoder, _flag_tokens
from trainwright.data.rows.pairs import PAIRS
from trainwright.data.sources.shards import fingerprint_tokenizer
from trainwright.data.stream.dataset_cache import prepare
from trainwright.data.stream.windows import WindowDataset, build_whole_spans, split_spans
from trainwright.data.tokens.token_rows import split_windows
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection


@pytest.mark.parametrize("longest", [2, 3, 7])
@pytest.mark.parametrize("length", [2, 3, 7, 8, 13, 14, 20])
def test_windows_of_a_document_predict_every_token_but_the_first_once(length: int, longest: int) -> None:
    predicted = []
    for begin, end in split_windows(length, longest):
        assert 2 <= end - begin <= longest
        predicted += range(begin + 1, end)  # nothing precedes a window's first token
    assert predicted == list(range(1, length))


def test_a_token_belongs_to_a_turn_with_the_space_in_front_of_it() -> None:
    # "Q: yes no." in tokens Q, :, yes, no, . whose offsets leave the spaces out; the turn is " yes no".
    offsets = [(0, 1), (1, 2), (3, 6), (7, 9), (9, 10)]
    assert _flag_tokens(offsets, [(2, 9)]) == [False, False, True, True, False]
    assert _flag_tokens(offsets, [(2, 3)]) == [False, False, True, False, False]  # the space alone
    assert _flag_tokens([(0, 1), (1, 1), (2, 5)], [(1, 2)]) == [False, False, True]
    assert _flag_tokens(offsets, [(0, 1), (9, 10)]) == [True, False, False, False, True]


def test_a_prompt_begins_as_the_rows_of_the_training_do() -> None:
    tokenizer = build_bytes_tokenizer()
    begin = tokenizer.convert_tokens_to_ids(tokenizer.pad_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.pad_token} $A", special_tokens=[(tokenizer.pad_token, begin)]
    )
    assert tokenizer("a")["input_ids"][0] == begin, "the tokenizer opens every text"
    encoder = ChatEncoder(tokenizer)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]
    (ids, targets), (prompt,) = encoder.encode([turns])[0], encoder.prompts([turns[:1]])
    assert ids[: len(prompt)] == prompt
    assert targets.index(True) == len(prompt)


def test_tokens_are_known_by_what_ends_a_text() -> None:
    tokenizer = build_bytes_tokenizer()
    before = fingerprint_tokenizer(tokenizer)
    assert fingerprint_tokenizer(build_bytes_tokenizer()) == before
    other = copy.deepcopy(tokenizer)
    other.eos_token = other.pad_token
    assert fingerprint_tokenizer(other) != before


def test_windows_are_known_by_their_length_and_where_they_begin(tmp_path: Path) -> None:
    shards = made(tmp_path / "out", rows(tmp_path / "rows.jsonl", [text(300, seed) for seed in range(6)]))
    sides = split_spans(shards, 16, 2, 0, contiguous=False, key="data.train")
    spans = [
        build_whole_spans(shards, length, contiguous=contiguous) for length in (16, 17) for contiguous in (True, False)
    ]
    found = {WindowDataset.of([each], None).fingerprint for each in (*spans, *sides)}
    assert len(found) == 6


def test_pairs_that_are_the_same_after_the_cut_are_left_out_and_counted(tmp_path: Path) -> None:
    long = "The same beginning of both answers, and then "
    rows = [
        {"prompt": "a", "chosen": f"{long}yes", "rejected": f"{long}no"},
        {"prompt": "a", "chosen": "yes", "rejected": "no"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=str(tmp_path / "pairs.jsonl"), validation=None, max_length=48)
    found = prepare(section, build_bytes_tokenizer(), PAIRS, seed=0, cache=tmp_path / "cache")
    assert len(found.train) == 1
    why = "1 row left out: the tokens of its answers are the same within data.max_length"
    assert any(why in line for line in found.summary)


def test_the_numbers_of_held_out_rows_count_the_rows_that_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number}", "completion": "" if number in (0, 2) else "yes"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=str(tmp_path / "rows.jsonl"), validation=2)
    found = prepare(section, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")
    assert found.validation is not None
    for place, (_, number) in enumerate(found.held_out().tolist()):
        assert f"question {number}" in build_bytes_tokenizer().decode(found.validation.sequence(place)[0])
