"""Convert rows that compare answers to conversations with a common prompt, and to the role of each answer.

    {"prompt", "chosen", "rejected"}    answers to a prompt, each a text or each a list of messages
    {"chosen", "rejected"}              whole conversations with a common prefix, each a list of messages, or a text
                                        "\n\nHuman: …\n\nAssistant: …" as in Anthropic's HH-RLHF
    {"prompt", "completion", "label"}   one answer, and whether it is good

The common prefix of the conversations is their prompt; both sequences of a pair start with it, and it is not a target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile

from trainwright.data.rows.formats import (
    Example,
    Message,
    NoTarget,
    RowReader,
    add_input,
    complete_conversation,
    parse_transcript,
    read_answer_field,
    read_text_field,
    read_turns_field,
    to_example,
    to_prompt,
    to_single_sequence,
)
from trainwright.data.rows.layouts import SINGLE, RowLayout
from trainwright.data.sources.row_files import Row, describe_type
from trainwright.errors import RequestError

# The role of a sequence: the better or the worse answer; for labelled rows, a good or a bad answer.
CHOSEN, REJECTED = 0, 1
_PREFERENCE, _LABELLED = RowLayout("preference"), RowLayout("labelled")
_LABELS = {"true": CHOSEN, "false": REJECTED}
_SAME = "chosen and rejected are the same"


def to_sequences(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    """Return a row of any layout as the role and the content of each sequence."""
    if layout == "preference":
        return list(to_pair(row, remarks, layout))
    if layout == "labelled":
        return list(to_labelled(row, remarks, layout))
    return to_single_sequence(row, layout, remarks)


PAIRS = RowReader("pairs", ("preference",), to_sequences)
ANSWERS = RowReader("answers", ("preference", "labelled"), to_sequences)
ANY = RowReader("any", ("preference", "labelled", *SINGLE), to_sequences)  # rows that do not belong to a task yet


def to_pair(
    row: Row, remarks: Counter[str] | None = None, layout: RowLayout = _PREFERENCE
) -> list[tuple[int, list[Message]]]:
    """Return a ``preference`` row as ``(role, conversation)`` of the chosen and the rejected answer, in this order.

    Args:
        remarks: counts the rows that were changed, by the change in words.

    Raises:
        NoTarget: an answer is empty, or both are the same.
        RequestError: a field is missing or of the wrong type, or the two do not answer the same prompt.
    """
    prompt, answers = _split_prompt_and_answers(row, layout)
    if answers[0] == answers[1]:
        raise NoTarget(_SAME)
    changes: set[str] = set()
    pair = [complete_conversation([*map(dict, prompt), *answer], row, changes, layout) for answer in answers]
    if remarks is not None:
        remarks.update(changes)
    return list(zip((CHOSEN, REJECTED), pair, strict=True))


def to_labelled(
    row: Row, remarks: Counter[str] | None = None, layout: RowLayout = _LABELLED
) -> list[tuple[int, list[Message]]]:
    """Return a ``labelled`` row as the role and the conversation of its one answer.

    Raises:
        NoTarget, RequestError: as in ``formats.to_example``; RequestError if the label is neither true nor false.
    """
    label = row.get(layout.column("label"))
    role = _LABELS.get(label.strip().lower()) if isinstance(label, str) else None  # CSV values are always text
    if isinstance(label, bool):
        role = CHOSEN if label else REJECTED
    if role is None:
        description = repr(label) if isinstance(label, str) else describe_type(label)
        raise RequestError(f"the field label should be true or false, not {description}")
    messages = to_example(row, RowLayout("prompt_completion", layout.columns, settings=layout.settings), remarks)
    assert not isinstance(messages, str)
    return [(role, messages)]


def _split_prompt_and_answers(row: Row, layout: RowLayout) -> tuple[list[Message], tuple[list[Message], list[Message]]]:
    sides = (layout.column("chosen"), layout.column("rejected"))
    kinds = {side: describe_type(row[side]) for side in sides if row.get(side) is not None}
    if len(set(kinds.values())) == 2:
        chosen_kind, rejected_kind = kinds.values()
        raise RequestError(f"{sides[0]} is {chosen_kind} and {sides[1]} is {rejected_kind}; use one format for both")
    texts = [row.get(side) for side in sides]
    transcripts = [parse_transcript(text) if isinstance(text, str) else None for text in texts]
    if isinstance(texts[0], str) and not all(transcripts):
        answers = [[{"role": "assistant", "content": read_answer_field(row, side)}] for side in sides]
        return _read_prompt(row, layout), (answers[0], answers[1])
    chosen, rejected = (turns or read_turns_field(row, side) for turns, side in zip(transcripts, sides, strict=True))
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return _read_prompt(row, layout), (chosen, rejected)
    common = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1], zip(chosen, rejected, strict=False)))
    _check_beginning(row, layout, dict(zip(sides, (chosen, rejected), strict=True)), common)
    return to_prompt(chosen[:common]), (chosen[common:], rejected[common:])


def _read_prompt(row: Row, layout: RowLayout) -> list[Message]:
    field = layout.column("prompt")
    prompt = row.get(field)
    if isinstance(prompt, dict) and isinstance(prompt.get("messages"), list) and not prompt.get("tools"):
        return to_prompt(read_turns_field(prompt, "messages"))  # OpenAI's format
    if isinstance(prompt, list):
        return to_prompt(read_turns_field(row, field))
    text = add_input(row, layout, read_text_field(row, field))
    return to_prompt(parse_transcript(text) or [{"role": "user", "content": text}])


def _check_beginning(row: Row, layout: RowLayout, sides: Mapping[str, Sequence[Message]], common: int) -> None:
    """Raise RequestError unless both conversations answer the same prompt, which is the row's prompt if it has one."""
    chosen, rejected = sides.values()
    if list(chosen) == list(rejected):
        raise NoTarget(_SAME)
    if common == 0:
        raise RequestError(f"{' and '.join(sides)} begin with different turns; both should begin with the same prompt")
    for field, turns in sides.items():
        if common == len(turns):
            raise RequestError(f"{field} is a prefix of the other conversation, so it has no answer of its own")
    for field, turns in sides.items():
        if turns[common]["role"] != "assistant":
            raise RequestError(
                f"{field}[{common}] is the first turn that differs, and it is a {turns[common]['role']} turn; "
                "conversations must first differ in an assistant turn"
            )
    column = layout.column("prompt")
    prompt, beginning = row.get(column), chosen[:common]
    if not prompt or column in ("messages", "conversations"):  # these two often hold the whole conversation
        return
    if isinstance(prompt, str):
        prompt_turns = parse_transcript(prompt)
        is_same = prompt_turns == [*beginning] or any(turn["content"].strip() == prompt.strip() for turn in beginning)
    else:
        is_same = read_turns_field(row, column) == list(beginning)
    if not is_same:
        raise RequestError(
            f"the field {column} differs from the beginning of {' and '.join(sides)}; remove or correct it"
        )
