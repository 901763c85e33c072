"""Rows that compare answers: their layouts, their targets, and that a pair stays together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.rows.formats import EXAMPLES
from trainwright.data.rows.pairs import ANSWERS, CHOSEN, PAIRS, REJECTED, to_labelled, to_pair
from trainwright.data.stream.batch import collate
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.schema import DataSection
from trainwright.recipe.sections.data import RowSettings

USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(row: dict[str, Any]) -> list[tuple[int, list[tuple[str, bool]]]]:
    """Role, and the content of each turn with whether it is trained on."""
    return [
        (role, [(m["content"], m["role"] == "assistant" and m.get("target", True)) for m in messages])
        for role, messages in to_pair(row)
    ]


BOTH = [(CHOSEN, [("Why?", False), ("So.", True)]), (REJECTED, [("Why?", False), ("No.", True)])]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": [USER], "chosen": [said("So.")], "rejected": [said("No.")]},
        {"prompt": [USER], "chosen": "So.", "rejected": "No."},
        {"chosen": [USER, said("So.")], "rejected": [USER, said("No.")]},
        {"prompt": "Why?", "chosen": [USER, said("So.")], "rejected": [USER, said("No.")]},
        {"prompt": [USER], "chosen": [USER, said("So.")], "rejected": [USER, said("No.")]},
        {"prompt": "Why?", "chosen": [said("So.")], "rejected": [said("No.")]},
        {
            "chosen": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}],
            "rejected": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "No."}],
        },
    ],
    ids=["texts", "lists", "list and texts", "conversations", "named", "named list", "answers", "sharegpt"],
)
def test_every_layout_is_a_prompt_and_two_answers(row: dict[str, Any]) -> None:
    assert texts(row) == BOTH


def test_what_conversations_have_in_common_is_not_trained_on() -> None:
    common = [SYSTEM, USER, said("Because."), {"role": "user", "content": "And?"}]
    later = [said("Yes."), {"role": "user", "content": "Sure?"}, said("Quite.")]
    found = texts({"chosen": [*common, *later], "rejected": [*common, said("No.")]})
    shared = [("Be brief.", False), ("Why?", False), ("Because.", False), ("And?", False)]
    assert found[0] == (CHOSEN, [*shared, ("Yes.", True), ("Sure?", False), ("Quite.", True)])
    assert found[1] == (REJECTED, [*shared, ("No.", True)])


def test_a_system_text_beside_the_answers_opens_both() -> None:
    found = texts({"system": "Be brief.", "prompt": "Why?", "chosen": "So.", "rejected": "No."})
    assert [turns[0] for _, turns in found] == [("Be brief.", False)] * 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Why?", "chosen": "So."}, "the field rejected is missing; it has prompt, chosen"),
        ({"chosen": "So.", "rejected": "No."}, "the field prompt is missing; it has chosen, rejected"),
        ({"prompt": "", "chosen": "So.", "rejected": "No."}, "the field prompt is empty"),
        ({"prompt": "Why?", "chosen": "So.", "rejected": [said("No.")]}, "chosen is text and rejected is a list"),
        ({"prompt": "Why?", "chosen": 1, "rejected": 2}, "the field chosen should be a list of turns, not a number"),
        ({"chosen": [USER, said("So.")], "rejected": [SYSTEM, said("No.")]}, "begin with different turns"),
        (
            {"chosen": [USER, said("a"), USER, said("b")], "rejected": [USER, said("a")]},
            "rejected is a prefix of the other conversation",
        ),
        (
            {"chosen": [SYSTEM, USER, said("a")], "rejected": [SYSTEM, {"role": "user", "content": "x"}, said("b")]},
            "chosen[1] is the first turn that differs, and it is a user turn",
        ),
        ({"prompt": "Else?", "chosen": [USER, said("a")], "rejected": [USER, said("b")]}, "the field prompt differs"),
    ],
)
def test_what_is_no_pair_says_why(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        to_pair(row)
    assert says in str(refusal.value)


@pytest.mark.parametrize(("label", "role"), [(True, CHOSEN), (False, REJECTED), ("true", CHOSEN), ("False", REJECTED)])
def test_a_label_says_what_an_answer_is(label: object, role: int) -> None:
    assert to_labelled({"prompt": "Why?", "completion": "So.", "label": label})[0][0] == role


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (None, "not empty (null)"),
        ("good", "not 'good'"),
        (1, "not a number"),
        (b"", "not bytes"),
        (object(), "not a value of type object"),
        ("", "not ''"),
    ],
)
def test_a_label_that_is_none_is_refused(label: object, says: str) -> None:
    with pytest.raises(RequestError, match="the field label should be true or false") as refusal:
        to_labelled({"prompt": "Why?", "completion": "So.", "label": label})
    assert says in str(refusal.value)


# Prepared


def pair(n: int, chosen: str = "yes", rejected: str = "no") -> dict[str, str]:
    return {"prompt": f"Is {n} a number?", "chosen": f"{chosen} {n}", "rejected": f"{rejected} {n}"}


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> PreparedData:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=str(file), **{"max_length": 64, "validation": None, **settings})
    return prepare(data, build_bytes_tokenizer(), ANSWERS, seed=0, cache=tmp_path / "cache")


def targets(dataset: TokenDataset, sequence: int) -> str:
    tokens, flags = dataset.sequence(sequence)
    return str(build_bytes_tokenizer().decode(tokens[flags]))


def test_a_pair_is_one_example_of_two_documents(tmp_path: Path) -> None:
    data = prepared(tmp_path, [pair(n) for n in range(5)]).train
    assert (len(data), data.sequence_count, data.sequences_per_example) == (5, 10, 2)
    for example in range(5):
        sequences = data.sequences(example)
        assert [data.role(d) for d in sequences] == [CHOSEN, REJECTED]
        # The answer and its stop token, and nothing of what comes before.
        end = build_bytes_tokenizer().eos_token
        assert [targets(data, d) for d in sequences] == [f"yes {example}{end}", f"no {example}{end}"]
        assert data.length(example) == sum(data.sequence_length(d) for d in sequences)
    assert data.report["format"] == "preference" and data.report["rows"] == 5


def test_labelled_answers_are_examples_of_one(tmp_path: Path) -> None:
    rows = [{"prompt": "Why?", "completion": f"{n}", "label": n % 2 == 0} for n in range(4)]
    data = prepared(tmp_path, rows).train
    assert data.members is None and len(data) == 4
    assert [data.role(n) for n in range(4)] == [CHOSEN, REJECTED, CHOSEN, REJECTED]
    assert data.report["format"] == "labelled"


def test_the_other_label_is_other_data(tmp_path: Path) -> None:
    row = {"prompt": "Why?", "completion": "So."}
    prints = []
    for label in (True, False):
        prints.append(prepared(tmp_path, [{**row, "label": label}]).train.fingerprint)
    assert prints[0] != prints[1]


def test_the_split_keeps_pairs_together(tmp_path: Path) -> None:
    found = prepared(tmp_path, [pair(n) for n in range(40)], validation=10)
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (30, 10)
    numbers: list[str] = []
    for data in (found.train, found.validation):
        for example in range(len(data)):
            chosen, rejected = (targets(data, d).split()[1] for d in data.sequences(example))
            assert chosen == rejected
            numbers.append(chosen)
    assert len(set(numbers)) == 40


def test_what_is_cut_is_counted_and_a_pair_loses_no_partner(tmp_path: Path) -> None:
    rows = [pair(1), pair(2, chosen="y" * 80), pair(3) | {"prompt": "w" * 80}, pair(4), pair(5, rejected="")]
    rows[4]["rejected"] = " "
    found = prepared(tmp_path, [*rows, {"prompt": "Why?", "chosen": "So.", "rejected": "So."}])
    data = found.train
    # The third has no room for an answer, the fifth has one answer, the last one answer twice.
    assert (len(data), data.sequence_count) == (3, 6)
    assert max(data.sequence_length(d) for d in range(6)) == 64
    report = data.report
    assert (report["rows"], report["truncated"], report["without_target"]) == (6, 2, 1)
    assert report["left_out"] == {"the answer is empty": 1, "chosen and rejected are the same": 1}
    assert any("2 of 6 rows cut to data.max_length 64" in line for line in found.summary)


def test_a_saved_dataset_has_its_pairs_when_it_is_mapped_back(tmp_path: Path) -> None:
    rows = [pair(n) for n in range(6)]
    made, found = (prepared(tmp_path, rows).train for _ in range(2))
    assert found.members is not None and found.roles is not None
    assert made.fingerprint == found.fingerprint
    assert found.members.tolist() == [[2 * n, 2 * n + 1] for n in range(6)]
    assert found.roles.tolist() == [CHOSEN, REJECTED] * 6


@pytest.mark.parametrize("pack", [None, 256])
@pytest.mark.parametrize("rows", [1, 3])
def test_both_sides_of_a_pair_are_in_one_micro_batch(tmp_path: Path, pack: int | None, rows: int) -> None:
    data = prepared(tmp_path, [pair(n, chosen="y" * (n % 7)) for n in range(23)]).train
    stream = Stream(
        data,
        StreamSettings(global_batch_size=8, seed=0, rows=rows, pack_length=pack, total_examples=23, example_weight=1.0),
    )
    seen: list[int] = []
    for step in range(len(stream)):
        batch = stream.global_batch(step)
        assert batch.weight == len(stream.examples(step))
        assert batch.targets == sum(data.target_count(e) for e in stream.examples(step))
        for micro in batch.micro_batches:
            tensors = collate(data, micro, packed=pack is not None, pad_token_id=0)
            assert tensors.sequences == tuple(d for e in micro.examples for d in data.sequences(e))
            assert tensors.roles == (CHOSEN, REJECTED) * len(micro.examples)
            assert sum(tensors.target_counts) == len(tensors.targets)
            assert tensors.tokens == micro.tokens
            if pack is None:
                assert len(tensors.input_ids) == 2 * len(micro.examples)
            ids = tensors.targets.split(tensors.target_counts)
            assert [str(build_bytes_tokenizer().decode(part)) for part in ids] == [
                targets(data, d) for d in tensors.sequences
            ]
            seen += micro.examples
    assert sorted(seen) == list(range(23))


def test_sums_by_document_are_those_of_each(tmp_path: Path) -> None:
    data = prepared(tmp_path, [pair(n, chosen="y" * n) for n in range(4)]).train
    everything = Stream(data, StreamSettings(global_batch_size=4, seed=0, rows=4, pack_length=512)).global_batch(0)
    batch = collate(data, everything.micro_batches[0], packed=True, pad_token_id=0)
    sums = batch.sum_by_sequence(batch.targets.float())
    assert sums.tolist() == [float(data.sequence(d)[0][data.sequence(d)[1]].sum()) for d in batch.sequences]


def test_rows_are_known_by_what_the_task_takes() -> None:
    pairs_, answer = ["prompt", "chosen", "rejected"], ["prompt", "completion", "label"]
    assert PAIRS.layout(pairs_, [], RowSettings()) == ANSWERS.layout(pairs_, [], RowSettings()) == "preference"
    assert ANSWERS.layout(answer, [], RowSettings()) == "labelled"
    assert EXAMPLES.layout(answer, [], RowSettings()) == "prompt_completion"
    with pytest.raises(RequestError, match=r"these are labelled rows, for task: dpo with dpo\.loss: kto"):
        PAIRS.layout(answer, [], RowSettings())
    with pytest.raises(RequestError, match="these are preference rows, for task: dpo"):
        EXAMPLES.layout(pairs_, [], RowSettings())
