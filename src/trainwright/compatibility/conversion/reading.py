"""Read a configuration of another tool as one mapping of its keys: YAML, JSON, a command, a script (scripts.py), or one
of these in a code block of a Markdown file.

Nothing in a file is executed.

Configurations of Hydra are composed, and interpolations replaced, as documented by Hydra 1.3 and OmegaConf 2.3:
defaults lists (groups, ``override``, packages, ``_self_``), ``@package``, and interpolations of keys. Resolvers such as
``${oc.env:…}`` are left as they are.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from os.path import normpath
from pathlib import Path
from typing import Any

from trainwright.compatibility.conversion.scripts import Code, near, put, text_of, tree_of
from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, parse_mapping, parse_value

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch", ".bash", ".py", ".ipynb")
LAUNCHER = "launcher"  # the key with the options of the launcher of a command

_PROGRAMS = re.compile(
    r"(?:^|/)(?:trl|llamafactory-cli|lmf|axolotl|tune)$|\baxolotl\.cli\.train$|"
    r"(?:^|/)[\w.-]*(?:sft|dpo|kto|orpo|cpo|simpo|reward|grpo|run_|train|tun|lora|unsloth-cli)[\w.-]*\.py$"
)
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3", "llamafactory-cli", "trl", "axolotl", "tune")
_LOSSES = ("sft", "dpo", "kto", "orpo", "cpo", "simpo", "reward", "grpo")  # in names of programs
_WORDS = ("train", "launch", "run", *_LOSSES)  # of programs' commands
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+(?:\[@\])?)(?::?-([^}]{0,300}))?\})")
_COMMENT = re.compile(r"(^|\s)#.*")
_OF_SHELL, _FOR_HYDRA = re.compile(r"\$\{?(\w+)\}?"), r"${shell.\1}"
_ARRAY = re.compile(r"^\s*(?:declare\s+-a\s+|local\s+|export\s+)?(\w+)(\+?)=\((.*)$")
_TEXT = re.compile(r"^\s*(?:local\s+|export\s+)?(\w+)=\"([^\"]*)$")  # that ends on another line
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;$`(]*)\s*(?:#.*)?$")
_FILES = ("config", "config_file")
_HERE = re.compile(r"<<(-?)\s*(['\"\\]?)(\w+)")  # a here-document, and the file that it is written to
_WRITTEN = re.compile(r"(>>?|\btee\s(?:-a\s)?)\s*([^\s<>|;&]*(?:\.ya?ml|\.json|\$\{?\w+\}?)[\"']?)(?=[\s;<>|&]|$)")
_EDITED = re.compile(r"\b(?:sed|yq|perl|envsubst|mv|cp)\s")
_COMPUTED = re.compile(r"\$(\w+)|\$\(([^\n]*)\)|`([^`\n]*)`")
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")
# Of what a file may compute, so that no file takes long or much memory.
_LONGEST_TEXT = 10_000
_LONGEST_LINE = 100_000  # characters of a command, with the values of its variables
_LONGEST_PATH = 4096
_DEVICES = "CUDA_VISIBLE_DEVICES"
_NO_COMMANDS = {"echo", "printf", "cat"}  # what follows these is text


def read(path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the keys of a file, with ``KEY=VALUE`` over them, and the lines they are from; of a script with several
    commands, the keys of each.

    Raises:
        RequestError: the file is not readable, or has no keys.
    """
    text = text_of(path)
    if (root := configuration_root(path)) is not None:
        return [compose(path, root, overrides)]
    if path.suffix == ".json":
        trees = [parse_mapping(text, str(path))]
    elif path.suffix in (".ipynb", ".py"):
        written = dict(_assignment(override) for override in overrides)
        tree, documented = tree_of(text, path, written)
        trees = [tree] if documented is None else _commands(documented, path)
        overrides = [override for override in overrides if override.partition("=")[0] in written]
    elif path.suffix in (".yaml", ".yml"):
        trees = [parse_mapping(text, str(path))]
    elif path.suffix == ".md":
        trees = _blocks(text, path, overrides)
    else:
        trees = _commands(text, path, overrides)
    for tree in trees:
        tree.file = path
        launcher = tree.values.get(LAUNCHER)
        if not (isinstance(launcher, dict) and launcher.get("composed")):
            _override(tree, overrides)
        resolve(tree)
    return trees


