"""Read the commands of a shell script that start a training, as one mapping of the options of each.

Nothing is executed. Variables that the script sets are replaced by their values, and configurations that it writes
(``cat > FILE <<EOF``) are read as the files that they become.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from os.path import normpath
from pathlib import Path
from typing import Any

from trainwright.compatibility.conversion.hydra import compose_configuration
from trainwright.compatibility.conversion.script_values import Code
from trainwright.compatibility.conversion.scripts import find_file_near, put
from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.recipe.yaml_text import Origin, Tree, parse_mapping, parse_value

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
_TEXT = re.compile(r"^\s*(?:local\s+|export\s+)?(\w+)()=\"([^\"]*)$")  # that ends on another line
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;$`(]*)\s*(?:#.*)?$")
_FILES = ("config", "config_file")
_HERE = re.compile(r"<<(-?)\s*(['\"\\]?)(\w+)")  # a here-document, and the file that it is written to
_WRITTEN = re.compile(r"(>>?|\btee\s(?:-a\s)?)\s*([^\s<>|;&]*(?:\.ya?ml|\.json|\$\{?\w+\}?)[\"']?)(?=[\s;<>|&]|$)")
_EDITED = re.compile(r"\b(?:sed|yq|perl|envsubst|mv|cp)\s")
_COMPUTED = re.compile(r"\$(\w+)|\$\(([^\n]*)\)|`([^`\n]*)`")
_ESCAPED, _STANDS_FOR_ESCAPED = re.compile(r"\\([\\$`\n])"), re.compile("[\ue000-\ue07f]")
_CONTINUES = re.compile(r"(?<!\\)(?:\\\\)*\\$")  # on the next line
# Of what a file may compute, so that no file takes long or much memory.
_LONGEST_TEXT = 10_000
_LONGEST_LINE = 100_000  # characters of a command, with the values of its variables
_LONGEST_PATH = 4096
_DEVICES = "CUDA_VISIBLE_DEVICES"
# What ends a text, an array, or a here-document: its word, whether that is quoted, whether tabs before lines go.
_End = str | tuple[str, bool, bool]
_NO_COMMANDS = {"echo", "printf", "cat"}  # what follows these is text


def list_commands(text: str, path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the options of each command of a shell script that starts a training.

    Args:
        path: the script, for messages and for the files that its commands name.
        overrides: ``KEY=VALUE``, for configurations of Hydra, whose groups they choose.

    Raises:
        RequestError: there is no such command, or one that cannot be read.
    """
    script = _Script(text)
    options = (_read_options(words, path, line, overrides, script.documents) for line, words in script.commands())
    trees = [tree for tree in options if tree is not None]
    if not trees:
        raise RequestError(f"{path}: has no command that starts a training of a known tool")
    return trees


