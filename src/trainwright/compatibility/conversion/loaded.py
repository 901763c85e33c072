"""Files that a script loads: its settings, which become values, and its rows, which become a source.

Loaded settings are replaced by what is in their file, as if the script had it written out. ``Dataset.from_list`` of
rows that are loaded from a file and not changed becomes ``Dataset.from_json`` of that file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.recipe.yaml_text import parse_mapping

_OF_OPEN_FILES = ("yaml.safe_load", "yaml.full_load", "yaml.load", "json.load", "json.loads")
_OF_PATHS = ("OmegaConf.load",)
_OF_SETTINGS = ("yaml.safe_load", "yaml.full_load", "yaml.load", "OmegaConf.load")
_LARGEST = 2**20  # bytes of settings
ABSENT = "settings_that_are_not_there"  # a call of it is in the place of settings whose file is not there
# Calls that look at rows, and leave them as they are.
_LOOKING = re.compile(r"len|print|type|(?:\w+\.)?from_list|(?:logger|logging|log)\.\w+")

Value = Callable[[ast.AST], Any]


def add_imported_functions(module: ast.Module, path: Path, parse: Callable[[Path], ast.Module]) -> ast.Module:
    """Add the functions to a script that it imports from a file beside it, or above, and that load settings or rows."""
    for node in list(ast.walk(module)):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        part = Path(*node.module.split(".")).with_suffix(".py")
        file = next((folder / part for folder in path.absolute().parents[:3] if (folder / part).is_file()), None)
        if file is None:
            continue
        names = {alias.name for alias in node.names}
        with suppress(RequestError):  # what is not readable says nothing
            functions = [item for item in parse(file).body if isinstance(item, ast.FunctionDef) and item.name in names]
            module.body += [function for function in functions if _is_loader(function)]
    return module


def _is_loader(function: ast.FunctionDef) -> bool:
    calls = (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(name in (*_OF_OPEN_FILES, *_OF_PATHS) for name in calls)


def replace_loaded_files(
    module: ast.Module, value: Value, follow: Callable[[ast.expr], ast.expr], find: Callable[[str], Path | None]
) -> ast.Module:
    """Replace in a script what loads settings and rows.

    Args:
        value: returns the value of an expression, a ``str`` itself if it is a known text.
        follow: returns the expression that a name is set to.
        find: returns where a file is that the script names.
    """
    return ast.fix_missing_locations(_Replaced(module, value, follow, find).visit(module))


class _Replaced(ast.NodeTransformer):
    def __init__(
        self,
        module: ast.Module,
        value: Value,
        follow: Callable[[ast.expr], ast.expr],
        find: Callable[[str], Path | None],
    ) -> None:
        self._value, self._follow, self._find = value, follow, find
        self._files = dict(_iterate_opened(module))  # by the id of the name of an open file
        self._functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
        self._rows = dict(self._unchanged(module))  # by name, the path of their file

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_from_list(node) and (path := self._look_up_path(node.args[0])) is not None:
            assert isinstance(node.func, ast.Attribute)
            return ast.copy_location(
                ast.Call(ast.Attribute(node.func.value, "from_json", ast.Load()), [path], []), node
            )
        settings = self._settings(node)
        if settings is not None:
            return ast.copy_location(settings, node)
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        first = node.values[0]
        is_filled = isinstance(first, ast.Dict) and bool(first.keys)
        return first if isinstance(node.op, ast.Or) and is_filled else node  # safe_load(file) or {}

    def _settings(self, node: ast.Call) -> ast.expr | None:
        """Return the mapping in the file that a call loads, or None if it loads none."""
        path = _find_loaded_file(node, self._files)
        name = None if path is None else self._value(path)
        file = self._find(name) if type(name) is str else None
        if file is None and path is not None and ast.unparse(node.func) in _OF_SETTINGS:
            text = name if type(name) is str else ast.unparse(self._follow(path))
            return ast.Call(ast.Name(ABSENT, ast.Load()), [ast.Constant(text)], [])
        if file is None or file.suffix not in (".yaml", ".yml", ".json"):
            return None
        try:
            values = parse_mapping(read_text(file, _LARGEST), str(file)).values
            return ast.parse(repr(values), mode="eval").body
        except (RequestError, SyntaxError, RecursionError, MemoryError):  # rows, dates and the like
            return None

    def _look_up_path(self, rows: ast.expr) -> ast.expr | None:
        return self._rows.get(rows.id) if isinstance(rows, ast.Name) else self._find_rows_path(rows)

    def _unchanged(self, module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
        """Yield the names of rows that are loaded once and not changed, with the path of their file."""
        above = {id(inner): node for node in ast.walk(module) for inner in ast.iter_child_nodes(node)}
        names: dict[str, list[ast.Name]] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.Name):
                names.setdefault(node.id, []).append(node)
        for node in ast.walk(module):
            match node:
                case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                    path = self._find_rows_path(value)
                    uses = [use for use in names[name] if use is not target]
                    if path is not None and all(_is_look(use, above) for use in uses):
                        yield name, path

    def _find_rows_path(self, node: ast.expr) -> ast.expr | None:
        """Return the path of the file whose rows an expression is, each as it is in the file."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=[path], keywords=[]) if name in self._functions:
                return path if _is_row_loader(self._functions[name], self._files) else None
            case ast.Call():
                return _find_loaded_file(node, self._files)
            case ast.ListComp(elt=ast.Call() as call, generators=[ast.comprehension(iter=lines, ifs=conditions)]):
                is_each = _is_line_of_json(call) and all(_is_line(condition) for condition in conditions)
                return _find_lines_path(lines, self._files) if is_each else None
        return None