def _override(tree: Tree, overrides: Sequence[str]) -> None:
    for override in overrides:
        put(tree, *_assignment(override), Origin(f"argument {override!r}"))


def _assignment(override: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE."""
    key, equals, written = override.partition("=")
    if not equals:
        raise RequestError(f"{override}: expected KEY=VALUE, a key of the file's tool")
    return key, parse_value(written, f"argument {override!r}", ())[0]


def _commands(text: str, path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the options of each command of a shell script that starts a training."""
    documents: dict[str, str | None] = {}
    options = (_options(words, path, line, overrides, documents) for line, words in _lines(text, documents))
    trees = [tree for tree in options if tree is not None]
    if not trees:
        raise RequestError(f"{path}: has no command that starts a training of a known tool")
    return trees


def _blocks(text: str, path: Path, overrides: Sequence[str]) -> list[Tree]:
    """Return the configurations, commands and scripts in the code blocks of a Markdown file, such as a model's card."""
    trees: list[Tree] = []
    problems: list[RequestError] = []
    for language, block in _fenced(text):
        try:
            if language in ("yaml", "yml", "json"):
                trees.append(parse_mapping(block, str(path)))
            elif language in ("python", "py"):
                trees.append(tree_of(block, path, {})[0])
            elif language in ("bash", "sh", "shell", "console", ""):
                trees += _commands(block, path, overrides)
        except RequestError as error:  # a block of something else
            problems += [error] if language in ("yaml", "yml", "json") else []
    if not trees:
        why = f"{path}: has no code block with a configuration, a command or a script (yaml, json, bash, python)"
        raise problems[0] if problems else RequestError(why)
    return trees


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each code block, which begins with the empty lines that keep its numbers."""
    fence, language, block = "", "", [""]
    for number, line in enumerate(text.splitlines()):
        match = _FENCE.match(line)
        if not fence and match:
            fence, language, block = match[1], match[2].lower(), [""] * (number + 1)
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield language, "\n".join(block)
            fence = ""
        elif fence:
            block.append(line)
    if fence:  # one that is not closed ends with the file
        yield language, "\n".join(block)


def _lines(text: str, documents: dict[str, str | None]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command, with variables that the text itself sets.

    Args:
        documents: gets the configurations that the text writes to files (``cat > FILE <<EOF``) before the commands
            that follow; None for one that is written in parts, or changed.
    """
    variables: dict[str, str] = {}

    def keep(name: str, text: str) -> None:
        variables.pop(name, None)
        if len(text) < _LONGEST_TEXT:
            variables[name] = text

    lines = text.splitlines()
    plain = [_COMMENT.sub("", line).rstrip() for line in lines]
    ends = {end: [at for at, line in enumerate(plain) if line.endswith(end)] for end in (")", '"')}
    for at, line in enumerate(lines):
        if (word := line.lstrip("\t")).isidentifier():
            ends.setdefault(f"\t{word}", []).append(at)  # of <<-
            ends.setdefault(line, []).append(at)
    unread: set[str] = set()
    at = 0
    while at < len(lines):
        start, parts = at, [lines[at]]
        while parts[-1].rstrip().endswith("\\") and at + 1 < len(lines):
            at += 1
            parts[-1:] = [parts[-1].rstrip()[:-1], lines[at].strip()]
        line = " ".join(parts)
        at += 1
        if match := _ARRAY.match(line) or _TEXT.match(line):
            is_array = _ARRAY.match(line) is not None
            end = ")" if is_array else '"'
            body = _COMMENT.sub("", match.groups()[-1]).rstrip()
            if not body.endswith(end):
                position = bisect_left(ends[end], at)
                if position == len(ends[end]):
                    continue  # it ends nowhere
                last = ends[end][position]
                body = " ".join((body, *(part.strip().removesuffix("\\") for part in plain[at : last + 1])))
                at = last + 1
            body = _substituted(body.removesuffix(end), variables)
            name = f"{match[1]}[@]" if is_array else match[1]
            keep(name, f"{variables.get(name, '')} {body}" if match[2] == "+" else body)
            continue
        line = _substituted(re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line), variables)
        if match := _ASSIGNMENT.match(line):
            keep(match[1], match[2].strip("\"'"))
            continue
        here, file = _HERE.search(line), _WRITTEN.search(line)
        name = normpath(file[2].strip("\"'")) if file else ""
        places = ends.get(("\t" if here[1] else "") + here[3], []) if here else []
        if here and file and places and places[-1] >= at:
            last = places[bisect_left(places, at)]
            parts = [part.lstrip("\t") if here[1] else part for part in lines[at:last]]
            body = "\n" * at + "\n".join(parts)  # keeps the numbers of lines
            body = body if here[2] else _COMPUTED.sub(_as_variable, _substituted(body, variables))
            is_whole = ">>" not in file[1] and "-a" not in file[1] and name not in unread
            documents[name] = body if is_whole else None
            unread.add(name)
            at = last + 1
            continue
        if name in documents or (documents and _EDITED.search(line)):
            for each in documents:
                if each == name or Path(each).name in line:
                    documents[each] = None
        unread = {each for each in unread if Path(each).name not in line}
        if len(line) > _LONGEST_LINE or not any(name in line for name in (*_LAUNCHERS, ".py")):
            continue
        devices = [f"{_DEVICES}={variables[_DEVICES]}"] if _DEVICES in variables else []
        try:
            yield start + 1, devices + shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line, as in texts
            continue


