"""Encode conversations as tokens, and mark the tokens of assistant turns as targets.

The whole conversation is rendered and tokenized once, exactly as at inference; nothing is concatenated from parts.
Each assistant turn is then located in the rendered text:

- by the template's own ``{% generation %}`` markers if it has them, otherwise
- a turn starts where the rendering of all earlier turns plus the generation prompt ends. If that rendering is not a
  prefix of the whole (a template that rewrites earlier turns, or has no generation prompt), the turn starts at its
  content;
- its content ends where the rendered text no longer changes when the content is replaced;
- the stop follows: up to the first control token that the template writes before the next turn or, if it writes none,
  the text that closes every turn.

A token is a target if any of its characters belong to a turn. White space after the stop is not a target, and neither
is text that the template appends to the end of a conversation: the model has stopped by then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.rows.bounded import tokenized
from trainwright.data.rows.formats import Message
from trainwright.data.rows.tool_calls import names_in
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# As in https://huggingface.co/docs/transformers/chat_templating
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ END }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# Some templates write the current date. The same data must give the same tokens every day, so the date is fixed to the
# one Llama 3.1's template falls back to.
_DATE = (
    "{%- macro strftime_now(format) -%}"
    "{{ {'%d %b %Y': '26 Jul 2024', '%B %d, %Y': 'July 26, 2024', '%d %B %Y': '26 July 2024'}"
    ".get(format, '2024-07-26') }}"
    "{%- endmacro -%}"
)
Encoded: TypeAlias = tuple[list[int], list[bool]]  # (ids, targets) of one example, of equal length
Span: TypeAlias = tuple[int, int]
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "Xq7turnZ"  # only letters and a digit, which no template changes


def install_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Set a plain chat template on a tokenizer without one, in place; return a message about it, or None.

    The template is ChatML if the vocabulary has its two tokens, otherwise ``User: …`` and ``Assistant: …`` lines with
    the end-of-text token after each answer.
    """
    if tokenizer.chat_template is not None:
        return None
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        tokenizer.chat_template = CHATML
        return "the tokenizer has no chat template: ChatML is used, because it has ChatML tokens"
    opens = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    end = "eos_token" if tokenizer.eos_token is not None else "''"
    tokenizer.chat_template = ("{{ bos_token }}" if opens else "") + _PLAIN.replace("END", end)
    return "the tokenizer has no chat template: plain 'User:' and 'Assistant:' lines are used"


def fixed_date(template: str, notes: list[str]) -> str:
    """Return the template with a fixed date if it writes the current one; add a line about it to ``notes``."""
    if "strftime_now" not in template:
        return template
    notes.append("the chat template contains the current date: 26 July 2024 is used, so that the data stay the same")
    return _DATE + template


