"""Locate the assistant turns in the text that a chat template writes.

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

import re
from typing import NamedTuple, TypeAlias

from trainwright.data.rows.chat_templates import ChatTemplate
from trainwright.data.rows.formats import Message, TurnsError

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
        bare, prompted = template.render([[user]]), template.render([[user]], generation_prompt=True)
        self._prompts = bare != prompted
        self._header = prompted[0][len(_common(bare[0], prompted[0])) :]
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

    def writes_name(self, row: list[Message], turn: int) -> bool:
        """Return whether the template writes the names of turns such as this one of a row."""
        role = row[turn]["role"]
        if role not in self._named:
            renamed = [*row[:turn], {**row[turn], "name": _PROBE}, *row[turn + 1 :]]
            try:
                self._named[role] = _PROBE in self.template.render([renamed])[0]
            except TurnsError:  # it checks names
                self._named[role] = True
        return self._named[role]

    def find(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        """Return each conversation as text with the ranges of its turns.

        Raises:
            TurnsError: the template rejects a conversation, or its turns cannot be located.
        """
        return self._marked(rows) if self.template.marked else self._located(rows)

    def _marked(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        located = []
        for index, row in enumerate(rows):
            text, ranges = self.template.render_marked(row, index)
            turns = [turn for turn, message in enumerate(row) if message["role"] == "assistant"]
            if len(ranges) != len(turns):
                raise self._not_located(index, f"{len(turns)} turns, {len(ranges)} marked as generated")
            trained = [(turn, span) for turn, span in zip(turns, ranges, strict=True) if row[turn].get("target", True)]
            prompts = self._prompts_of([row[:turn] for turn, _ in trained])
            located.append(
                LocatedTurns(
                    text,
                    [self._closed(text, span) for _, span in trained],
                    next(filter(None, (self._prompt_only(text, prompt) for prompt in prompts)), ""),
                )
            )
        return located

    def _prompts_of(self, befores: list[list[Message]]) -> list[str]:
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

    def _located(self, rows: list[list[Message]]) -> list[LocatedTurns]:
        texts = self.template.render(rows)
        places = [
            (index, turn)
            for index, row in enumerate(rows)
            for turn, message in enumerate(row)
            if message["role"] == "assistant" and message.get("target", True)
        ]
        spans: list[list[Span]] = [[] for _ in rows]
        prompt_only = [""] * len(rows)
        if not places:
            return [LocatedTurns(text, [], "") for text in texts]
        try:
            prompts = self.template.render([rows[index][:turn] for index, turn in places], generation_prompt=True)
        except TurnsError as error:
            raise TurnsError(str(error), places[error.index][0]) from None
        probes = self._probes([_replaced(rows[index], turn) for index, turn in places])
        for (index, turn), prompt, probe in zip(places, prompts, probes, strict=True):
            text, row = texts[index], rows[index]
            span = self._span(text, prompt, probe, last=turn == len(row) - 1) or self._up_to(text, prompt, row, turn)
            if span is None:
                raise self._not_located(index, f"turn {turn} is not in the rendered text")
            spans[index].append(span)
            prompt_only[index] = prompt_only[index] or self._prompt_only(text, prompt)
        return [LocatedTurns(*one) for one in zip(texts, spans, prompt_only, strict=True)]

    def _probes(self, replaced: list[list[Message]]) -> list[str]:
        """Return the text of each conversation with a probe, or "" if the template rejects it."""
        try:
            return self.template.render(replaced)
        except TurnsError:
            return [self._probes([one])[0] if len(replaced) > 1 else "" for one in replaced]

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
        shared = len(_common(text, before))
        if shared < len(before) and not before[shared:].isspace():
            return self._shared(text, prompt)
        # Without a generation prompt, the model writes the space between the user's turn and the answer.
        bare = before.rstrip()
        return min(shared, len(bare)) if not self._prompts and bare.endswith(prompt[-_TAIL:]) else shared

    def _shared(self, text: str, prompt: str) -> int | None:
        """Return how much of the generation prompt precedes an answer, if the text before the prompt's header does."""
        if self._header and text.startswith(prompt.removesuffix(self._header)) and prompt.endswith(self._header):
            length = len(_common(text, prompt))
            inside = (match.start() for match in self._control.finditer(prompt) if match.start() < length < match.end())
            return next(inside, length)
        return None

    def _up_to(self, text: str, prompt: str, row: list[Message], turn: int) -> Span | None:
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
            (probe,) = self._probes([[*_replaced(row[: turn + 1], turn), *row[next_user:]]])
            start = self._start(text, prompt, probe.partition(_PROBE)[0]) if _PROBE in probe else None
        return (start, start + len(body)) if start is not None and body and text.startswith(body, start) else None

    def _prompt_only(self, text: str, prompt: str) -> str:
        """Return the end of the generation prompt that the text lacks although all before the header is the same."""
        shared = self._shared(text, prompt) if self._prompts else None
        return "" if shared is None else prompt[shared:]

    def _stop(self, after: str, *, last: bool) -> int:
        """Return how many characters of ``after``, the text after a turn's content, belong to its stop."""
        closing = after if last and self._prompts else _common(after, self._closing)
        if match := self._control.search(closing):
            return match.end()
        # Text that only starts like the closing belongs to the next turn.
        return len(closing.rstrip()) if last or closing == self._closing else 0

    def _not_located(self, index: int, why: str) -> TurnsError:
        return TurnsError(
            f"the chat template of {self.template.name}: the turns cannot be located ({why}); set model.chat_template "
            "to one that marks them with {% generation %}",
            index,
        )


def _common(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def _replaced(conversation: list[Message], turn: int) -> list[Message]:
    return [*conversation[:turn], {"role": "assistant", "content": _PROBE}, *conversation[turn + 1 :]]