def _as_variable(match: re.Match[str]) -> str:
    """Return what a shell computes as the name of a variable, which needs a value."""
    return "${" + re.sub(r"[^\w.]+", "_", match[1] or match[2] or match[3] or "") + "}"


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of variables, as long as they are not too much of it."""
    added = 0

    def value(match: re.Match[str]) -> str:
        nonlocal added
        name, default = match[1] or match[2], match[3]
        text = variables.get(name, default)
        added += len(text or "")
        return match[0] if text is None or added > _LONGEST_LINE else text

    return _VARIABLE.sub(value, text)


def _is_program(word: str) -> bool:
    return len(word) < _LONGEST_PATH and _PROGRAMS.search(word) is not None


def _options(
    words: list[str], path: Path, line: int, overrides: Sequence[str], documents: Mapping[str, str | None]
) -> Tree | None:
    """Return the options of a command that starts a training; None if it does not.

    Args:
        overrides: of Hydra's groups.
        documents: configurations that the script has written, by their paths.
    """
    program = next((at for at, word in enumerate(words) if _is_program(word)), None)
    starts = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), len(words))
    if program and starts > program and words[program - 1].startswith("$"):
        starts = program - 1  # as $PYTHON train.py
    if program is None or starts > program or _NO_COMMANDS & set(words[:starts]):
        return None
    if words[starts + 1 : starts + 2] in (["chat"], ["eval"], ["export"], ["api"], ["webui"], ["download"]):
        return None
    tree = Tree(file=path)
    if words[program].endswith("tune") and words[program + 1 : program + 2] == ["run"]:
        starts, program = program + 1, _recipe_of_torchtune(words, program + 2)
    launcher = dict(_pairs(words[starts + 1 : program]))
    devices = [word.partition("=")[2] for word in words[:starts] if word.startswith(f"{_DEVICES}=")]
    if words[starts].endswith("llamafactory-cli") and re.fullmatch(r"\d+(,\d+)*", "".join(devices[-1:])):
        launcher["num_processes"] = devices[-1].count(",") + 1  # it starts one for each device
    arguments = dict(_pairs(words[program + 1 :]))
    origin = Origin(str(path), line)
    if any(
        word.startswith("--config-name") for word in words
    ):  # Hydra's; --config_name is one of transformers' scripts
        tree = _composed(str(arguments["config_name"]), words[program + 1 :], path, line, overrides)
        arguments = {}
    files = [arguments.pop(name) for name in _FILES if name in arguments]
    after = list(pairwise(words[program:]))
    files += [
        word
        for before, word in after
        if ((word.endswith((".yaml", ".yml")) and "=" not in word) or normpath(word) in documents)
        and not before.startswith("-")
    ][:1]
    others = [str(value) for value in (*launcher.values(), *arguments.values()) if normpath(str(value)) in documents]
    if others:
        raise RequestError(f"{path}:{line}: {others[0]} is written by the script; write it to a file beside it")
    if files and (name := normpath(str(files[0]))) in documents:
        if (document := documents[name]) is None:
            raise RequestError(f"{path}:{line}: {files[0]} is written in parts, or changed; write all of it to a file")
        tree = parse_mapping(document, str(path))
        tree.file = path
    elif files and (file := near(re.sub(r"^\$\{?\w+\}?/", "", str(files[0])), path)) is not None:
        tree = parse_mapping(read_text(file), str(file))
        tree.file = path
    elif files and len(arguments) < 3:
        raise RequestError(f"{path}:{line}: {files[0]}, which the command reads, is not here")
    for name, value in arguments.items():
        off = name.startswith("no_") and value is True
        put(tree, name.removeprefix("no_") if off else name, False if off else value, origin)
    kind = next((word for word in words[program + 1 :][:1] if word in _WORDS), None)
    script = re.sub(r"\.py$", "", words[program].rpartition("/")[2])
    named = kind or next((word for word in re.split(r"\W|_", script) if word in _LOSSES), script)
    put(tree, f"{LAUNCHER}.program", named, origin)
    for name, value in launcher.items():
        put(tree, f"{LAUNCHER}.{name}", value, origin)
    return tree if arguments or files or len(tree.values) > 1 else None


def _recipe_of_torchtune(words: Sequence[str], at: int) -> int:
    """Return the place of the recipe's name in ``tune run``, which follows the options of torchrun."""
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] == "--standalone" else 2
    return min(at, len(words) - 1)


