"""Encode conversations as tokens, and mark the tokens of assistant turns as targets.

The whole conversation is rendered and tokenized once, exactly as at inference; nothing is concatenated from parts. A
token is a target if any of its characters belong to a turn, which ``chat_turns`` locates. White space after the stop is
not a target, and neither is text that the template appends to the end of a conversation: the model has stopped by then.

``omissions`` finds the parts of a conversation that a template left out. The turns are compared with the rendered text,
without white space, because templates trim and join texts. Each part of the text is counted for one turn only, so a
short answer is not taken for part of another turn.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from trainwright.data.rows.chat_templates import ChatTemplate, arguments_in, fixed_date, install_template
from trainwright.data.rows.chat_turns import LocatedTurns, Span, TurnFinder
from trainwright.data.rows.formats import Message, TurnsError
from trainwright.data.rows.tokenizer_calls import call_tokenizer
from trainwright.data.rows.tool_calls import arguments_of, names_in
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Encoded: TypeAlias = tuple[list[int], list[bool]]  # (ids, targets) of one example, of equal length


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Encoded:
    """Return the token ids and target flags of one conversation; use ``ChatEncoder`` for many."""
    return ChatEncoder(tokenizer).encode([messages])[0]


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template, or its one for tools if it has several.

    A tokenizer without a template gets a plain one, in place, so that saving and generating use the same one. ``notes``
    reports this and other messages about the template.

    Args:
        targets: ``data.targets`` of a recipe.

    Raises:
        RequestError: the tokenizer gives no character offsets, or its template renders no conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: str = "answers") -> None:
        self._targets = targets
        self.name = os.path.basename(str(tokenizer.name_or_path).rstrip("/")) or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise RequestError(
                f"the tokenizer {self.name} has no character offsets; use a fast tokenizer (tokenizer.json)"
            )
        self.notes: list[str] = []
        if note := install_template(tokenizer):
            self.notes.append(note)
        self._tokenizer = tokenizer
        self._control = _control_pattern(tokenizer)
        self._stripping = _stripping(tokenizer)
        self._finders: dict[str, TurnFinder] = {}
        self._tried: set[str] = set()
        self._ways: dict[str, None] = {}  # settings with which the template writes what it leaves out
        if not self._finder([]).stop:
            self.notes.append(f"the chat template of {self.name} writes no stop token after an assistant turn")
        if self._prompt_splits_token():
            self.notes.append(
                f"the chat template of {self.name} ends a prompt within a token of the answer, which is generated from "
                "other tokens than it is trained on; have the prompt end without a space"
            )

    def _prompt_splits_token(self) -> bool:
        """Return whether the tokens of a prompt are not those with which the whole conversation begins."""
        turns: list[Message] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "the"}]
        template = self._finder([]).template
        try:
            (prompt,), (whole,) = template.render([turns[:1]], generation_prompt=True), template.render([turns])
            encoded = call_tokenizer(self._tokenizer, [prompt, whole], add_special_tokens=False)
        except TurnsError:  # of the template, or of a tokenizer without a token for these characters
            return False
        of_prompt, of_whole = map(list, encoded["input_ids"])
        return whole.startswith(prompt) and of_whole[: len(of_prompt)] != of_prompt

    @property
    def stop(self) -> str:
        """Return the text that ends an assistant turn."""
        return self._finder([]).stop

    def encode(
        self, conversations: Sequence[Sequence[Message]], remarks: Sequence[set[str]] | None = None
    ) -> list[Encoded]:
        """Return ``(ids, targets)`` of each conversation.

        Args:
            remarks: for each conversation, collects what its rendered text lacks or changes, as verb phrases.

        Raises:
            TurnsError: the template refuses a conversation, or its turns cannot be located; the message names the
                template.
        """
        if not conversations:
            return []
        located = self._located(conversations, remarks)
        encoded = call_tokenizer(
            self._tokenizer,
            [one.text for one in located],
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            (list(ids), self._targets_of(ids, offsets, one))
            for ids, offsets, one in zip(encoded["input_ids"], encoded["offset_mapping"], located, strict=True)
        ]

    def _targets_of(self, ids: Sequence[int], offsets: Sequence[Span], located: LocatedTurns) -> list[bool]:
        """Return which tokens of a conversation are targets."""
        if self._targets == "all":
            return [True] * len(ids)
        spans = located.spans
        if self._targets == "last":
            spans = spans[-1:]
        elif self._targets != "answers":
            matches = re.finditer(self._targets[1:-1], located.text)
            spans = [match.span(1 if match.re.groups else 0) for match in matches]
        return _flags(self._exact(ids, offsets, located.text), [(begin, end) for begin, end in spans if begin < end])

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the token ids of each conversation with the generation prompt appended.

        Raises:
            TurnsError: the template refuses a conversation; the message names the template.
        """
        if not conversations:
            return []
        texts = []
        for index, conversation in enumerate(conversations):
            finder = self._finder(conversation)
            try:
                texts += finder.template.render([_prepared(conversation, finder)], generation_prompt=True)
            except TurnsError as error:
                raise TurnsError(str(error), index) from None
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = call_tokenizer(self._tokenizer, texts, **options)
        return [list(ids) for ids in encoded["input_ids"]]

    def ways(self) -> list[str]:
        """Return the settings that keep what the template left out of a row, or nothing if it left nothing out."""
        return [*self._ways, "another model.chat_template"] if self._tried else []

    def _finder(self, conversation: Sequence[Message]) -> TurnFinder:
        """Return what locates turns in the template of a conversation: tool_use, if it has tools and there is one."""
        tools = next((turn["tools"] for turn in conversation if "tools" in turn), None)
        try:
            text = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:  # several templates, and none of them is the default
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise RequestError(
                f"the tokenizer {self.name} has the chat templates {names} and no default; set model.chat_template"
            ) from None
        if text not in self._finders:
            template = ChatTemplate(self._tokenizer, fixed_date(text, self.notes), self.name)
            self._finders[text] = TurnFinder(template, self._control)
            self.notes = list(dict.fromkeys(self.notes))
        return self._finders[text]

    def _located(
        self, conversations: Sequence[Sequence[Message]], remarks: Sequence[set[str]] | None
    ) -> list[LocatedTurns]:
        located: dict[int, LocatedTurns] = {}
        by_finder: dict[TurnFinder, list[int]] = {}
        for index, conversation in enumerate(conversations):
            by_finder.setdefault(self._finder(conversation), []).append(index)
        for finder, indices in by_finder.items():
            rows = [_prepared(conversations[index], finder) for index in indices]
            try:
                texts = finder.find(rows)
            except TurnsError as error:
                raise TurnsError(str(error), indices[error.index]) from None
            for index, row, one in zip(indices, rows, texts, strict=True):
                located[index] = one
                self._check_tools(row, one.text, index)
                if remarks is not None:
                    folded = len(row) < len(conversations[index])
                    remarks[index].update(self._remarks(finder, row, one, folded=folded))
        return [located[index] for index in range(len(conversations))]

    def _check_tools(self, conversation: list[Message], text: str, index: int) -> None:
        """Raise TurnsError if the template omits tools or tool calls, which the model would then not learn."""
        for names, what in zip(names_in(conversation), ("tools", "calls of tools"), strict=True):
            if missing := next((name for name in names if name not in text), None):
                raise TurnsError(
                    f"the chat template of {self.name} does not write {what}, such as {missing}; set "
                    "model.chat_template to one that writes them, or remove them from the row",
                    index,
                )

    def _remarks(self, finder: TurnFinder, row: list[Message], located: LocatedTurns, *, folded: bool) -> set[str]:
        remarks = set()
        if folded:
            remarks.add(
                f"have a system turn, which the chat template of {self.name} does not support: its text is prepended "
                "to the first user turn"
            )
        if located.prompt_only:
            remarks.add(
                f"have answers that do not follow {located.prompt_only!r}, with which the generation prompt of "
                f"{self.name} ends: the model generates after text that it is not trained on"
            )
        for omission in self._omissions(finder, row, located.text):
            role = row[omission.turn]["role"]
            turns = "" if omission.what == "parts of tools" else f" in {role} turns"
            what = f"have {omission.what}{turns} that the chat template of {self.name} does not write"
            if what not in self._tried:
                self._tried.add(what)
                self._try_ways(finder, row, omission)
            remarks.add(what)
        return remarks

    def _omissions(self, finder: TurnFinder, row: list[Message], text: str) -> list[Omission]:
        return omissions(row, text, lambda turn: finder.writes_name(row, turn))

    def _try_ways(self, finder: TurnFinder, row: list[Message], omission: Omission) -> None:
        """Find the settings with which the template writes what it leaves out of a row."""
        template = finder.template

        def lacks(conversation: list[Message], **arguments: bool) -> bool:
            try:
                (text,) = template.render([conversation], arguments=arguments)
            except TurnsError:
                return True
            return omission in self._omissions(finder, conversation, text)

        if row[omission.turn]["role"] == "assistant" and not lacks(row[: omission.turn + 1]):
            self._ways["data.example_per_turn=true"] = None
        for name in arguments_in(template.text):
            for value in (True, False):
                if not lacks(row, **{name: value}):
                    self._ways[f"model.template_arguments.{name}={str(value).lower()}"] = None

    def _exact(self, ids: Sequence[int], offsets: Sequence[Span], text: str) -> list[Span]:
        """Return the offsets without the white space that some special tokens swallow, which belongs to the turns."""
        if not self._stripping:
            return list(offsets)
        exact = []
        for token, (begin, end) in zip(ids, offsets, strict=True):
            if token in self._stripping:
                part = text[begin:end]
                begin, end = end - len(part.lstrip()), begin + len(part.rstrip())
            exact.append((begin, end))
        return exact


