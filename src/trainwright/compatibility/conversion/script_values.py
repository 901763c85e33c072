"""Values of names and expressions in a script, as far as it writes them. Nothing in a script is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from trainwright.compatibility.conversion.loaded import ABSENT

# Of what a file may compute, so that no file takes long or much memory.
_LONGEST_CHAIN, _LARGEST_NUMBER, _LONGEST_TEXT = 16, 1e15, 10_000
# Methods of lists and mappings that change them.
_CHANGES = ("update", "setdefault", "pop", "append", "extend", "insert", "remove", "clear")


class Code(str):
    """An expression of a script, whose value is only known when it runs."""


def is_absent(value: Any) -> bool:
    """Return whether a value is in a file of settings that is not there."""
    return isinstance(value, Code) and value.startswith(f"{ABSENT}(")


class Constants:
    """The values of names and attributes that a script sets to one value, and of expressions of them.

    Of attributes the objects are not told apart: an argument of the command, a field of a class and ``self.rate`` have
    the value that is set where they are defined. Arguments of functions and commands have their defaults.
    """

    def __init__(self, module: ast.Module) -> None:
        self._nodes: dict[str, list[ast.expr | None]] = {}  # by name, and by .attribute; None: any value
        self._following: list[str] = []
        self._values: dict[str, Any] = {}
        in_classes = {id(item) for node in ast.walk(module) if isinstance(node, ast.ClassDef) for item in node.body}
        self._returned = dict(iterate_returned(module))
        parameters = dict(iterate_parameters(module))
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        called_names = {find_last_name(call.func) for call in calls}
        for node in ast.walk(module):
            is_called = isinstance(node, ast.FunctionDef) and node.name in called_names
            for name, value in _iterate_bindings(node):
                if value is None and is_called and name != "self":
                    continue  # what its calls pass
                self._nodes.setdefault(f".{name}" if id(node) in in_classes else name, []).append(value)
        for call in calls:
            for name, value in iterate_passed(call, parameters.get(find_last_name(call.func), [])):
                if not (isinstance(value, ast.Name) and value.id == name):
                    self._nodes.setdefault(name, []).append(value)

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression of constants; ``Code`` for others."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._evaluate_name(name, node)
            case ast.Attribute(value=inner, attr=name) if isinstance(values := self._build_mapping(inner), dict):
                return values.get(name, Code(ast.unparse(node)))
            case ast.Attribute(value=inner) if is_absent(values := self._build_mapping(inner)):
                return values
            case ast.Attribute(value=ast.Name(), attr=name):
                return self._evaluate_name(f".{name}", node)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return {key.value: self.value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._look_up_in_mapping(inner, key, node)
            case ast.JoinedStr(values=parts):
                texts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in parts]
                is_computed = any(isinstance(text, Code) for text in texts)
                return Code(ast.unparse(node)) if is_computed else "".join(map(str, texts))
            case ast.Call(func=ast.Name(id="str" | "int" | "float" | "Path" as kind), args=[inner], keywords=[]):
                return self._convert_value(kind, inner, node)
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=key), *default]) if (
                ast.unparse(inner) != "os.environ"
            ):
                values = self.value(inner)
                if is_absent(values):
                    return values
                if isinstance(values, dict):
                    return values[key] if key in values else self.value(default[0]) if default else None
            case ast.Call(func=function, args=[_, default]) if ast.unparse(function) in ("os.getenv", "os.environ.get"):
                return self.value(default)
            case ast.Call(func=ast.Name(id="field"), keywords=words):
                defaults = [word.value for word in words if word.arg == "default"]
                return self.value(defaults[0]) if defaults else Code(ast.unparse(node))
            case ast.Call(func=ast.Name(id="range"), args=[*bounds], keywords=[]):
                return Code(f"range({', '.join(str(self._evaluate_bound(bound)) for bound in bounds)})")
            case ast.Call(func=ast.Name(id=name)) if name in self._returned:
                return self.value(self._returned[name])
            case ast.IfExp(test=test, body=body, orelse=other):
                choice = self.value(test)
                return Code(ast.unparse(node)) if isinstance(choice, Code) else self.value(body if choice else other)
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
                value = self.value(operand)
                if isinstance(value, int | float):
                    return -value if isinstance(sign, ast.USub) else not value
            case ast.BinOp(left=left, op=operator, right=right):
                return self._computed(self.value(left), operator, self.value(right), node)
        return Code(ast.unparse(node))

    def find_expression(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name is set to, if it is set once."""
        for _ in range(_LONGEST_CHAIN):
            nodes = self._nodes.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(nodes) != 1 or nodes[0] is None:
                break
            node = nodes[0]
        return node

    def _evaluate_bound(self, bound: ast.expr) -> Any:
        """Return a bound; of ``min(n, len(rows))`` n, as there is no row after the last."""
        if isinstance(bound, ast.Call) and ast.unparse(bound.func) == "min":
            numbers = [value for value in map(self.value, bound.args) if isinstance(value, int)]
            if len(numbers) == 1:
                return numbers[0]
        return self.value(bound)

    def _evaluate_name(self, name: str, node: ast.AST) -> Any:
        nodes = self._nodes.get(name, [None])
        if None in nodes or name in self._following or len(self._following) >= _LONGEST_CHAIN:
            return Code(ast.unparse(node))
        if name not in self._values:
            self._following.append(name)
            try:
                self._values[name] = [self.value(candidate) for candidate in nodes if candidate is not None]
            finally:
                self._following.remove(name)
        values = self._values[name]
        is_one = all(value == values[0] and type(value) is type(values[0]) for value in values)
        # An expression about what the device supports stays one: it decides the precision.
        is_known = is_one and (not isinstance(values[0], Code) or "supported" in values[0] or is_absent(values[0]))
        return values[0] if is_known else Code(ast.unparse(node))

    def _build_mapping(self, node: ast.expr) -> Any:
        """Return the value of settings whose keys are read as attributes, as those of OmegaConf."""
        return self.value(node) if isinstance(node, ast.Name | ast.Attribute) else None

    def _look_up_in_mapping(self, mapping: ast.expr, key: Any, node: ast.AST) -> Any:
        values = self.value(mapping)
        if is_absent(values):
            return values
        return values[key] if isinstance(values, dict) and key in values else Code(ast.unparse(node))

    def _convert_value(self, kind: str, inner: ast.expr, node: ast.AST) -> Any:
        value = self.value(inner)
        if is_absent(value):
            return value
        if isinstance(value, Code) or not isinstance(value, str | int | float):
            return Code(ast.unparse(node))
        try:
            return {"int": int, "float": float}.get(kind, str)(value)
        except ValueError:
            return Code(ast.unparse(node))

    @staticmethod
    def _computed(left: Any, operator: ast.operator, right: Any, node: ast.AST) -> Any:
        numbers = all(isinstance(side, int | float) and abs(side) < _LARGEST_NUMBER for side in (left, right))
        texts = all(
            isinstance(side, str) and not isinstance(side, Code) and len(side) < _LONGEST_TEXT for side in (left, right)
        )
        match operator:
            case ast.Add() if numbers or texts:
                return left + right
            case ast.Sub() if numbers:
                return left - right
            case ast.Mult() if numbers:
                return left * right
            case ast.Div() if numbers and right:
                return left / right
            case ast.FloorDiv() if numbers and right:
                return left // right
        return Code(ast.unparse(node))