def _iterate_opened(module: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Yield the ids of the uses of open files, ``f`` in ``with open(path) as f``, with their paths."""
    for node in ast.walk(module):
        for item in node.items if isinstance(node, ast.With) else ():
            path = _find_opened_path(item.context_expr)
            if path is not None and isinstance(item.optional_vars, ast.Name):
                inside = (name for name in ast.walk(node) if isinstance(name, ast.Name))
                yield from ((id(name), path) for name in inside if name.id == item.optional_vars.id)


def _find_opened_path(node: ast.expr) -> ast.expr | None:
    match node:
        case ast.Call(func=ast.Name(id="open"), args=[path, *_]):
            return path
        case ast.Call(func=ast.Attribute(value=path, attr="open" | "read_text")):
            return path
    return None


def _find_loaded_file(call: ast.Call, files: dict[int, ast.expr]) -> ast.expr | None:
    """Return the path of the file that a call loads as YAML or JSON."""
    name = ast.unparse(call.func)
    if not call.args or name not in (*_OF_OPEN_FILES, *_OF_PATHS):
        return None
    file = call.args[0]
    return file if name in _OF_PATHS else files.get(id(file), _find_opened_path(file))


def _find_lines_path(lines: ast.expr, files: dict[int, ast.expr]) -> ast.expr | None:
    match lines:
        case ast.Call(func=ast.Attribute(value=file, attr="readlines" | "splitlines")):
            return files.get(id(file), _find_opened_path(file))
    return files.get(id(lines), _find_opened_path(lines))


def _is_line(node: ast.expr) -> bool:
    """Return whether an expression is a line of a file, perhaps without the white space around it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("strip", "rstrip"):
        node = node.func.value
    return isinstance(node, ast.Name)


def _is_line_of_json(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "json.loads" and len(call.args) == 1 and _is_line(call.args[0])


def _is_row_loader(function: ast.FunctionDef, files: dict[int, ast.expr]) -> bool:
    """Return whether a function of a path does nothing but load the rows of its file."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) in ("json.load", "json.loads")]
    results = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    paths = [path for node in ast.walk(function) if (path := files.get(id(node))) is not None]
    allowed_calls = re.compile(r"json\.loads?|open|\w+\.(?:open|append|strip|rstrip|readlines)|print")
    return (
        len(function.args.args) == len(loads) == len(results) == 1
        and (_is_line_of_json(loads[0]) or ast.unparse(loads[0].func) == "json.load")
        and bool(paths)
        and all(isinstance(path, ast.Name) and path.id == function.args.args[0].arg for path in paths)
        and all(allowed_calls.fullmatch(ast.unparse(call.func)) for call in calls)
        and not any(isinstance(node, ast.Subscript | ast.Dict | ast.Compare | ast.Break) for node in ast.walk(function))
    )


def _is_from_list(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "from_list" and len(node.args) == 1


def _is_look(name: ast.Name, above: dict[int, ast.AST]) -> bool:
    """Return whether the use of a name changes nothing of its rows."""
    node = above[id(name)]
    if isinstance(node, ast.Subscript) and node.value is name and isinstance(node.slice, ast.Constant):
        node = above[id(node)]
    is_call = isinstance(node, ast.Call) and _LOOKING.fullmatch(ast.unparse(node.func)) is not None
    return is_call or isinstance(node, ast.FormattedValue)