def _prepared(conversation: Sequence[Message], finder: TurnFinder) -> list[Message]:
    """Return a conversation with its system text in the first user turn, if the template does not support it."""
    if not finder.folds_system or conversation[0]["role"] != "system":
        return list(conversation)
    system, first, *rest = conversation
    text = f"{system['content']}\n\n{first['content']}" if system["content"].strip() else first["content"]
    return [{**system, **first, "content": text}, *rest]


def _control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches special and added tokens, longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    longest = sorted((token for token in tokens if token.strip()), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _stripping(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the added tokens that swallow the white space around them."""
    added = tokenizer.added_tokens_decoder.items()
    return {token for token, content in added if (content.lstrip or content.rstrip) and content.content.strip()}


def _flags(offsets: Sequence[Span], turns: Sequence[Span]) -> list[bool]:
    """Flag the tokens that overlap a turn; both sequences are in order.

    Each token is extended back to the end of the previous one: tokenizers exclude the space before a word from its
    offsets, and give a token of only spaces an empty range.
    """
    flags, previous, current = [], 0, 0
    for begin, end in offsets:
        begin, previous = min(begin, previous), end
        while current < len(turns) and turns[current][1] <= begin:
            current += 1
        flags.append(current < len(turns) and turns[current][0] < end and begin < turns[current][1])
    return flags


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
    remaining = _squeezed(text)
    missing: list[Omission] = []
    for piece in sorted(_pieces(conversation), key=lambda piece: -len(piece.text)):
        parts = [piece]
        if _END in piece.text and _without(remaining, piece.text) is None:  # the template may split it
            thought, _, answer = piece.text.rpartition(_END)
            parts = [piece._replace(what="reasoning", text=thought.replace(_BEGIN, "")), piece._replace(text=answer)]
        for part in parts:
            rest = _without(remaining, part.text)
            remaining = remaining if rest is None else rest
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
