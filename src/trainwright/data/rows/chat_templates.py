"""Render conversations with a chat template, in the form that it needs.

A tokenizer without a template gets a plain one. Arguments of tool calls are passed as objects or, if the template
concatenates them with text, as JSON; reasoning under each name that templates read.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.formats import Message, TurnsError, parse_arguments
from trainwright.errors import RequestError
from trainwright.recipe.files import describe_missing_file, read_text
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_clause

if TYPE_CHECKING:
    from jinja2 import Environment
    from transformers import PreTrainedTokenizerBase

_NAMED = Path(__file__).parent / "templates"
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
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Variables and functions that transformers provides.
_STANDARD = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
# ``reasoning`` is also passed as reasoning_content and thinking by transformers.
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning")


def install_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Set a plain chat template on a tokenizer without one, in place; return a message about it, or None.

    The template is ChatML if the vocabulary has its two tokens, otherwise ``User: …`` and ``Assistant: …`` lines with
    the end-of-text token after each answer.
    """
    if tokenizer.chat_template is not None:
        return None
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
        tokenizer.chat_template = read_template("chatml")
        return "the tokenizer has no chat template: ChatML is used, because it has ChatML tokens"
    end = "eos_token" if tokenizer.eos_token is not None else "''"
    tokenizer.chat_template = _format_opening(tokenizer) + _PLAIN.replace("END", end)
    return "the tokenizer has no chat template: plain 'User:' and 'Assistant:' lines are used"


def set_template(tokenizer: PreTrainedTokenizerBase, setting: str) -> None:
    """Set the template that ``model.chat_template`` names, in place.

    Formats that are older than chat templates were encoded as texts, with the beginning-of-text token of tokenizers
    that add one.

    Raises:
        RequestError: as `resolve_template`.
    """
    opening = _format_opening(tokenizer) if setting in ("alpaca", "plain", "vicuna") else ""
    tokenizer.chat_template = opening + resolve_template(setting)


def _format_opening(tokenizer: PreTrainedTokenizerBase) -> str:
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return "{{ bos_token }}" if begins else ""


def list_templates() -> list[str]:
    """Return the names of the templates that come with the product: those of families of models."""
    return sorted(file.stem for file in _NAMED.glob("*.jinja"))


def read_template(name: str) -> str:
    """Return the template of a name."""
    return (_NAMED / f"{name}.jinja").read_text(encoding="utf-8")


def fix_date(template: str, notes: list[str]) -> str:
    """Return the template with a fixed date if it writes the current one; add a line about it to ``notes``."""
    if "strftime_now" not in template:
        return template
    notes.append("the chat template contains the current date: 26 July 2024 is used, so that the data stay the same")
    return _DATE + template


def set_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """Return the template with default values for some of its variables; callers may still pass others."""
    # Jinja has the names true, false and none.
    literals = {name: "none" if value is None else json.dumps(value) for name, value in arguments.items()}
    defaults = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif %}}\n"
        for name, literal in literals.items()
    )
    return defaults + template  # the line break after a tag is not written


def resolve_template(setting: str) -> str:
    """Return the template that ``model.chat_template`` sets: a name, a text or a file.

    Raises:
        RequestError: it is no name, no file and no Jinja, or not valid Jinja; names the line.
    """
    from jinja2 import TemplateSyntaxError

    location, text = "model.chat_template", setting
    if setting in list_templates():
        return read_template(setting)
    if "{" not in setting:
        file = expand_user_path(setting)
        if not file.is_file():
            raise RequestError(
                f"{location}: it is not a Jinja template, not one of {', '.join(list_templates())}, and "
                f"{describe_missing_file(file)}"
            )
        try:
            text = read_text(file)
        except RequestError as error:
            raise RequestError(f"{location}: {error}") from None
        location = f"{location}: {file}"
    try:
        _build_syntax().compile(text)
    except TemplateSyntaxError as error:
        raise RequestError(f"{location}, line {error.lineno}: {error.message}") from error
    return text


