"""Encode conversations as tokens, and mark the tokens of assistant turns as targets.

The whole conversation is rendered and tokenized once, exactly as at inference; nothing is concatenated from parts. A
token is a target if any of its characters belong to a turn, which ``TurnFinder`` locates. White space after the stop is
not a target, and neither is text that the template appends to the end of a conversation: the model has stopped by then.

``list_omissions`` finds the parts of a conversation that a template left out. The turns are compared with the rendered
text, without white space, because templates trim and join texts. Each part of the text is counted for one turn only, so
a short answer is not taken for part of another turn.

Locate the assistant turns in the text that a chat template writes.

- By the template's own ``{% generation %}`` markers if it has them, otherwise
- a turn starts where the rendering of all earlier turns plus the generation prompt ends. If that rendering is not a
  prefix of the whole (a template that rewrites earlier turns, or has no generation prompt), the turn starts at its
  content;
- its content ends where the rendered text no longer changes when the content is replaced, or, if the template accepts
  no other content there (a tool turn must follow a call), where the rendering up to the turn ends;
- the stop follows: up to the first control token that the template writes before the next turn or, if it writes none,
  the text that closes every turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from trainwright.data.rows.chat_templates import ChatTemplate, fix_date, install_template, list_arguments
from trainwright.data.rows.formats import Message, TurnsError, list_tool_names, parse_arguments
from trainwright.data.rows.tokenizer_calls import call_tokenizer, shorten_name
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
        self.name = shorten_name(tokenizer) or "(unnamed)"
        if not tokenizer.is_fast:
            raise RequestError(
                f"the tokenizer {self.name} has no character offsets; use a fast tokenizer (tokenizer.json)"
            )
        self.notes: list[str] = []
        if note := install_template(tokenizer):
            self.notes.append(note)
        self._tokenizer = tokenizer
        self._control = _compile_control_pattern(tokenizer)
        self._stripping = _find_stripping_tokens(tokenizer)
        self._finders: dict[str, TurnFinder] = {}
        self._tried: set[str] = set()
        self._ways: dict[str, None] = {}  # settings with which the template writes what it leaves out
        if not self._choose_finder([]).stop:
            self.notes.append(f"the chat template of {self.name} writes no stop token after an assistant turn")
        if self._prompt_splits_token():
            self.notes.append(
                f"the chat template of {self.name} ends a prompt within a token of the answer, which is generated from "
                "other tokens than it is trained on; have the prompt end without a space"
            )

    def _prompt_splits_token(self) -> bool:
        """Return whether the tokens of a prompt are not those with which the whole conversation begins."""
        turns: list[Message] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "the"}]
        template = self._choose_finder([]).template
        try:
            (prompt,), (conversation,) = template.render([turns[:1]], generation_prompt=True), template.render([turns])
            encoding = call_tokenizer(self._tokenizer, [prompt, conversation], add_special_tokens=False)
        except TurnsError:  # of the template, or of a tokenizer without a token for these characters
            return False
        of_prompt, of_whole = map(list, encoding["input_ids"])
        return conversation.startswith(prompt) and of_whole[: len(of_prompt)] != of_prompt

    @property
    def stop(self) -> str:
        """Return the text that ends an assistant turn."""
        return self._choose_finder([]).stop

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
        locations = self._locate_turns(conversations, remarks)
        encoding = call_tokenizer(
            self._tokenizer,
            [turns.text for turns in locations],
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            (list(ids), self._flag_targets(ids, offsets, turns))
            for ids, offsets, turns in zip(encoding["input_ids"], encoding["offset_mapping"], locations, strict=True)
        ]

    def _flag_targets(self, ids: Sequence[int], offsets: Sequence[Span], located: LocatedTurns) -> list[bool]:
        if self._targets == "all":
            return [True] * len(ids)
        spans = located.spans
        if self._targets == "last":
            spans = spans[-1:]
        elif self._targets != "answers":
            matches = re.finditer(self._targets[1:-1], located.text)
            spans = [match.span(1 if match.re.groups else 0) for match in matches]
        return _flag_tokens(
            self._trim_offsets(ids, offsets, located.text), [(begin, end) for begin, end in spans if begin < end]
        )

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the token ids of each conversation with the generation prompt appended.

        Raises:
            TurnsError: the template refuses a conversation; the message names the template.
        """
        if not conversations:
            return []
        texts = []
        for index, conversation in enumerate(conversations):
            finder = self._choose_finder(conversation)
            try:
                texts += finder.template.render([_prepare_conversation(conversation, finder)], generation_prompt=True)
            except TurnsError as error:
                raise TurnsError(str(error), index) from None
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoding = call_tokenizer(self._tokenizer, texts, **options)
        return [list(ids) for ids in encoding["input_ids"]]

    def list_remedies(self) -> list[str]:
        """Return the settings that keep what the template left out of a row, or nothing if it left nothing out."""
        return [*self._ways, "another model.chat_template"] if self._tried else []

    def _choose_finder(self, conversation: Sequence[Message]) -> TurnFinder:
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
            template = ChatTemplate(self._tokenizer, fix_date(text, self.notes), self.name)
            self._finders[text] = TurnFinder(template, self._control)
            self.notes = list(dict.fromkeys(self.notes))
        return self._finders[text]

    def _locate_turns(
        self, conversations: Sequence[Sequence[Message]], remarks: Sequence[set[str]] | None
    ) -> list[LocatedTurns]:
        turns_by_index: dict[int, LocatedTurns] = {}
        by_finder: dict[TurnFinder, list[int]] = {}
        for index, conversation in enumerate(conversations):
            by_finder.setdefault(self._choose_finder(conversation), []).append(index)
        for finder, indices in by_finder.items():
            rows = [_prepare_conversation(conversations[index], finder) for index in indices]
            try:
                texts = finder.find(rows)
            except TurnsError as error:
                raise TurnsError(str(error), indices[error.index]) from None
            for index, row, turns in zip(indices, rows, texts, strict=True):
                turns_by_index[index] = turns
                self._check_tools(row, turns.text, index)
                if remarks is not None:
                    folded = len(row) < len(conversations[index])
                    remarks[index].update(self._list_remarks(finder, row, turns, folded=folded))
        return [turns_by_index[index] for index in range(len(conversations))]

    def _check_tools(self, conversation: list[Message], text: str, index: int) -> None:
        """Raise TurnsError if the template omits tools or tool calls, which the model would then not learn."""
        for names, label in zip(list_tool_names(conversation), ("tools", "calls of tools"), strict=True):
            if missing := next((name for name in names if name not in text), None):
                raise TurnsError(
                    f"the chat template of {self.name} does not write {label}, such as {missing}; set "
                    "model.chat_template to one that writes them, or remove them from the row",
                    index,
                )

    def _list_remarks(self, finder: TurnFinder, row: list[Message], located: LocatedTurns, *, folded: bool) -> set[str]:
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
        for omission in self._list_omissions(finder, row, located.text):
            role = row[omission.turn]["role"]
            turns = "" if omission.what == "parts of tools" else f" in {role} turns"
            remark = f"have {omission.what}{turns} that the chat template of {self.name} does not write"
            if remark not in self._tried:
                self._tried.add(remark)
                self._try_ways(finder, row, omission)
            remarks.add(remark)
        return remarks

    def _list_omissions(self, finder: TurnFinder, row: list[Message], text: str) -> list[Omission]:
        return list_omissions(row, text, lambda turn: finder.is_name_written(row, turn))

    def _try_ways(self, finder: TurnFinder, row: list[Message], omission: Omission) -> None:
        """Find the settings with which the template writes what it leaves out of a row."""
        template = finder.template

        def lacks(conversation: list[Message], **arguments: bool) -> bool:
            try:
                (text,) = template.render([conversation], arguments=arguments)
            except TurnsError:
                return True
            return omission in self._list_omissions(finder, conversation, text)

        if row[omission.turn]["role"] == "assistant" and not lacks(row[: omission.turn + 1]):
            self._ways["data.example_per_turn=true"] = None
        for name in list_arguments(template.text):
            for value in (True, False):
                if not lacks(row, **{name: value}):
                    self._ways[f"model.template_arguments.{name}={str(value).lower()}"] = None

    def _trim_offsets(self, ids: Sequence[int], offsets: Sequence[Span], text: str) -> list[Span]:
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