def _composed(name: str, words: Sequence[str], path: Path, line: int, overrides: Sequence[str]) -> Tree:
    """Return the configuration of a command of Hydra, of the folder ``configs``, with the command's overrides.

    A value that the script computes stays ``${shell.NAME}``; a group that it chooses is ``launcher.choice_GROUP``.
    """
    primary = near(f"configs/{name.removesuffix('.yaml')}.yaml", path)
    if primary is None:
        raise RequestError(f"{path}:{line}: configs/{name}, which the command reads, is not here")
    written: dict[str, str] = {}
    for word in (*words, *overrides):
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.+/@][\w.+/@-]*", key):
            written[key] = value
    root = primary.parent.absolute()
    chosen = {key: text for key, text in written.items() if "$" in text and (root / key.lstrip("+")).is_dir()}
    decided = [f"{key}={_OF_SHELL.sub(_FOR_HYDRA, text)}" for key, text in written.items() if key not in chosen]
    tree = compose(primary, root, decided)
    tree.file = path
    put(tree, f"{LAUNCHER}.composed", True, Origin(str(path), line))  # the overrides are in it
    for key, text in chosen.items():
        put(tree, f"{LAUNCHER}.choice_{key.lstrip('+')}", _OF_SHELL.sub(_FOR_HYDRA, text), Origin(str(path), line))
    return tree


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield options and values: ``--key value``, ``--key=value``, ``--key one two``, ``--flag``, ``key=value``."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            if equals and re.fullmatch(r"[\w.+/@-]+", name):
                yield name, _value(value)
            continue
        values = [value] if equals else []
        while not equals and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]) and words[at] not in "|>&;":
            values.append(words[at])
            at += 1
            if name.lstrip("-") in _FILES:
                break
        if any(map(_is_program, values)):
            values = []
        name = name.lstrip("-").replace("-", "_")
        yield name, True if not values else _value(values[0]) if len(values) == 1 else [_value(one) for one in values]


