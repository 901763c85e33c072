"""Rows that mark their targets themselves: segments of text, and token ids with labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Runs, column
from trainwright.data.rows.marked import ANY_EXAMPLES, MarkedEncoder
from trainwright.data.stream.dataset_cache import prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection, RowSettings

TOKENIZER = build_bytes_tokenizer()
SHORT = ("data.validation=null", "train.max_steps=4", "train.global_batch_size=4")
SEGMENTS = [{"text": "<s>Hi ", "label": True}, {"text": "you", "label": False}, {"text": "!</s>", "label": True}]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def encoded(row: dict[str, Any], targets: str = "answers") -> tuple[list[int], list[bool]]:
    layout = ANY_EXAMPLES.layout(list(row), [row], RowSettings())
    ((_, parts),) = ANY_EXAMPLES.sequences(row, layout)
    return MarkedEncoder(TOKENIZER, targets).encode([parts])[0]


def test_each_segment_is_tokenized_by_itself_and_nothing_is_added() -> None:
    ids, targets = encoded({"segments": SEGMENTS})
    own = [TOKENIZER(part["text"], add_special_tokens=False)["input_ids"] for part in SEGMENTS]
    assert ids == [token for part in own for token in part]
    assert targets == [segment["label"] for segment, part in zip(SEGMENTS, own, strict=True) for _ in part]
    assert encoded({"segments": SEGMENTS}, "all") == (ids, [True] * len(ids))


@pytest.mark.parametrize(
    ("more", "ids", "targets"),
    [
        ({}, [5, 6, 7, 8], [True] * 4),
        ({"labels": [-100, 6, -100, 8]}, [5, 6, 7, 8], [False, True, False, True]),
        ({"completion_mask": [0, 0, 1, 1]}, [5, 6, 7, 8], [False, False, True, True]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 0, 1]}, [5, 6, 7, 8], [False] * 3 + [True]),
        ({"attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}, [5, 6, 7], [False, True, True]),
    ],
)
def test_tokens_are_targets_where_labels_and_masks_say_so(
    more: dict[str, list[int]], ids: list[int], targets: list[bool]
) -> None:
    assert encoded({"input_ids": [5, 6, 7, 8], **more}) == (ids, targets)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"segments": []}, r'segments should be a list of \{"text": "…", "label": true\}, not an empty list'),
        ({"segments": [{"text": "a"}]}, r"segments\[0\]\.label should be true if the text is a target"),
        ({"segments": [{"text": 3, "label": True}]}, r"segments\[0\]\.text should be text, not a number"),
        ({"input_ids": "1 2"}, "input_ids should be a list of whole numbers, not text"),
        ({"input_ids": [1, "2"]}, r"input_ids\[1\] should be a whole number, not text"),
        ({"input_ids": [1, 2.0]}, r"input_ids\[1\] should be a whole number, not 2\.0"),
        ({"input_ids": []}, "input_ids should be a list of token ids, not empty"),
        ({"input_ids": [1, -2]}, "input_ids has -2"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 numbers for the 2 tokens"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, r"labels\[1\] is 3, and the token 2; a label is its token or -100"),
        ({"input_ids": [1, 2], "completion_mask": [0, 2]}, r"completion_mask\[1\] is 2; expected 0 or 1"),
        ({"segments": [{"text": "a", "label": False}]}, "no part of it is marked as a target"),
    ],
)
def test_wrong_rows_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encoded(row)


def test_what_concerns_conversations_alone_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", [{"segments": SEGMENTS}] * 4)
    for key, value, message in (
        ("targets", "last", "last is for conversations, but .* has segments rows"),
        ("example_per_turn", True, "is for conversations of task sft, but .* has segments rows"),
    ):
        data = DataSection(train=source, validation=None, max_length=64, **{key: value})
        with pytest.raises(RequestError, match=message):
            prepare(data, TOKENIZER, ANY_EXAMPLES, cache=tmp_path / "cache", seed=0)


def test_tokens_of_texts_are_trained_on_as_the_texts_are(tmp_path: Path, runs: Runs) -> None:
    """The same run from texts, from their tokens, and from segments: losses are equal to the bit."""
    texts = [f"Row {number}: " + "abc " * (number % 5) for number in range(24)]
    end = TOKENIZER.eos_token
    rows = {
        "text": [{"text": text} for text in texts],
        "tokens": [{"input_ids": TOKENIZER(text + end)["input_ids"]} for text in texts],
        "segments": [{"segments": [{"text": text, "label": True}, {"text": end, "label": True}]} for text in texts],
    }
    losses = {}
    for layout, of_layout in rows.items():
        source = written(tmp_path / f"{layout}.jsonl", of_layout)
        for count in (1, 2) if layout == "segments" else (1,):
            run = runs.trained(f"data.train={source}", f"parallel.num_processes={count}", *SHORT)
            losses[layout, count] = column(run, "loss")
    assert losses["tokens", 1] == losses["text", 1] == losses["segments", 1]
    assert losses["segments", 2] == pytest.approx(losses["segments", 1], abs=1e-5)
