"""Rows that compare answers: how each becomes conversations with the same beginning, and what each answer is.

    {"prompt", "chosen", "rejected"}    answers to a prompt, each a text, or each a list of messages
    {"chosen", "rejected"}              whole conversations, lists of messages, with a common beginning
    {"prompt", "completion", "label"}   one answer, and whether it is a good one

What conversations have in common is their prompt; it begins the documents of a pair and is not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from trainwright.data.formats import (
    Message,
    NoTarget,
    answer_field,
    conversation,
    text_field,
    to_example,
    turns_field,
)
from trainwright.data.row_files import Row, kind_of
from trainwright.errors import RequestError

# What a document is: the better answer or the worse one; of answers with a label, a good one or a bad one.
CHOSEN, REJECTED = 0, 1
_LABELS = {"true": CHOSEN, "false": REJECTED}
_SAME = "chosen and rejected are the same"


def to_pair(row: Row, remarks: Counter[str] | None = None) -> list[tuple[int, list[Message]]]:
    """A ``preference`` row as ``(role, conversation)`` of the chosen and of the rejected answer, in this order.

    Args:
        remarks: counts the rows that are not taken as they are, by what they do, in words.

    Raises:
        NoTarget: an answer is empty, or both are the same.
        RequestError: a field is missing or of the wrong type, or the two do not answer the same prompt.
    """
    prompt, answers = _prompt_and_answers(row)
    if answers[0] == answers[1]:
        raise NoTarget(_SAME)
    found: set[str] = set()
    pair = [conversation([*map(dict, prompt), *answer], row, found) for answer in answers]
    if remarks is not None:
        remarks.update(found)
    return list(zip((CHOSEN, REJECTED), pair, strict=True))


def to_labelled(row: Row, remarks: Counter[str] | None = None) -> list[tuple[int, list[Message]]]:
    """A ``labelled`` row as the role and the conversation of its one answer.

    Raises:
        NoTarget, RequestError: as ``formats.to_example``; RequestError where the label is neither true nor false.
    """
    label = row.get("label")
    role = _LABELS.get(label.strip().lower()) if isinstance(label, str) else None  # CSV has no other values than text
    if isinstance(label, bool):
        role = CHOSEN if label else REJECTED
    if role is None:
        given = repr(label) if isinstance(label, str) else kind_of(label)
        raise RequestError(f"the field label should be true or false and is {given}")
    messages = to_example(row, "prompt_completion", remarks)
    assert not isinstance(messages, str)
    return [(role, messages)]


def _prompt_and_answers(row: Row) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    kinds = {field: kind_of(row[field]) for field in ("chosen", "rejected") if row.get(field) is not None}
    if len(set(kinds.values())) == 2:
        raise RequestError(f"chosen is {kinds['chosen']} and rejected is {kinds['rejected']}; give both in one form")
    if isinstance(row.get("chosen"), str):
        chosen, rejected = ([_assistant(answer_field(row, field))] for field in ("chosen", "rejected"))
        return _prompt(row), (chosen, rejected)
    chosen, rejected = turns_field(row, "chosen"), turns_field(row, "rejected")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return _prompt(row), (chosen, rejected)
    common = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1], zip(chosen, rejected, strict=False)))
    _check_beginning(row, chosen, rejected, common)
    return _not_trained_on(chosen[:common]), (chosen[common:], rejected[common:])


def _prompt(row: Row) -> list[Message]:
    if isinstance(row.get("prompt"), list):
        return _not_trained_on(turns_field(row, "prompt"))
    return [{"role": "user", "content": text_field(row, "prompt")}]


def _check_beginning(row: Row, chosen: Sequence[Message], rejected: Sequence[Message], common: int) -> None:
    """Refuse conversations that are not answers to one prompt, the row's own where it names one."""
    if list(chosen) == list(rejected):
        raise NoTarget(_SAME)
    if common == 0:
        raise RequestError("chosen and rejected begin with different turns; both should begin with the same prompt")
    sides = {"chosen": chosen, "rejected": rejected}
    for field, turns in sides.items():
        if common == len(turns):
            raise RequestError(f"{field} ends where the other goes on, so it has no answer of its own")
    for field, turns in sides.items():
        if turns[common]["role"] != "assistant":
            raise RequestError(
                f"{field}[{common}] is the first turn that differs and is the {turns[common]['role']}'s; "
                "conversations should differ from an answer of the assistant on"
            )
    prompt, beginning = row.get("prompt"), chosen[:common]
    if not prompt:
        return
    if isinstance(prompt, str):
        named = any(turn["content"].strip() == prompt.strip() for turn in beginning)
    else:
        named = turns_field(row, "prompt") == list(beginning)
    if not named:
        raise RequestError("the field prompt is not what chosen and rejected begin with; remove it, or put it right")


def _not_trained_on(turns: Sequence[Message]) -> list[Message]:
    return [{**turn, "target": False} if turn["role"] == "assistant" else turn for turn in turns]


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