class _Script:
    """A shell script, read from its first line to its last.

    Attributes:
        documents: the configurations that it has written to files before the command that is read; None for one that
            is written in parts, or changed.
    """

    def __init__(self, text: str) -> None:
        self.documents: dict[str, str | None] = {}
        self._unread: set[str] = set()  # documents that no line names since they were written
        self._variables: dict[str, str] = {}
        self._lines = text.splitlines()
        self._plain = [_COMMENT.sub("", line).rstrip() for line in self._lines]
        self._ends = _find_ends(self._lines, self._plain)
        self._at = 0  # the line after the one that is read

    def commands(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line and the words of each command that may start a training."""
        while self._at < len(self._lines):
            number, line = self._at + 1, self._join_lines()
            if match := _ARRAY.match(line) or _TEXT.match(line):
                self._assign_lines(match)
                continue
            line = _substitute_variables(re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", line), self._variables)
            if match := _ASSIGNMENT.match(line):
                self._assign(match[1], match[2].strip("\"'"))
            elif not self._keep_document(line) and (words := self._words(line)):
                yield number, words

    def _join_lines(self) -> str:
        """Return the next line, with those that it continues on."""
        parts = [self._lines[self._at]]
        while parts[-1].rstrip().endswith("\\") and self._at + 1 < len(self._lines):
            self._at += 1
            parts[-1:] = [parts[-1].rstrip()[:-1], self._lines[self._at].strip()]
        self._at += 1
        return " ".join(parts)

    def _assign(self, name: str, text: str) -> None:
        self._variables.pop(name, None)
        if len(text) < _LONGEST_TEXT:
            self._variables[name] = text

    def _assign_lines(self, match: re.Match[str]) -> None:
        """Set an array, or a text that ends on another line; nothing if it ends nowhere."""
        end = ")" if match.re is _ARRAY else '"'
        name, body = match[1], _COMMENT.sub("", match[3]).rstrip()
        if not body.endswith(end):
            last = self._end(end)
            if last is None:
                return
            body = " ".join((body, *(part.strip().removesuffix("\\") for part in self._plain[self._at : last + 1])))
            self._at = last + 1
        body = _substitute_variables(body.removesuffix(end), self._variables)
        if match.re is _ARRAY:
            name = f"{name}[@]"
        self._assign(name, f"{self._variables.get(name, '')} {body}" if match[2] else body)

    def _end(self, kind: _End) -> int | None:
        """Return the next line that ends what is begun."""
        line_numbers = self._ends.get(kind, [])
        position = bisect_left(line_numbers, self._at)
        return line_numbers[position] if position < len(line_numbers) else None

    def _keep_document(self, line: str) -> bool:
        """Keep the here-document that a line writes to a file; otherwise note which of those kept it changes."""
        heredoc, file = _HERE.search(line), _WRITTEN.search(line)
        name = normpath(file[2].strip("\"'")) if file else ""
        if heredoc and file and (last := self._end((heredoc[3], bool(heredoc[2]), bool(heredoc[1])))) is not None:
            lines = self._lines[self._at : last]
            if heredoc[1]:
                joins = [False, *(not heredoc[2] and _CONTINUES.search(line) is not None for line in lines)]
                lines = [line if joined else line.lstrip("\t") for line, joined in zip(lines, joins, strict=False)]
            # Keeps the numbers of lines, up to those that are joined.
            body = "\n" * self._at + "\n".join(lines)
            body = body if heredoc[2] else _expand_document(body, self._variables)
            is_whole = ">>" not in file[1] and "-a" not in file[1] and name not in self._unread
            self.documents[name] = body if is_whole else None
            self._unread.add(name)
            self._at = last + 1
            return True
        if name in self.documents or (self.documents and _EDITED.search(line)):
            for document in self.documents:
                if document == name or Path(document).name in line:
                    self.documents[document] = None
        self._unread = {document for document in self._unread if Path(document).name not in line}
        return False

    def _words(self, line: str) -> list[str]:
        """Return the words of a line; none if it starts no training."""
        if len(line) > _LONGEST_LINE or not any(name in line for name in (*_LAUNCHERS, ".py")):
            return []
        devices = [f"{_DEVICES}={self._variables[_DEVICES]}"] if _DEVICES in self._variables else []
        try:
            return devices + shlex.split(line, comments=True)
        except ValueError:  # a quote that ends on another line, as in texts
            return []


def _find_ends(lines: Sequence[str], plain: Sequence[str]) -> dict[_End, list[int]]:
    """Return the lines that may end what is begun. Where a word is quoted, no line continues the one before."""
    ends: dict[_End, list[int]] = {
        end: [at for at, line in enumerate(plain) if line.endswith(end)] for end in (")", '"')
    }
    for at, line in enumerate(lines):
        if (word := line.lstrip("\t")).isidentifier():
            continues = at > 0 and _CONTINUES.search(lines[at - 1]) is not None
            for is_quoted in (True,) if continues else (True, False):
                for strips_tabs in (True,) if line != word else (True, False):
                    ends.setdefault((word, is_quoted, strips_tabs), []).append(at)
    return ends


def _expand_document(body: str, variables: Mapping[str, str]) -> str:
    """Return a here-document as a shell writes it; what it computes becomes the name of a variable without a value."""

    def as_variable(match: re.Match[str]) -> str:
        return "${" + re.sub(r"[^\w.]+", "_", match[1] or match[2] or match[3] or "") + "}"

    body = _ESCAPED.sub(lambda match: "" if match[1] == "\n" else chr(0xE000 + ord(match[1])), body)
    body = _COMPUTED.sub(as_variable, _substitute_variables(body, variables))
    return _STANDS_FOR_ESCAPED.sub(lambda match: chr(ord(match[0]) - 0xE000), body)


def _substitute_variables(text: str, variables: Mapping[str, str]) -> str:
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


def _read_options(
    words: list[str], path: Path, line: int, overrides: Sequence[str], documents: Mapping[str, str | None]
) -> Tree | None:
    """Return the options of a command that starts a training; None if it does not."""
    positions = _find_launcher_and_program(words)
    if positions is None:
        return None
    starts, program = positions
    if words[program].endswith("tune") and words[program + 1 : program + 2] == ["run"]:
        starts, program = program + 1, _find_torchtune_recipe(words, program + 2)
    launcher = dict(_iterate_pairs(words[starts + 1 : program]))
    devices = [word.partition("=")[2] for word in words[:starts] if word.startswith(f"{_DEVICES}=")]
    if words[starts].endswith("llamafactory-cli") and re.fullmatch(r"\d+(,\d+)*", "".join(devices[-1:])):
        launcher["num_processes"] = devices[-1].count(",") + 1  # it starts one for each device
    arguments = dict(_iterate_pairs(words[program + 1 :]))
    origin = Origin(str(path), line)
    files = [str(arguments.pop(name)) for name in _FILES if name in arguments]
    files += _select_files(words[program:], documents)[:1]
    option_texts = [str(value) for value in (*launcher.values(), *arguments.values())]
    if written_files := [file for file in option_texts if normpath(file) in documents]:
        raise RequestError(f"{path}:{line}: {written_files[0]} is written by the script; write it to a file beside it")
    # Hydra's: --config_name is an option of transformers' scripts.
    if any(word.startswith("--config-name") for word in words):
        tree = _compose_configuration(str(arguments["config_name"]), words[program + 1 :], path, line, overrides)
        files, arguments = [], {}
    else:
        tree = _read_configuration(files, path, line, documents, is_needed=len(arguments) < 3)
    for name, value in arguments.items():
        off = name.startswith("no_") and value is True
        put(tree, name.removeprefix("no_") if off else name, False if off else value, origin)
    kind = next((word for word in words[program + 1 :][:1] if word in _WORDS), None)
    script = re.sub(r"\.py$", "", words[program].rpartition("/")[2])
    program_name = kind or next((word for word in re.split(r"\W|_", script) if word in _LOSSES), script)
    put(tree, f"{LAUNCHER}.program", program_name, origin)
    for name, value in launcher.items():
        put(tree, f"{LAUNCHER}.{name}", value, origin)
    return tree if arguments or files or len(tree.values) > 1 else None


def _find_launcher_and_program(words: Sequence[str]) -> tuple[int, int] | None:
    """Return the places of the launcher and of the training program in a command; None if it starts no training."""
    program = next((at for at, word in enumerate(words) if _is_program(word)), None)
    starts = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), len(words))
    if program and starts > program and words[program - 1].startswith("$"):
        starts = program - 1  # as $PYTHON train.py
    if program is None or starts > program or _NO_COMMANDS & set(words[:starts]):
        return None
    does_other = words[starts + 1 : starts + 2] in (["chat"], ["eval"], ["export"], ["api"], ["webui"], ["download"])
    return None if does_other else (starts, program)


def _select_files(words: Sequence[str], documents: Mapping[str, str | None]) -> list[str]:
    """Return the configurations among the words that are no options and no values of them."""
    return [
        word
        for before, word in pairwise(words)
        if ((word.endswith((".yaml", ".yml")) and "=" not in word) or normpath(word) in documents)
        and not before.startswith("-")
    ]


def _read_configuration(
    files: Sequence[str], path: Path, line: int, documents: Mapping[str, str | None], *, is_needed: bool
) -> Tree:
    """Return the first of the files of a command: one that the script has written, or one beside it."""
    tree = Tree()
    if files and (name := normpath(files[0])) in documents:
        if (document := documents[name]) is None:
            raise RequestError(f"{path}:{line}: {files[0]} is written in parts, or changed; write all of it to a file")
        tree = parse_mapping(document, str(path))
    elif files and (file := find_file_near(re.sub(r"^\$\{?\w+\}?/", "", files[0]), path)) is not None:
        tree = parse_mapping(read_text(file), str(file))
    elif files and is_needed:
        raise RequestError(f"{path}:{line}: {files[0]}, which the command reads, is not here")
    tree.file = path
    return tree


def _find_torchtune_recipe(words: Sequence[str], at: int) -> int:
    """Return the place of the recipe's name in ``tune run``, which follows the options of torchrun."""
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] == "--standalone" else 2
    return min(at, len(words) - 1)


