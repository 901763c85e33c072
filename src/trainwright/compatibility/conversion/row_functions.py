"""Settings of a source that read rows as the functions of a script write them. Nothing in a script is executed.

The functions that scripts give to ``map``, and to a trainer as ``formatting_func``, nearly all do one of four things:
render turns with the chat template, make turns of columns, fill columns into a prompt, or add the end-of-text token to
a text. Their statements are followed with columns in place of values; for anything else ``Unclear`` is raised.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from string import Formatter
from typing import Any, NamedTuple

from trainwright.compatibility.conversion.scripts import list_calls

_TURNS = ("messages", "conversations")


class Unclear(Exception):
    """The function does something else; the text is the expression or statement."""


class ColumnValue(NamedTuple):
    """A column: of one row, or, as functions of batches have them, the list of its values."""

    name: str


class EndOfText(NamedTuple):
    """The end-of-text token."""


class BeginningOfText(NamedTuple):
    """The beginning-of-text token, which a text has once whether it is written or not."""

    is_first: bool = True  # two empty tuples would be equal


@dataclass(frozen=True)
class Joined:
    """A text of constants, columns and end-of-text tokens."""

    parts: tuple[str | ColumnValue | EndOfText | BeginningOfText, ...]


@dataclass(frozen=True)
class Rendered:
    """The text of turns, written by the chat template; ``tools``: the column of the tools."""

    turns: Any
    tools: ColumnValue | None = None


class _Index:
    """The variable of ``for i in range(len(column))``."""


class _TokenizerValue:
    """The tokenizer, or anything else that is only known when the script runs."""


class _ReadRow(dict[str, Any]):
    """The values of a row that are not the columns of the same names."""

    def __missing__(self, name: str) -> ColumnValue:
        return ColumnValue(name)


def find_row_settings(module: ast.Module) -> dict[str, Any]:
    """Return the keys of the source, as ``format``, ``prompt`` and ``columns.answer``, that read the rows as a script's
    functions do, and ``chat_template: plain`` if these write the text without one.

    Raises:
        Unclear: a function does something that no settings do.
    """
    row = _ReadRow()
    text, field = None, "text"
    for name, call in list_calls(module):
        if name == "map":
            new_row = _Function(module, row).result(_find_argument(call, "function"))
            if not isinstance(new_row, dict):
                raise Unclear("returns no row")
            row.update(new_row)
        elif name == "rename_column":
            old, new = (
                _find_argument(call, word, at) for at, word in enumerate(("original_column_name", "new_column_name"))
            )
            row[_read_constant(new)] = row[_read_constant(old)]
        elif name == "rename_columns":
            mapping = _find_argument(call, "column_mapping")
            if not isinstance(mapping, ast.Dict) or None in mapping.keys:
                raise Unclear(ast.unparse(mapping))
            names = zip(filter(None, mapping.keys), mapping.values, strict=True)
            row.update({_read_constant(new): row[_read_constant(old)] for old, new in names})
        for word in call.keywords:
            if word.arg == "dataset_text_field" and isinstance(word.value, ast.Constant):
                field = str(word.value.value)
        if any(word.arg == "formatting_func" for word in call.keywords):
            function = next(word.value for word in call.keywords if word.arg == "formatting_func")
            text = _Function(module, row).result(function)
            text = text.get("text") if isinstance(text, dict) else text
    return _build_settings(row, row[field] if text is None and field in row else text)


def _build_settings(row: _ReadRow, text: Any) -> dict[str, Any]:
    """Return the settings for the value that is trained on."""
    if text is None:
        turns = next((row[name] for name in _TURNS if name in row), None)
        if turns is None:
            return _rename_columns(row)
        return _convert_turns(turns)
    if isinstance(text, Rendered):
        tools = {} if text.tools in (None, ColumnValue("tools")) else {"columns.tools": text.tools.name}
        return _convert_turns(text.turns) | tools
    return _convert_text(_to_joined(text).parts)


def _rename_columns(row: _ReadRow) -> dict[str, Any]:
    values = {field: _convert_single_turn(field, value) for field, value in row.items()}
    columns = {f"columns.{field}": value.name for field, value in values.items() if isinstance(value, ColumnValue)}
    if len(columns) < len(row):
        raise Unclear(f"makes the columns {', '.join(row)}")
    return columns


_ROLES_OF_PAIRS = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def _convert_single_turn(field: str, value: Any) -> Any:
    """Return the column that is the only turn of a part of a pair, which is read as this turn."""
    match value:
        case [{"role": role, "content": ColumnValue() as column}] if role == _ROLES_OF_PAIRS.get(field):
            return column
    return value


def _convert_turns(turns: Any) -> dict[str, Any]:
    if isinstance(turns, ColumnValue):
        return {} if turns.name in _TURNS else {"columns.messages": turns.name}
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Unclear("renders something else than turns")
    roles = [turn.get("role", turn.get("from")) for turn in turns]
    texts = [_to_joined(turn.get("content", turn.get("value"))).parts for turn in turns]
    settings: dict[str, Any] = {}
    if roles[:1] == ["system"]:
        settings = _convert_system(texts.pop(0))
        roles.pop(0)
    if roles not in (["user", "assistant"], ["human", "gpt"]):
        raise Unclear(f"makes turns of {', '.join(map(str, roles))}")
    question, answer = texts
    return settings | _convert_question(question) | {"columns.answer": _find_only_column(answer)}


def _convert_system(parts: tuple[Any, ...]) -> dict[str, Any]:
    if all(isinstance(part, str) for part in parts):
        return {"system": "".join(parts)} if any(parts) else {}
    return {"columns.system": _find_only_column(parts)}


def _convert_question(parts: tuple[Any, ...]) -> dict[str, Any]:
    if len(parts) == 1 and isinstance(parts[0], ColumnValue) and not parts[0].name.isidentifier():
        return {"columns.question": parts[0].name}
    return {"prompt": _build_prompt(parts)}


def _convert_text(parts: tuple[Any, ...]) -> dict[str, Any]:
    """Return the settings for a text: the last column is the answer, if there is anything before it."""
    ended = parts[-1:] == (EndOfText(),)
    parts = parts[1:] if parts[:1] == (BeginningOfText(),) else parts
    parts = parts[:-1] if ended else parts
    if not parts:
        raise Unclear("writes a text without columns")
    after = parts[-1] if isinstance(parts[-1], str) else ""
    *before, last = parts[:-1] if after else parts
    if not before and not after:
        return {"format": "text", "columns.text": _find_only_column((last,))}
    has_end = not ended and _ENDS.search(after) is not None
    template = "plain" if not after else _PLAIN.format(repr(after), "" if has_end else "{{ eos_token }}")
    prompt = _build_prompt(tuple(before))
    return {"prompt": prompt, "columns.answer": _find_only_column((last,)), "chat_template": template}


# The template plain with more after an answer.
_PLAIN = (
    "{{% for message in messages %}}{{{{ message['content'] }}}}"
    "{{% if message['role'] == 'assistant' %}}{{{{ {} }}}}{}{{% endif %}}{{% endfor %}}"
)
_ENDS = re.compile(r"(?:</s>|<\|(?:im_end|endoftext|eot_id|end_of_text|end|eot)\|>|<end_of_turn>|<eos>)\s*$")


def _build_prompt(parts: tuple[Any, ...]) -> str:
    if not any(isinstance(part, ColumnValue) for part in parts) or {EndOfText(), BeginningOfText()} & set(parts):
        raise Unclear("writes a prompt without columns, or an end of text inside")
    if names := [part.name for part in parts if isinstance(part, ColumnValue) and not part.name.isidentifier()]:
        raise Unclear(f"reads the column {names[0]!r}, which a prompt cannot name")
    return "".join(
        f"{{{part.name}}}" if isinstance(part, ColumnValue) else part.replace("{", "{{").replace("}", "}}")
        for part in parts
    )


def _find_only_column(parts: tuple[Any, ...]) -> str:
    if len(parts) != 1 or not isinstance(parts[0], ColumnValue):
        raise Unclear("writes more around an answer than its column")
    return parts[0].name


def _to_joined(value: Any) -> Joined:
    if isinstance(value, Joined):
        return value
    if isinstance(value, str | ColumnValue | EndOfText | BeginningOfText):
        return Joined((value,))
    raise Unclear("makes something else than a text")


def _concatenate_texts(left: Any, right: Any) -> Joined:
    parts: list[Any] = []
    for part in (*_to_joined(left).parts, *_to_joined(right).parts):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part != "":
            parts.append(part)
    return Joined(tuple(parts))


# Texts in statements that write turns of ShareGPT as those of OpenAI.
_WORDS_OF_TURNS = {
    *("role", "content", "from", "value", "", "human", "user", "gpt", "assistant", "system", "model", "bot")
}


def _is_turn(node: ast.AST, name: str | None) -> bool:
    """Return whether a mapping is a turn, made of the turn of that name; None: of any."""
    match node:
        case ast.Dict(keys=[ast.Constant(value="role"), ast.Constant(value="content")]):
            return name is None or any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
    return False


def _find_appended_list(loop: ast.For, name: str) -> str | None:
    """Return the list to which a loop over turns appends each of them; None if the loop does something else."""
    lists = set()
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="append"), args=[turn]) if _is_turn(
                turn, name
            ):
                lists.add(of)
            case ast.Call(func=ast.Attribute(attr="append")):
                return None
    return lists.pop() if len(lists) == 1 else None


_DEEPEST_CALL = 5


def _is_empty(nodes: list[ast.expr]) -> bool:
    """Return whether a default is the empty text, or none is given."""
    return all(isinstance(node, ast.Constant) and node.value in ("", None) for node in nodes)


def _find_argument(call: ast.Call, name: str, at: int = 0) -> ast.expr:
    arguments = [word.value for word in call.keywords if word.arg == name] or call.args[at : at + 1]
    if not arguments:
        raise Unclear(ast.unparse(call))
    return arguments[0]


def _read_constant(node: ast.expr) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise Unclear(ast.unparse(node))
    return node.value


class _Function:
    """One function of a script, followed with ``row`` as its argument."""

    def __init__(self, module: ast.Module, row: _ReadRow, depth: int = 0) -> None:
        self._module, self._row, self._depth = module, row, depth
        self._names: dict[str, Any] = {}
        self._outside: frozenset[str] = frozenset()  # names that were set before the loop
        self._following: list[str] = []  # names of the module whose values are being looked for

    def result(self, function: ast.expr) -> Any:
        """Return what it returns."""
        if isinstance(function, ast.Lambda) and function.args.args:
            self._names[function.args.args[0].arg] = self._row
            return self._value(function.body)
        definitions = [
            node
            for node in ast.walk(self._module)
            if isinstance(node, ast.FunctionDef) and isinstance(function, ast.Name) and node.name == function.id
        ]
        if len(definitions) != 1 or not definitions[0].args.args:
            raise Unclear(ast.unparse(function))
        first, *extra_arguments = definitions[0].args.args
        self._names = {first.arg: self._row, **{argument.arg: _TokenizerValue() for argument in extra_arguments}}
        return self._run(definitions[0].body)

    def _run(self, body: Iterable[ast.stmt]) -> Any:
        for statement in body:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return self._value(value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._names[name] = self._value(value)
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if name not in self._outside:
                    self._names[name] = _concatenate_texts(self._names.get(name), self._value(value))
                case ast.For(target=ast.Name(id=name), iter=iterated) if list_name := _find_appended_list(
                    statement, name
                ):
                    self._names[list_name] = self._turns(statement.body, self._value(iterated))
                case ast.For(target=target, iter=iterated, body=inner, orelse=[]):
                    self._outside = frozenset(self._names)
                    self._bind(target, self._value(iterated))
                    self._run(inner)
                    self._outside = frozenset()
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value])):
                    if self._names.get(name) != []:
                        raise Unclear(ast.unparse(statement))
                    self._names[name] = self._value(value)  # a list of a batch stands for one of its values
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case _:
                    raise Unclear(ast.unparse(statement).partition("\n")[0])
        return None

    @staticmethod
    def _turns(written: Sequence[ast.AST], column: Any) -> Any:
        """Return the column whose turns are written again with the roles that they are read with in any case."""
        nodes = [node for part in written for node in ast.walk(part)]
        words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        other_types = (ast.Pass, ast.Continue, ast.Break, ast.BinOp, ast.JoinedStr, ast.Dict)
        is_more = sum(isinstance(node, other_types) for node in nodes) > sum(_is_turn(node, None) for node in nodes)
        if is_more or not words <= _WORDS_OF_TURNS or not isinstance(column, ColumnValue):
            raise Unclear(ast.unparse(written[0]).partition("\n")[0])
        return column

    def _bind(self, target: ast.expr, value: Any) -> None:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value if isinstance(value, tuple) and not isinstance(value, ColumnValue) else (value,)
        if len(names) != len(values):
            raise Unclear(ast.unparse(target))
        for name, item in zip(names, values, strict=True):
            if not isinstance(name, ast.Name):
                raise Unclear(ast.unparse(target))
            self._names[name.id] = item

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() as text):
                return text
            case ast.Name(id=name):
                return self._names[name] if name in self._names else self._evaluate_module_name(name)
            case ast.Attribute(attr="eos_token"):
                return EndOfText()
            case ast.Attribute(attr="bos_token"):
                return BeginningOfText()
            case ast.JoinedStr(values=values):
                return self._sum(values)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _concatenate_texts(self._value(left), self._value(right))
            case ast.Subscript(value=value, slice=index):
                return self._evaluate_item(self._value(value), index, node)
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return {key.value: self._value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
            case ast.List(elts=[ast.List() as turns]):
                return self._value(turns)  # of a batch of one
            case ast.List(elts=items):
                return [self._value(item) for item in items]
            case ast.ListComp(
                elt=ast.Dict() as turn, generators=[ast.comprehension(target=ast.Name(id=name), iter=iterated, ifs=[])]
            ) if _is_turn(turn, name):
                return self._turns([turn], self._value(iterated))
            case ast.ListComp(elt=element, generators=[ast.comprehension(target=target, iter=iterated, ifs=[])]):
                self._bind(target, self._value(iterated))
                return self._value(element)
            case ast.Call():
                return self._called(node)
        raise Unclear(ast.unparse(node))

    def _sum(self, nodes: Iterable[ast.expr]) -> Joined:
        total = Joined(())
        for node in nodes:
            total = _concatenate_texts(total, self._value(node))
        return total

    def _evaluate_item(self, value: Any, index: ast.expr, node: ast.expr) -> Any:
        if isinstance(value, dict) and isinstance(index, ast.Constant) and isinstance(index.value, str):
            return value[index.value]
        if isinstance(index, ast.Name) and isinstance(self._names.get(index.id), _Index):
            return value
        raise Unclear(ast.unparse(node))

    def _evaluate_module_name(self, name: str) -> Any:
        """Return the value that the module gives a name once."""
        values = [
            node.value
            for node in ast.walk(self._module)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        ]
        if len({ast.dump(value) for value in values}) != 1 or name in self._following:
            return _TokenizerValue()
        self._following.append(name)
        try:
            return self._value(values[0])
        except Unclear:
            return _TokenizerValue()
        finally:
            self._following.remove(name)

    def _called(self, call: ast.Call) -> Any:
        match call.func:
            case ast.Name(id="zip"):
                return tuple(self._value(argument) for argument in call.args)
            case ast.Name(id="range") if len(call.args) == 1 and ast.unparse(call.args[0]).startswith("len("):
                return _Index()
            case ast.Name(id="str") if len(call.args) == 1:
                return self._value(call.args[0])
            case ast.Name(id=name) if call.args and name in self._functions():
                return self._evaluate_function(self._functions()[name], call)
            case ast.Attribute(value=ast.Name(id=name), attr="get") if self._names.get(name) is self._row:
                return (
                    self._row[_read_constant(call.args[0])] if _is_empty(call.args[1:]) else self._refuse_unclear(call)
                )
            case ast.Attribute(attr="apply_chat_template"):
                return self._evaluate_rendering(call)
            case ast.Attribute(value=text, attr="format"):
                return self._format_text(self._value(text), call)
            case ast.Attribute(value=text, attr="removeprefix" | "strip" as name):
                # These change no more than what training adds or leaves out by itself, of rendered turns and of texts.
                value = self._value(text)
                if isinstance(value, Rendered) or (name == "strip" and isinstance(value, ColumnValue)):
                    return value
        raise Unclear(ast.unparse(call))

    def _functions(self) -> dict[str, ast.FunctionDef]:
        """Return the functions of the script by their names, without those that it defines twice."""
        definitions = [node for node in ast.walk(self._module) if isinstance(node, ast.FunctionDef)]
        counts = Counter(node.name for node in definitions)
        return {node.name: node for node in definitions if counts[node.name] == 1}

    def _evaluate_function(self, function: ast.FunctionDef, call: ast.Call) -> Any:
        """Return what a function of the script returns for the arguments of a call."""
        if self._depth == _DEEPEST_CALL or function.args.vararg or function.args.kwarg:
            raise Unclear(ast.unparse(call))
        inner = _Function(self._module, self._row, self._depth + 1)
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        pairs = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords if word.arg)]
        inner._names = dict.fromkeys(names, _TokenizerValue())
        for name, node in pairs:
            try:
                inner._names[name] = self._value(node)
            except Unclear:
                inner._names[name] = _TokenizerValue()
        return inner._run(function.body)

    @staticmethod
    def _refuse_unclear(node: ast.expr) -> Any:
        raise Unclear(ast.unparse(node))

    def _evaluate_rendering(self, call: ast.Call) -> Rendered:
        turns = self._value(_find_argument(call, "conversation"))
        options = {word.arg: word.value for word in call.keywords if word.arg != "conversation"}
        tools = self._value(options.pop("tools")) if "tools" in options else None
        off = ("tokenize", "add_generation_prompt")
        if any(
            name not in off or not isinstance(value, ast.Constant) or value.value is not False
            for name, value in options.items()
        ):
            raise Unclear(ast.unparse(call))
        if not isinstance(tools, ColumnValue | None):
            raise Unclear(ast.unparse(call))
        return Rendered(turns, tools)

    def _format_text(self, text: Any, call: ast.Call) -> Joined:
        if not isinstance(text, str):
            raise Unclear(ast.unparse(call))
        positions = [self._value(argument) for argument in call.args]
        names = {word.arg: self._value(word.value) for word in call.keywords if word.arg}
        total, counter = Joined(()), count()
        try:
            for constant, name, spec, conversion in Formatter().parse(text):
                total = _concatenate_texts(total, constant)
                if spec or conversion:
                    raise Unclear(ast.unparse(call))
                if name is not None:
                    value = names[name] if name in names else positions[int(name) if name else next(counter)]
                    total = _concatenate_texts(total, value)
        except (ValueError, IndexError):  # no format, or another number of arguments
            raise Unclear(ast.unparse(call)) from None
        return total