def _value(text: str) -> Any:
    if _VARIABLE.search(text) or text.startswith(("$(", "`")):
        return Code(text)
    try:
        return parse_value(text, "", ())[0] if text and not text.startswith(("*", "&", "!", "%", "@")) else text
    except RequestError:
        return text


_REFERENCE = re.compile(r"\$\{([\w.@-]+)\}")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_DEEPEST = 20


def configuration_root(path: Path) -> Path | None:
    """Return the folder of configurations that ``path`` is composed in; None if it is no configuration of Hydra."""
    if path.suffix not in (".yaml", ".yml"):
        return None
    text = read_text(path)
    if not re.search(r"^defaults:\s*(?:#.*)?$", text, re.MULTILINE):
        return None
    for folder in path.absolute().parents:
        if (folder / "experiment").is_dir() or any((folder / name).is_file() for name in ("train.yaml", "config.yaml")):
            return folder
    return path.absolute().parent


def compose(path: Path, root: Path, overrides: Sequence[str]) -> Tree:
    """Return the composition of a configuration, or of an experiment in the one that it is for.

    Raises:
        RequestError: a file is missing or wrong, or an override is malformed.
    """
    values: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise RequestError(f"{override}: expected KEY=VALUE")
        value, _ = parse_value(text, f"argument {override!r}", ())
        is_group = isinstance(value, str) and (root / key.lstrip("+").partition("@")[0]).is_dir()
        (groups if is_group else values)[key.lstrip("+")] = value
    inside = path.absolute().relative_to(root).with_suffix("")
    primary = path.absolute()
    if inside.parts[0] == "experiment":
        # It is composed over the configuration that its folder is for.
        files = (root / f"{part}.yaml" for part in inside.parts)
        primary = next((file for file in files if file.is_file()), root / "train.yaml")
        groups["experiment"] = "/".join(inside.parts[1:])
    tree = _Composer(root, groups).composed(primary)
    tree.file = path
    for key, value in values.items():
        _merge(tree, _nested(key, value), {tuple(key.split(".")): Origin(f"argument {key}={value}")})
    resolve(tree)
    return tree


