"""What a chat template leaves out of a conversation: reasoning, content, names, tools and the arguments of calls.

The turns are compared with the rendered text, without white space, because templates trim and join texts. Each part of
the text is counted for one turn only, so a short answer is not taken for part of another turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from trainwright.data.rows.formats import Message
from trainwright.data.rows.tool_calls import arguments_of

_END = "</think>"
_BEGIN = "<think>"


class Omission(NamedTuple):
    """A part of a conversation that is not in the text: what it is, and the index of its turn."""

    what: str
    turn: int


class _Piece(NamedTuple):
    what: str
    turn: int
    text: str


def omissions(conversation: Sequence[Message], text: str, writes_name: Callable[[int], bool]) -> list[Omission]:
    """Return what the rendered ``text`` of a conversation lacks, in the order of its turns.

    Args:
        writes_name: whether the template writes the name of a turn.
    """
    left = _squeezed(text)
    missing: list[Omission] = []
    for piece in sorted(_pieces(conversation), key=lambda piece: -len(piece.text)):
        parts = [piece]
        if _END in piece.text and _without(left, piece.text) is None:  # the template may split it
            thought, _, answer = piece.text.rpartition(_END)
            parts = [piece._replace(what="reasoning", text=thought.replace(_BEGIN, "")), piece._replace(text=answer)]
        for part in parts:
            rest = _without(left, part.text)
            left = left if rest is None else rest
            missing += [Omission(part.what, part.turn)] if rest is None else []
    for index, turn in enumerate(conversation):
        missing += [Omission("a name", index)] if "name" in turn and not writes_name(index) else []
        missing += [Omission("parts of tools", index)] if _lacks(_in_tools(turn), text) else []
        missing += [Omission("arguments of calls", index)] if _lacks(_in_calls(turn), text) else []
    return sorted(missing, key=lambda omission: omission.turn)


def _pieces(conversation: Sequence[Message]) -> Iterator[_Piece]:
    for index, turn in enumerate(conversation):
        for what in ("content", "reasoning"):
            if text := turn.get(what, "").strip():
                yield _Piece(what, index, text)


def _without(squeezed: str, piece: str) -> str | None:
    """Return a text without one occurrence of a piece, or None if it has none. Templates may write it as JSON."""
    piece = piece.strip()
    for form in (piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]):
        if (part := _squeezed(form)) in squeezed:
            return squeezed.replace(part, "\0", 1) if part else squeezed
    return None


def _lacks(texts: Iterator[str], text: str) -> bool:
    """Return whether a text lacks one of ``texts``, as they are or as JSON."""
    squeezed = ""
    for each in texts:
        if each not in text:
            squeezed = squeezed or _squeezed(text)
            if _without(squeezed, each) is None:
                return True
    return False


def _in_tools(turn: Message) -> Iterator[str]:
    """Yield the names and the descriptions of the tools and their parameters."""
    for tool in turn.get("tools", ()):
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        described = [function, *(properties.values() if isinstance(properties, dict) else ())]
        yield from properties if isinstance(properties, dict) else ()
        for each in described:
            if isinstance(each, dict) and isinstance(each.get("description"), str):
                yield each["description"]


def _in_calls(turn: Message) -> Iterator[str]:
    """Yield the names of the arguments of the calls, and their values that are texts."""
    for call in turn.get("tool_calls", ()):
        for name, value in arguments_of(call).items():
            yield name
            yield from _texts_of(value)


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(item)


def _squeezed(text: str) -> str:
    return "".join(text.split())