def iterate_parameters(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield functions and classes of a script with the names that their arguments get: fields are ``.attribute``s."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            names = [name.arg for name in (*node.args.posonlyargs, *node.args.args)]
            yield node.name, [*names[names[:1] == ["self"] :], *(name.arg for name in node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            fields = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
            yield node.name, [f".{field.id}" for field in fields if isinstance(field, ast.Name)]


def iterate_returned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the functions of a script that return one expression in any case, with that expression."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if len(results) == 1 and results[0] is not None and sum(item.name == function.name for item in functions) == 1:
            yield function.name, results[0]


def iterate_passed(call: ast.Call, parameters: list[str]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield what a call of the script's own functions and classes passes; with values that are unpacked, anything."""
    if not parameters:
        return
    if any(word.arg is None for word in call.keywords) or any(isinstance(value, ast.Starred) for value in call.args):
        yield from ((name, None) for name in parameters)
        return
    yield from zip(parameters, call.args, strict=False)
    words = {word.arg: word.value for word in call.keywords}
    yield from ((name, words[name.lstrip(".")]) for name in parameters if name.lstrip(".") in words)


def find_last_name(node: ast.AST) -> str:
    """Return a name, or the last part of an attribute; an empty text for other expressions."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _iterate_bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a node sets, and ``.attribute``s, with their values; None if they are others."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _iterate_bound(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _iterate_bound(target, value)
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
            yield from _iterate_bound(target, None)
        case ast.FunctionDef(args=arguments):
            names = [*arguments.posonlyargs, *arguments.args]
            defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
            yield from ((name.arg, value) for name, value in zip(names, [*defaults, *arguments.defaults], strict=True))
            yield from (
                (name.arg, value) for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            )
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _CHANGES:
            yield name, None
        case ast.Call() if (option := find_option(node)) is not None:
            words = {word.arg: word.value for word in node.keywords}
            action = ast.unparse(words["action"]) if "action" in words else ""
            is_flag = action in ("'store_true'", "'store_false'")
            yield f".{option}", words.get("default", ast.Constant(action == "'store_false'") if is_flag else None)


def _iterate_bound(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    match target:
        case ast.Name(id=name):
            yield name, value
        case ast.Attribute(attr=name):
            yield f".{name}", value
        case ast.Subscript(value=inner):
            yield from _iterate_bound(inner, None)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            for item in items:
                yield from _iterate_bound(item, None)


def find_option(node: ast.AST) -> str | None:
    """Return the name of the option that ``add_argument`` gives a command."""
    match node:
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str() as flag)]):
            names = [
                word.value.value
                for word in node.keywords
                if word.arg == "dest" and isinstance(word.value, ast.Constant)
            ]
            return str(names[0] if names else flag.lstrip("-").replace("-", "_"))
    return None