@dataclass
class _Composer:
    root: Path
    chosen: dict[str, Any] = field(default_factory=dict)  # by group, with its package: what overrides choose

    def composed(self, primary: Path) -> Tree:
        """Compose the primary file; overrides in it and in what it includes are found first, as in Hydra."""
        self._find_overrides(primary, "", 0)
        tree = Tree()
        self._add(tree, primary, "", 0)
        return tree

    def _find_overrides(self, file: Path, package: str, depth: int) -> None:
        package = self._declared(read_text(file), package)
        for group, name, is_override in self._defaults(file):
            if is_override:
                self.chosen.setdefault(self._key(group, file, package), name)
        for group, name, is_override in self._defaults(file):
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            for choice in option if isinstance(option, list) else [option]:
                included = self._file(group, choice, file) if choice and not is_override and depth < _DEEPEST else None
                if included is not None and choice != "_self_":
                    self._find_overrides(included, self._package(group, package), depth + 1)

    def _key(self, group: str, file: Path, package: str) -> str:
        """Return a group by its folder from the root, and by its package if that is another: `data/sets@data.train`."""
        folder, at, _ = group.partition("@")
        beside = file.parent.relative_to(self.root) if file.is_relative_to(self.root) else Path()
        path = folder.strip("/") if folder.startswith("/") else (beside / folder).as_posix()
        return f"{path}@{self._package(group, package)}" if at else path

    @staticmethod
    def _declared(text: str, package: str) -> str:
        match = _PACKAGE.search(text)
        return package if match is None else "" if match[1] == "_global_" else match[1]

    def _defaults(self, file: Path) -> list[tuple[str, Any, bool]]:
        entries = parse_mapping(read_text(file), str(file)).values.get("defaults") or []
        result: list[tuple[str, Any, bool]] = []
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, str):
                result.append(("", entry, False))
            elif isinstance(entry, dict):
                key, value = next(iter(entry.items()))
                words = str(key).split()
                result.append((words[-1], value, "override" in words[:-1]))
        return result

    def _file(self, group: str, name: Any, beside: Path) -> Path | None:
        folder = group.partition("@")[0]
        bases = [self.root] if folder.startswith("/") else [beside.parent, self.root]
        option = str(name).removesuffix(".yaml").lstrip("/")
        files = (base / folder.strip("/") / f"{option}.yaml" for base in bases)
        return next((file for file in files if file.is_file()), None)

    def _add(self, tree: Tree, file: Path, package: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise RequestError(f"{file}: defaults are nested more than {_DEEPEST} deep")
        text = read_text(file)
        own = parse_mapping(text, str(file))
        own.values.pop("defaults", None)
        package = self._declared(text, package)
        defaults = [item for item in self._defaults(file) if not item[2]]
        if ("", "_self_", False) not in defaults:
            defaults.append(("", "_self_", False))
        for group, name, _ in defaults:
            option = self.chosen.get(self._key(group, file, package), name) if group else name
            if option == "_self_":
                prefix: KeyPath = tuple(package.split(".")) if package else ()
                _merge(tree, _nested(package, own.values), {prefix + key: at for key, at in own.origins.items()})
                continue
            for choice in option if isinstance(option, list) else [option]:
                if choice in (None, "null"):
                    continue
                included = self._file(group, choice, file)
                if included is None:
                    raise RequestError(f"{file}: defaults: there is no {group or '.'}/{choice}.yaml in {self.root}")
                self._add(tree, included, self._package(group, package), depth + 1)

    @staticmethod
    def _package(group: str, package: str) -> str:
        folder, at, own = group.partition("@")
        if at:
            absolute = folder.startswith("/") or own.startswith("_global_")
            own = own.removeprefix("_global_").lstrip(".")
            return own if absolute or not package else f"{package}.{own}"
        name = folder.strip("/").replace("/", ".")
        return ".".join(filter(None, ("" if folder.startswith("/") else package, name)))


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value


def _merge(tree: Tree, over: Mapping[str, Any], origins: Mapping[KeyPath, Origin]) -> None:
    def merge(base: dict[str, Any], values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                merge(base[key], value)
            else:
                base[key] = deepcopy(value)

    merge(tree.values, over)
    tree.origins.update({path: origin for path, origin in origins.items() if path[:1] != ("defaults",)})


def resolve(tree: Tree) -> None:
    """Replace ``${key}`` by the value of the key, in place; what it does not have stays as it is."""

    def value_of(key: str) -> Any:
        value: Any = tree.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def replaced(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, depth) for item in value]
        if not isinstance(value, str) or "${" not in value or depth > _DEEPEST:
            return value
        if match := _REFERENCE.fullmatch(value):
            inside = value_of(match[1])
            return value if inside is None else replaced(inside, depth + 1)

        def text(match: re.Match[str]) -> str:
            inside = value_of(match[1])
            return match[0] if inside is None or isinstance(inside, dict | list) else str(replaced(inside, depth + 1))

        return _REFERENCE.sub(text, value)

    tree.values = replaced(tree.values)