class TurnsError(RequestError):
    """A conversation that the template cannot render or whose turns cannot be located; ``index`` is its batch index."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Encoded:
    """Return the token ids and target flags of one conversation; use ``ChatEncoder`` for many."""
    return ChatEncoder(tokenizer).encode([messages])[0]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoded]:
    """Tokenize plain texts and append the end-of-text token to each; all tokens are targets.

    If the tokenizer prepends a beginning-of-text token, it does so here too.
    """
    eos = tokenizer.eos_token_id
    encoded = []
    for ids in tokenized(tokenizer, texts, return_attention_mask=False, verbose=False)["input_ids"]:
        ids = ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        encoded.append((ids, [True] * len(ids)))
    return encoded


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template.

    A tokenizer without a template gets a plain one, in place, so that saving and generating use the same one. ``notes``
    reports this and other messages about the template.

    Raises:
        RequestError: the tokenizer gives no character offsets, or its template renders no conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = os.path.basename(str(tokenizer.name_or_path).rstrip("/")) or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise RequestError(
                f"the tokenizer {self.name} has no character offsets; use a fast tokenizer (tokenizer.json)"
            )
        self.notes: list[str] = []
        self.folded = 0  # conversations whose system turn was merged into the first user turn
        if note := install_template(tokenizer):
            self.notes.append(note)
        self._tokenizer = tokenizer
        self._template = fixed_date(tokenizer.get_chat_template(), self.notes)
        self._marked = bool(_MARKERS.search(self._template))
        self._control = _control_pattern(tokenizer)
        self._examine()

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return ``(ids, targets)`` of each conversation.

        Raises:
            TurnsError: the template refuses a conversation, or its turns cannot be located; the message names the
                template.
        """
        if not conversations:
            return []
        rows = [self._prepared(conversation) for conversation in conversations]
        texts, spans = self._marked_spans(rows) if self._marked else self._found_spans(rows)
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            self._check_tools(row, text, index)
        encoded = tokenized(
            self._tokenizer,
            texts,
            add_special_tokens=False,  # the template writes them
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        return [(list(ids), _flags(offsets, turns)) for ids, offsets, turns in pairs]

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the token ids of each conversation with the generation prompt appended.

        Raises:
            TurnsError: the template refuses a conversation; the message names the template.
        """
        if not conversations:
            return []
        texts = self._render([self._prepared(one) for one in conversations], generation_prompt=True)
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenized(self._tokenizer, texts, **options)
        return [list(ids) for ids in encoded["input_ids"]]

    def _prepared(self, conversation: Sequence[Message]) -> list[Message]:
        if not self._folds_system or conversation[0]["role"] != "system":
            return list(conversation)
        self.folded += 1
        system, first, *rest = conversation
        text = f"{system['content']}\n\n{first['content']}" if system["content"].strip() else first["content"]
        return [{**system, **first, "content": text}, *rest]

    def _check_tools(self, conversation: list[Message], text: str, index: int) -> None:
        """Raise TurnsError if the template omits tools or tool calls, which the model would then not learn."""
        for names, what in zip(names_in(conversation), ("tools", "calls of tools"), strict=True):
            if missing := next((name for name in names if name not in text), None):
                raise TurnsError(
                    f"the chat template of {self.name} does not write {what}, such as {missing}; set "
                    "model.chat_template to one that writes them, or remove them from the row",
                    index,
                )

    def _examine(self) -> None:
        """Render short conversations to find what the template writes around a turn."""
        user, assistant = {"role": "user", "content": "Q"}, {"role": "assistant", "content": _PROBE}
        bare, prompted = self._render([[user]]), self._render([[user]], generation_prompt=True)
        self._prompts = bare != prompted
        header = prompted[0][len(_common(bare[0], prompted[0])) :]
        after = self._render([[user, assistant]], generation_prompt=True)[0].partition(_PROBE)[2]
        # The text that closes a turn when another turn follows.
        self._closing = after.removesuffix(header) if header else after
        if not self._stop(self._render([[user, assistant]])[0].partition(_PROBE)[2], last=True):
            self.notes.append(f"the chat template of {self.name} writes no stop token after an assistant turn")
        try:
            system = self._render([[{"role": "system", "content": _PROBE}, user, assistant | {"content": "A"}]])
            self._folds_system = _PROBE not in system[0]
        except TurnsError:
            self._folds_system = True

    def _render(self, conversations: Sequence[Sequence[Message]], *, generation_prompt: bool = False) -> list[str]:
        def render(some: Sequence[Sequence[Message]]) -> Any:
            return self._tokenizer.apply_chat_template(
                [_plain(one) for one in some],
                tools=_tools(some[0]),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )

        try:
            if any(_tools(one) for one in conversations):  # tools belong to one conversation, so render one at a time
                return [text for one in conversations for text in render([one])]
            return list(render(conversations))
        except Exception as error:  # a template may raise anything; find the conversation that fails
            for index, conversation in enumerate(conversations):
                try:
                    render([conversation])
                except Exception as one:
                    raise self._refusal(str(one) or repr(one), index) from None
            raise self._refusal(str(error), 0) from None

    def _marked_spans(self, rows: list[list[Message]]) -> tuple[list[str], list[list[Span]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = [], []
        for index, row in enumerate(rows):
            variables: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
            try:
                result: Any = render_jinja_template(
                    [_plain(row)],
                    tools=_tools(row),
                    chat_template=self._template,
                    return_assistant_tokens_mask=True,
                    **variables,
                )
            except Exception as error:
                raise self._refusal(str(error) or repr(error), index) from None
            (text,), (found,) = result
            turns = [m for m in row if m["role"] == "assistant"]
            if len(found) != len(turns):
                raise self._not_located(index, f"{len(turns)} turns, {len(found)} marked as generated")
            texts.append(text)
            spans = [span for span, turn in zip(found, turns, strict=True) if turn.get("target", True)]
            marks.append([self._closed(text, span) for span in spans])
        return texts, marks

    def _closed(self, text: str, span: Span) -> Span:
        """Extend a marked span by its stop if that lies outside, and strip trailing white space."""
        start, end = span
        turn = text[start:end].rstrip()
        if any(match.end() == len(turn) for match in self._control.finditer(turn)):
            return start, start + len(turn)
        return start, end + self._stop(text[end:], last=False)

    def _found_spans(self, rows: list[list[Message]]) -> tuple[list[str], list[list[Span]]]:
        texts = self._render(rows)
        places = [
            (index, turn)
            for index, row in enumerate(rows)
            for turn, message in enumerate(row)
            if message["role"] == "assistant" and message.get("target", True)
        ]
        spans: list[list[Span]] = [[] for _ in rows]
        if not places:
            return texts, spans
        befores = [rows[index][:turn] for index, turn in places]
        replaced = [_replaced(rows[index], turn) for index, turn in places]
        try:
            prompts = self._render(befores, generation_prompt=True)
            probes = self._render(replaced)
        except TurnsError as error:
            raise TurnsError(str(error), places[error.index][0]) from None
        for (index, turn), prompt, probe in zip(places, prompts, probes, strict=True):
            before, _, after = probe.partition(_PROBE)
            text, last = texts[index], turn == len(rows[index]) - 1
            end = len(text) - len(after)
            start = self._start(text, prompt, before)
            if probe.count(_PROBE) != 1 or not text.endswith(after) or start is None or start > end:
                raise self._not_located(index, f"turn {turn} is not in the rendered text")
            spans[index].append((start, end + self._stop(after, last=last)))
        return texts, spans

    def _start(self, text: str, prompt: str, before: str) -> int | None:
        """Return the offset at which the model starts to write: after the generation prompt, or at the content."""
        if self._prompts and text.startswith(prompt):
            return len(prompt)
        if not text.startswith(before):
            return None
        # Without a generation prompt, the model writes the space between the user's turn and the answer.
        if len(prompt) < len(before) and text.startswith(prompt) and text[len(prompt) : len(before)].isspace():
            return len(prompt)
        return len(before)

    def _stop(self, after: str, *, last: bool) -> int:
        """Return how many characters of ``after``, the text after a turn's content, belong to its stop."""
        closing = after if last and self._prompts else _common(after, self._closing)
        if match := self._control.search(closing):
            return match.end()
        # Text that only starts like the closing belongs to the next turn.
        return len(closing.rstrip()) if last or closing == self._closing else 0

    def _not_located(self, index: int, why: str) -> TurnsError:
        return TurnsError(
            f"the chat template of {self.name}: the turns cannot be located ({why}); set model.chat_template to one "
            "that marks them with {% generation %}",
            index,
        )

    def _refusal(self, why: str, index: int) -> TurnsError:
        return TurnsError(f"the chat template of {self.name} rejects the conversation: {why}", index)


def _plain(conversation: Sequence[Message]) -> list[Message]:
    """Keep only the keys of each turn that templates read."""
    keys = ("role", "content", "tool_calls", "name", "tool_call_id")
    return [{key: turn[key] for key in keys if key in turn} for turn in conversation]


def _tools(conversation: Sequence[Message]) -> list[Any] | None:
    return next((turn["tools"] for turn in conversation if "tools" in turn), None)


def _common(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def _replaced(conversation: list[Message], turn: int) -> list[Message]:
    return [*conversation[:turn], {"role": "assistant", "content": _PROBE}, *conversation[turn + 1 :]]


def _control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches special and added tokens, longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    longest = sorted((token for token in tokens if token.strip()), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


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