def _compose_configuration(name: str, words: Sequence[str], path: Path, line: int, overrides: Sequence[str]) -> Tree:
    """Return the configuration of a command of Hydra, of the folder ``configs``, with the command's overrides.

    A value that the script computes stays ``${shell.NAME}``; a group that it chooses is ``launcher.choice_GROUP``.
    """
    primary = find_file_near(f"configs/{name.removesuffix('.yaml')}.yaml", path)
    if primary is None:
        raise RequestError(f"{path}:{line}: configs/{name}, which the command reads, is not here")
    texts: dict[str, str] = {}
    for word in (*words, *overrides):
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.+/@][\w.+/@-]*", key):
            texts[key] = value
    root = primary.parent.absolute()
    choices = {key: text for key, text in texts.items() if "$" in text and (root / key.lstrip("+")).is_dir()}
    hydra_overrides = [f"{key}={_OF_SHELL.sub(_FOR_HYDRA, text)}" for key, text in texts.items() if key not in choices]
    tree = compose_configuration(primary, root, hydra_overrides)
    tree.file = path
    put(tree, f"{LAUNCHER}.composed", True, Origin(str(path), line))  # the overrides are in it
    for key, text in choices.items():
        put(tree, f"{LAUNCHER}.choice_{key.lstrip('+')}", _OF_SHELL.sub(_FOR_HYDRA, text), Origin(str(path), line))
    return tree


def _iterate_pairs(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield options and values: ``--key value``, ``--key=value``, ``--key one two``, ``--flag``, ``key=value``."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            if equals and re.fullmatch(r"[\w.+/@-]+", name):
                yield name, _parse_value(value)
            continue
        values = [value] if equals else []
        while not equals and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]) and words[at] not in "|>&;":
            values.append(words[at])
            at += 1
            if name.lstrip("-") in _FILES:
                break
        if any(map(_is_program, values)):
            values = []
        parsed_values = [_parse_value(text) for text in values] or [True]
        yield name.lstrip("-").replace("-", "_"), parsed_values if len(values) > 1 else parsed_values[0]


def _parse_value(text: str) -> Any:
    if _VARIABLE.search(text) or text.startswith(("$(", "`")):
        return Code(text)
    try:
        return parse_value(text, "", ())[0] if text and not text.startswith(("*", "&", "!", "%", "@")) else text
    except RequestError:
        return text
