"""Convert YAML to plain values and back, keeping the line of every key.

Numbers and booleans follow YAML 1.2: ``2e-4`` is a number (text in YAML 1.1), ``no`` and ``on`` are text, and there are
no dates or base-60 numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainwright.errors import RequestError
from trainwright.recipe.files import DEEPEST

KeyPath = tuple[str | int, ...]

_MAX_VALUES = 50_000  # which take seconds to read
# Values that aliases may add to the written ones. An alias repeats its content, so nested aliases multiply.
_MAX_REPEATED = 10_000


class Origin(NamedTuple):
    """Where a value was written: a file and its line, or an override (without a line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Problem(NamedTuple):
    """A problem that the user has to fix, and its place."""

    origin: Origin
    message: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


@dataclass
class Tree:
    """A mapping read from YAML, with the place of each key and the problems of the text.

    ``file``: the file it was read from; None for values from no file.
    """

    values: dict[Any, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    file: Path | None = None

    def __str__(self) -> str:
        """Return its name in messages."""
        return "recipe" if self.file is None else str(self.file)


def parse_mapping(text: str, source: str, *, max_values: int = _MAX_VALUES, has_aliases: bool = True) -> Tree:
    """Read the single YAML mapping in ``text``; ``source`` names it in messages.

    Args:
        max_values: keys and values.
        has_aliases: whether values may be repeated by aliases.

    Raises RequestError, with the line, if the text is empty, not YAML or not a mapping. Duplicate keys are added to
    ``problems``, and the later one is used.
    """
    loader, node = _compose(text, source, first_line=True, max_values=max_values)
    if node is None or node.tag == "tag:yaml.org,2002:null":
        raise RequestError(f"{source}: is empty; a recipe has at least task, model and data")
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise RequestError(f"{source}:{line}: a recipe is a mapping, 'key: value' on each line")
    tree = Tree()
    builder = _Builder(loader, source, tree, has_lines=True)
    builder.max_repeated = _MAX_REPEATED if has_aliases else 0
    tree.values = builder.build(node, ())
    return tree


def parse_value(text: str, source: str, path: KeyPath) -> tuple[Any, Tree]:
    """Read one YAML value for ``path``; the returned tree has its origins and problems, but no values.

    Raises RequestError if the text is not YAML.
    """
    loader, node = _compose(text, source, first_line=False)
    tree = Tree()
    value = _Builder(loader, source, tree, has_lines=False).build(node, path) if node is not None else None
    return value, tree


def to_yaml(values: object) -> str:
    """Return YAML text with the keys in order, which all YAML readers read alike."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=float("inf")
    )


def quote_flow_text(value: str) -> str:
    """Return a text as it is written between the braces or brackets of YAML: in quotes where it needs them."""
    return value if re.fullmatch(r"[\w./-]+", value) else json.dumps(value, ensure_ascii=False)


def _compose(
    text: str, source: str, first_line: bool, max_values: int = _MAX_VALUES
) -> tuple[_Loader, yaml.Node | None]:
    try:
        loader = _Loader(text)
        loader.max_values = max_values
        return loader, loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RequestError(f"{source}:{line}: character {error.character!r} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        line, reason = _describe_error(text.splitlines() or [""], error)
        raise RequestError(f"{source}:{line + 1}: {reason}" if first_line else f"{source}: {reason}") from None


_MISSING_SPACE = re.compile(r"\s*(?:- )?([A-Za-z_][\w.]*):([^\s/:'\"\[\]{}]\S*)(?=\s|$)")
_TWO_KEYS = re.compile(r"\s*(?:- )?([^\s'\"#]+): +([^'\"#\[{|>]*?: .*)")


def _describe_error(lines: list[str], error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Return the line, counted from 0, and what is wrong with it."""
    mark, problem = error.problem_mark or error.context_mark, str(error.problem)
    index = min(mark.line, len(lines) - 1) if mark is not None else 0
    if "'\\t'" in problem:
        return index, "a tab where YAML wants spaces; replace it with spaces"
    start = min(error.context_mark.line, len(lines) - 1) if error.context_mark is not None else index
    if "quoted scalar" in str(error.context) and "unexpected" in problem:
        return start, "the quote that begins here is not closed; close it"
    if "flow" in str(error.context) and problem.endswith("'<stream end>'"):
        return start, "the bracket that begins here, or one before it, is not closed"
    if problem.startswith("expected ',' or"):
        return index, f"a comma is missing, or the bracket of line {start + 1} is not closed"
    if "cannot start any token" in problem or "undefined alias" in problem:
        return index, f"{_shorten_line(lines[index])}: text that begins with a special character needs quotes"
    if problem.startswith("sequence entries"):
        key, _, item = lines[index].strip().partition(": ")
        return (
            index,
            f"a list does not begin behind its key; write {key}: [{item.removeprefix('- ')}], or one item a line",
        )
    before = [n for n in range(index) if lines[n].strip() and not lines[n].lstrip().startswith("#")]
    if "':'" in problem or problem.startswith("mapping values"):
        for n in (index, *before[-1:]):
            if match := _MISSING_SPACE.match(lines[n]):
                return n, f"{match[0].strip()}: a space is missing after the colon; write {match[1]}: {match[2]}"
        if match := _TWO_KEYS.match(lines[index]):
            return index, f"{match[1]}: has two keys on one line; give each a line, or put text with a colon in quotes"
    if "block" in f"{error.context} {problem}" or problem.startswith("mapping values"):
        return index, _describe_indentation(lines, index, before)
    return index, f"not valid YAML: {' '.join(filter(None, (error.context, problem)))}"


def _describe_indentation(lines: list[str], index: int, before: list[int]) -> str:
    """Return what is wrong with the indentation of a line, by those ``before`` it that are in the same block."""
    key, indent = _extract_key(lines[index]), _count_indent(lines[index])
    is_item = key.startswith("-")
    beside = [n for n in before if lines[n].lstrip().startswith("-") == is_item and lines[n].strip() != "---"]
    if is_item and not (beside and beside[-1] == before[-1]):
        return (
            f"{key}: a list item, with {_format_spaces(indent)} before it, is under no key; indent it below the key "
            "of its "
            "list"
        )
    if not beside:
        return (
            f"{key}: the indentation, {_format_spaces(indent)}, fits no line above; indent it like the keys beside it"
        )
    near = beside[-1]
    than = "more" if indent > _count_indent(lines[near]) else "less"
    return (
        f"{key}: has {than} indentation ({_format_spaces(indent)}) than {_extract_key(lines[near])} on line "
        f"{near + 1} "
        f"({_format_spaces(_count_indent(lines[near]))}); indent both alike"
    )


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _format_spaces(count: int) -> str:
    return f"{count} space{'s' * (count != 1)}"


def _shorten_line(line: str) -> str:
    """Return a line, without its end if it is long."""
    text = line.strip()
    return text if len(text) < 60 else f"{text[:57]}..."


def _extract_key(line: str) -> str:
    text = _shorten_line(line)
    return text if text.startswith("-") else text.partition(":")[0]


class _Builder:
    """Convert composed nodes to values; PyYAML's own constructor would drop lines and duplicates."""

    def __init__(self, loader: _Loader, source: str, tree: Tree, has_lines: bool) -> None:
        self.loader, self.source, self.tree, self.has_lines = loader, source, tree, has_lines
        self.open: set[int] = set()
        self.seen: set[int] = set()
        self.repeated, self.max_repeated = 0, _MAX_REPEATED

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS[type(node)]:
            raise RequestError(f"{self._origin(node)}: YAML tag {node.tag!r} is not supported; remove it")
        self._count(node)
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node)
        if id(node) in self.open:
            raise RequestError(f"{self._origin(node)}: recursive YAML alias")
        if len(self.open) == DEEPEST:
            raise RequestError(f"{self._origin(node)}: not valid YAML: nested more than {DEEPEST} deep by aliases")
        self.open.add(id(node))
        value = (
            self._build_mapping(node, path) if isinstance(node, yaml.MappingNode) else self._build_sequence(node, path)
        )
        self.open.remove(id(node))
        return value

    def _count(self, node: yaml.Node) -> None:
        if id(node) not in self.seen:
            self.seen.add(id(node))
            return
        self.repeated += 1
        if self.repeated > self.max_repeated:
            raise RequestError(
                f"{self._origin(node)}: YAML aliases repeat more than {self.max_repeated:,} values; write them out or "
                "remove them"
            )

    def _build_scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self.loader.construct_object(node)
        except (yaml.MarkedYAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or error
            raise RequestError(f"{self._origin(node)}: not valid YAML: {reason}") from None

    def _build_sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        values = []
        for index, item in enumerate(node.value):
            self.tree.origins[*path, index] = self._origin(item)
            values.append(self.build(item, (*path, index)))
        return values

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            origin = self._origin(key_node)
            key = self.build(key_node, path)
            if not isinstance(key, str | int):
                raise RequestError(f"{origin}: a key must be a name")
            key_path = (*path, key)
            if key in values:
                message = (
                    f"{format_key_path(key_path)}: given twice, first {self._earlier(key_path)}; keep one of the two"
                )
                self.tree.problems.append(Problem(origin, message))
            self.tree.origins[key_path] = origin
            values[key] = self.build(value_node, key_path)
        return values

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1 if self.has_lines else None)

    def _earlier(self, key_path: KeyPath) -> str:
        line = self.tree.origins[key_path].line
        return f"on line {line}" if line is not None else "in the same value"


def format_key_path(path: KeyPath) -> str:
    """Return a path in the form that users write: ``train.max_steps``, ``evaluate.prompts[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) and text else f".{part}" if text else str(part)
    return text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    depth = values = 0
    max_values = _MAX_VALUES

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node with limits on size and depth; the base class has none but Python's own stack."""
        self.depth += 1
        self.values += 1
        problem = f"nested more than {DEEPEST} deep" if self.depth > DEEPEST else None
        if self.values > self.max_values:
            problem = f"more than {self.max_values:,} keys and values"
        if problem is not None:
            raise yaml.composer.ComposerError(problem=problem, problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    # Also keeps YAML 1.1's resolvers, so that text such as `no` is quoted for readers that follow it.
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


_FLOAT = re.compile(
    r"""^(?: [-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?   # 1.  1.5  1.5e-3
          | [-+]?\.\d[\d_]*(?:[eE][-+]?\d+)?           # .5  .5e3
          | [-+]?\d[\d_]*[eE][-+]?\d+                   # 2e-4
          | [-+]?\.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN) )$""",
    re.VERBOSE,
)
_BLANK_END = re.compile(r"(^|[\n\x85\u2028\u2029])\n\Z")
_SCALARS = {
    "null": (re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}
_TAGS: dict[type[yaml.Node], set[str]] = {
    yaml.ScalarNode: {"str", *_SCALARS},
    yaml.SequenceNode: {"seq"},
    yaml.MappingNode: {"map"},
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A block that keeps trailing blank lines is open: PyYAML closes the whole document after it.
    style = ('"' if _BLANK_END.search(text) else "|") if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_tuple(dumper: yaml.SafeDumper, values: tuple[Any, ...]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, _represent_tuple)


def iterate_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree by key, such as ``train.max_steps``."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from iterate_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