def _prepare_conversation(conversation: Sequence[Message], finder: TurnFinder) -> list[Message]:
    """Return a conversation with its system text in the first user turn, if the template does not support it."""
    if not finder.folds_system or conversation[0]["role"] != "system":
        return list(conversation)
    system, first, *rest = conversation
    text = f"{system['content']}\n\n{first['content']}" if system["content"].strip() else first["content"]
    return [{**system, **first, "content": text}, *rest]


def _compile_control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches special and added tokens, longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    longest = sorted((token for token in tokens if token.strip()), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def _find_stripping_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the added tokens that swallow the white space around them."""
    added_tokens = tokenizer.added_tokens_decoder.items()
    return {token for token, content in added_tokens if (content.lstrip or content.rstrip) and content.content.strip()}


def _flag_tokens(offsets: Sequence[Span], turns: Sequence[Span]) -> list[bool]:
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


def list_omissions(conversation: Sequence[Message], text: str, writes_name: Callable[[int], bool]) -> list[Omission]:
    """Return what the rendered ``text`` of a conversation lacks, in the order of its turns.

    Args:
        writes_name: whether the template writes the name of a turn.
    """
    remaining = _squeeze_text(text)
    missing: list[Omission] = []
    for piece in sorted(_iterate_pieces(conversation), key=lambda piece: -len(piece.text)):
        parts = [piece]
        if _END in piece.text and _remove_piece(remaining, piece.text) is None:  # the template may split it
            thought, _, answer = piece.text.rpartition(_END)
            parts = [piece._replace(what="reasoning", text=thought.replace(_BEGIN, "")), piece._replace(text=answer)]
        for part in parts:
            rest = _remove_piece(remaining, part.text)
            remaining = remaining if rest is None else rest
            missing += [Omission(part.what, part.turn)] if rest is None else []
    for index, turn in enumerate(conversation):
        missing += [Omission("a name", index)] if "name" in turn and not writes_name(index) else []
        missing += [Omission("parts of tools", index)] if _is_lacking(_iterate_tool_texts(turn), text) else []
        missing += [Omission("arguments of calls", index)] if _is_lacking(_iterate_call_texts(turn), text) else []
    return sorted(missing, key=lambda omission: omission.turn)


def _iterate_pieces(conversation: Sequence[Message]) -> Iterator[_Piece]:
    for index, turn in enumerate(conversation):
        for field in ("content", "reasoning"):
            if text := turn.get(field, "").strip():
                yield _Piece(field, index, text)


def _remove_piece(squeezed: str, piece: str) -> str | None:
    """Return a text without one occurrence of a piece, or None if it has none. Templates may write it as JSON."""
    piece = piece.strip()
    for form in (piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]):
        if (part := _squeeze_text(form)) in squeezed:
            return squeezed.replace(part, "\0", 1) if part else squeezed
    return None


def _is_lacking(texts: Iterator[str], text: str) -> bool:
    """Return whether a text lacks one of ``texts``, as they are or as JSON."""
    squeezed_text = ""
    for part in texts:
        if part not in text:
            squeezed_text = squeezed_text or _squeeze_text(text)
            if _remove_piece(squeezed_text, part) is None:
                return True
    return False


def _iterate_tool_texts(turn: Message) -> Iterator[str]:
    """Yield the names and the descriptions of the tools and their parameters."""
    for tool in turn.get("tools", ()):
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas = [function, *(properties.values() if isinstance(properties, dict) else ())]
        yield from properties if isinstance(properties, dict) else ()
        for schema in schemas:
            if isinstance(schema, dict) and isinstance(schema.get("description"), str):
                yield schema["description"]


def _iterate_call_texts(turn: Message) -> Iterator[str]:
    """Yield the names of the arguments of the calls, and their values that are texts."""
    for call in turn.get("tool_calls", ()):
        for name, value in parse_arguments(call).items():
            yield name
            yield from _iterate_texts(value)


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_texts(item)


def _squeeze_text(text: str) -> str:
    return "".join(text.split())


Span: TypeAlias = tuple[int, int]
_TAIL = 16  # characters of a prompt that tell whether only white space follows it
_PROBE = "Xq7turnZ"  # only letters and a digit, which no template changes


class LocatedTurns(NamedTuple):
    """A rendered conversation: its text, the range of each turn that is a target, and what differs at inference.

    ``prompt_only`` is the end of the generation prompt that the text does not have, or "".
    """

    text: str
    spans: list[Span]
    prompt_only: str


class TurnFinder:
    """Locates turns in the text of one template.

    Attributes:
        stop: the text that ends an assistant turn, or "".
        folds_system: whether system turns are to be prepended to the first user turn, because the template rejects
            them or leaves them out.

    Args:
        control: matches the special tokens of the tokenizer.

    Raises:
        TurnsError: the template renders no conversation.
    """

    def __init__(self, template: ChatTemplate, control: re.Pattern[str]) -> None:
        self.template = template
        self._control = control
        user, assistant = {"role": "user", "content": "Q"}, {"role": "assistant", "content": _PROBE}
        bare, prompted_texts = template.render([[user]]), template.render([[user]], generation_prompt=True)
        self._prompts = bare != prompted_texts
        self._header = prompted_texts[0][len(_find_common_prefix(bare[0], prompted_texts[0])) :]
        after = template.render([[user, assistant]], generation_prompt=True)[0].partition(_PROBE)[2]
        # The text that closes a turn when another turn follows.
        self._closing = after.removesuffix(self._header) if self._header else after
        after = template.render([[user, assistant]])[0].partition(_PROBE)[2]
        self.stop = after[: self._stop(after, last=True)]
        self._named: dict[str, bool] = {}
        try:
            system = template.render([[{"role": "system", "content": _PROBE}, user, assistant | {"content": "A"}]])
            self.folds_system = _PROBE not in system[0]
        except TurnsError:
            self.folds_system = True

    def is_name_written(self, row: list[Message], turn: int) -> bool:
        """Return whether the template writes the names of turns such as this one of a row."""
        role = row[turn]["role"]
        if role not in self._named:
            named_row = [*row[:turn], {**row[turn], "name": _PROBE}, *row[turn + 1 :]]
            try:
                self._named[role] = _PROBE in self.template.render([named_row])[0]
            except TurnsError:  # it checks names
                self._named[role] = True
        return self._named[role]

    def find(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        """Return each conversation as text with the ranges of its turns.

        Raises:
            TurnsError: the template rejects a conversation, or its turns cannot be located.
        """
        return self._marked(rows) if self.template.marked else self._locate_turns(rows)

    def _marked(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        located_turns = []
        for index, row in enumerate(rows):
            text, ranges = self.template.render_marked(row, index)
            turns = [turn for turn, message in enumerate(row) if message["role"] == "assistant"]
            if len(ranges) != len(turns):
                raise self._build_turns_error(index, f"{len(turns)} turns, {len(ranges)} marked as generated")
            targets = [(turn, span) for turn, span in zip(turns, ranges, strict=True) if row[turn].get("target", True)]
            prompts = self._render_prompts([row[:turn] for turn, _ in targets])
            spans = [self._closed(text, span) for _, span in targets]
            missing_end = next(filter(None, (self._prompt_only(text, prompt) for prompt in prompts)), "")
            located_turns.append(LocatedTurns(text, spans, missing_end))
        return located_turns

    def _render_prompts(self, befores: list[list[Message]]) -> list[str]:
        """Return the generation prompts after conversations, or nothing if the template rejects one without answer."""
        try:
            return self.template.render(befores, generation_prompt=True) if befores and self._prompts else []
        except TurnsError:
            return []

    def _closed(self, text: str, span: Span) -> Span:
        """Extend a marked span by its stop if that lies outside, and strip trailing white space."""
        start, end = span
        turn = text[start:end].rstrip()
        if any(match.end() == len(turn) for match in self._control.finditer(turn)):
            return start, start + len(turn)
        return start, end + self._stop(text[end:], last=False)

    def _locate_turns(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        texts = self.template.render(rows)
        positions = [
            (index, turn)
            for index, row in enumerate(rows)
            for turn, message in enumerate(row)
            if message["role"] == "assistant" and message.get("target", True)
        ]
        spans: list[list[Span]] = [[] for _ in rows]
        prompt_only = [""] * len(rows)
        if not positions:
            return [LocatedTurns(text, [], "") for text in texts]
        try:
            prompts = self.template.render([rows[index][:turn] for index, turn in positions], generation_prompt=True)
        except TurnsError as error:
            raise TurnsError(str(error), positions[error.index][0]) from None
        probes = self._render_probes([_replace_turn(rows[index], turn) for index, turn in positions])
        for (index, turn), prompt, probe in zip(positions, prompts, probes, strict=True):
            text, row = texts[index], rows[index]
            span = self._span(text, prompt, probe, last=turn == len(row) - 1) or self._locate_up_to(
                text, prompt, row, turn
            )
            if span is None:
                raise self._build_turns_error(index, f"turn {turn} is not in the rendered text")
            spans[index].append(span)
            prompt_only[index] = prompt_only[index] or self._prompt_only(text, prompt)
        return [LocatedTurns(*fields) for fields in zip(texts, spans, prompt_only, strict=True)]

    def _render_probes(self, replaced: list[list[Message]]) -> list[str]:
        """Return the text of each conversation with a probe, or "" if the template rejects it."""
        try:
            return self.template.render(replaced)
        except TurnsError:
            return [self._render_probes([conversation])[0] if len(replaced) > 1 else "" for conversation in replaced]

    def _span(self, text: str, prompt: str, probe: str, *, last: bool) -> Span | None:
        """Return the range of a turn, from the text with a probe as its content."""
        before, _, after = probe.partition(_PROBE)
        if probe.count(_PROBE) != 1 or not text.endswith(after):
            return None
        end = len(text) - len(after)
        start = self._start(text, prompt, before)
        return None if start is None or start > end else (start, end + self._stop(after, last=last))

    def _start(self, text: str, prompt: str, before: str) -> int | None:
        """Return the offset at which the model starts to write: after the generation prompt, or at the content."""
        if self._prompts and text.startswith(prompt):
            return len(prompt)
        shared = len(_find_common_prefix(text, before))
        if shared < len(before) and not before[shared:].isspace():
            return self._count_shared(text, prompt)
        # Without a generation prompt, the model writes the space between the user's turn and the answer.
        bare = before.rstrip()
        return min(shared, len(bare)) if not self._prompts and bare.endswith(prompt[-_TAIL:]) else shared

    def _count_shared(self, text: str, prompt: str) -> int | None:
        """Return how much of the generation prompt precedes an answer, if the text before the prompt's header does."""
        if self._header and text.startswith(prompt.removesuffix(self._header)) and prompt.endswith(self._header):
            length = len(_find_common_prefix(text, prompt))
            inside = (match.start() for match in self._control.finditer(prompt) if match.start() < length < match.end())
            return next(inside, length)
        return None

    def _locate_up_to(self, text: str, prompt: str, row: list[Message], turn: int) -> Span | None:
        """Return the range of a turn that calls tools or reasons, from the rendering of the turns up to it."""
        if not {"tool_calls", "reasoning"} & row[turn].keys():
            return None
        try:
            (until,) = self.template.render([row[: turn + 1]], generation_prompt=True)
        except TurnsError:
            return None
        start = begin = self._start(until, prompt, prompt)
        if begin is None:
            return None
        body = until.removesuffix(self._header)[begin:].rstrip()
        if not text.startswith(until[:begin]):  # later turns change earlier ones: keep those of the next user
            next_user = next((at for at in range(turn, len(row)) if row[at]["role"] == "user"), len(row))
            (probe,) = self._render_probes([[*_replace_turn(row[: turn + 1], turn), *row[next_user:]]])
            start = self._start(text, prompt, probe.partition(_PROBE)[0]) if _PROBE in probe else None
        return (start, start + len(body)) if start is not None and body and text.startswith(body, start) else None

    def _prompt_only(self, text: str, prompt: str) -> str:
        """Return the end of the generation prompt that the text lacks although all before the header is the same."""
        shared = self._count_shared(text, prompt) if self._prompts else None
        return "" if shared is None else prompt[shared:]

    def _stop(self, after: str, *, last: bool) -> int:
        """Return how many characters of ``after``, the text after a turn's content, belong to its stop."""
        closing = after if last and self._prompts else _find_common_prefix(after, self._closing)
        if match := self._control.search(closing):
            return match.end()
        # Text that only starts like the closing belongs to the next turn.
        return len(closing.rstrip()) if last or closing == self._closing else 0

    def _build_turns_error(self, index: int, why: str) -> TurnsError:
        return TurnsError(
            f"the chat template of {self.template.name}: the turns cannot be located ({why}); set model.chat_template "
            "to one that marks them with {% generation %}",
            index,
        )


def _find_common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def _replace_turn(conversation: list[Message], turn: int) -> list[Message]:
    return [*conversation[:turn], {"role": "assistant", "content": _PROBE}, *conversation[turn + 1 :]]