def _build_syntax() -> Environment:
    """Return the syntax of templates, with the tags that transformers adds; it renders none."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    return Environment(extensions=[loopcontrols, Generation])


def list_arguments(template: str) -> list[str]:
    """Return the names of the variables that a template reads besides the conversation, such as enable_thinking."""
    from jinja2 import meta, nodes

    tree = _build_syntax().parse(template)
    # A variable that a branch sets counts as undeclared; it is one of the template's own if nothing tests for it.
    tested_nodes = (node.node for node in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter)))
    tested_names = {node.name for node in tested_nodes if isinstance(node, nodes.Name)}
    assigned_names = {node.target.name for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)}
    names = meta.find_undeclared_variables(tree) - _STANDARD - (assigned_names - tested_names)
    return sorted(name for name in names if not name.endswith("_token"))


class ChatTemplate:
    """One chat template of a tokenizer.

    Attributes:
        marked: whether the template marks assistant turns with ``{% generation %}``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> None:
        self.name = name
        self.text = text
        self.marked = bool(_MARKERS.search(text))
        self._tokenizer = tokenizer
        self._as_json: bool | None = None  # the form of arguments; None: not tried yet

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        generation_prompt: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Return the text of each conversation.

        Args:
            arguments: values of further variables of the template.

        Raises:
            TurnsError: the template rejects a conversation.
        """
        self._try_forms(conversations)

        def render(some: Sequence[Sequence[Message]]) -> Any:
            apply = functools.partial(
                self._tokenizer.apply_chat_template,
                [self._variables(conversation) for conversation in some],
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(arguments or {}),
            )
            return _render_with_tools(apply, _find_tools(some[0]))

        try:
            if any(_find_tools(one) for one in conversations):  # tools belong to one conversation: render each alone
                return [text for one in conversations for text in render([one])]
            return list(render(conversations))
        except Exception as error:  # a template may raise anything; find the conversation that fails
            for index, conversation in enumerate(conversations):
                try:
                    render([conversation])
                except Exception as one:
                    raise self._refuse_conversation(str(one) or repr(one), index) from None
            raise self._refuse_conversation(str(error), 0) from None

    def render_marked(self, row: Sequence[Message], index: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the range of each turn that the template marks.

        Raises:
            TurnsError: the template rejects the conversation, whose index in a batch is ``index``.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        self._try_forms([row])
        variables: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        try:
            apply = functools.partial(
                render_jinja_template,
                [self._variables(row)],
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **variables,
            )
            (text,), (ranges,) = _render_with_tools(apply, _find_tools(row))
        except Exception as error:
            raise self._refuse_conversation(str(error) or repr(error), index) from None
        return text, ranges

    def _try_forms(self, conversations: Sequence[Sequence[Message]]) -> None:
        """Choose the form of the arguments of calls by rendering the first conversation that has some."""
        if self._as_json is not None:
            return
        for conversation in conversations:
            calls = [call for turn in conversation for call in turn.get("tool_calls", ())]
            objects = [value for call in calls if (value := parse_arguments(call))]
            if not objects:  # nothing to tell the forms apart
                continue
            texts: list[str | None] = []
            for as_json in (False, True):
                self._as_json = as_json
                try:
                    texts.append(self.render([conversation])[0])
                except TurnsError:
                    texts.append(None)
            self._as_json = None
            as_object, as_text = texts
            if as_object is None and as_text is None:  # rejected for another reason
                continue
            # Jinja writes an object as Python does, {'a': 1}.
            wrong = as_object is None or any(str(value) in as_object for value in objects)
            self._as_json = wrong and as_text is not None
            return

    def _variables(self, conversation: Sequence[Message]) -> list[Message]:
        """Return the keys of each turn that templates read."""
        turns = [{key: turn[key] for key in _KEYS if key in turn} for turn in conversation]
        for turn in turns:
            if "tool_calls" in turn:
                turn["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        return turns

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        value = function["arguments"] if self._as_json else parse_arguments(call)
        if self._as_json and not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": value}}

    def _refuse_conversation(self, why: str, index: int) -> TurnsError:
        return TurnsError(f"the chat template of {self.name} rejects the conversation: {why}", index)


def _render_with_tools(apply: Callable[..., Any], tools: list[Any] | None) -> Any:
    """Render with tools as the row has them or, if the template rejects bare functions, within the outer object."""
    try:
        return apply(tools=tools)
    except Exception:
        if all("function" in tool for tool in tools or ()):
            raise
        standard = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
        return apply(tools=standard)


def _find_tools(conversation: Sequence[Message]) -> list[Any] | None:
    return next((turn["tools"] for turn in conversation if "tools" in turn), None)


_ACCEPT = "data.accept_omissions=true"


class Remarks:
    """Verb phrases about rows, such as ``have reasoning that …``."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, remarks: Iterable[str], location: Callable[[], str]) -> None:
        """Count one row, whose place ``location`` returns."""
        for remark in sorted(remarks):
            if remark not in self._first:
                self._first[remark] = location()
            self._counts[remark] += 1

    def lines(self) -> list[str]:
        """Return a line for each remark, with the number of rows and the first one."""
        return [
            f"{format_clause(count, 'row', remark)} (first: {self._first[remark]})"
            for remark, count in self._counts.items()
        ]


def describe_remedies(ways: Sequence[str], *, accepted: bool) -> list[str]:
    """Return the line with the settings that keep what a chat template leaves out, unless the user accepts that."""
    if accepted or not ways:
        return []
    return [f"to train on what the chat template leaves out: {' or '.join(ways)}; to leave it out: {_ACCEPT}"]
