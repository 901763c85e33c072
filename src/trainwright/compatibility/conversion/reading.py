"""Read a configuration of another tool as one mapping of its keys: YAML (hydra.py), JSON, a command (shell.py), a
script (scripts.py), or one of these in a code block of a Markdown file. Nothing in a file is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.compatibility.conversion.hydra import compose_configuration, find_configuration_root, resolve
from trainwright.compatibility.conversion.scripts import build_tree, put, read_source_text
from trainwright.compatibility.conversion.shell import LAUNCHER, list_commands
from trainwright.errors import RequestError
from trainwright.recipe.yaml_text import Origin, Tree, parse_mapping, parse_value

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch", ".bash", ".py", ".ipynb")

_FENCE = re.compile(r"^\s*(```+|~~~+)\s*(\w*)")


def read(path: Path, overrides: Sequence[str] = ()) -> list[Tree]:
    """Return the keys of a file, with ``KEY=VALUE`` over them, and the lines they are from; of a script with several
    commands, the keys of each.

    Raises:
        RequestError: the file is not readable, or has no keys.
    """
    text = read_source_text(path)
    if (root := find_configuration_root(path)) is not None:
        return [compose_configuration(path, root, overrides)]
    if path.suffix == ".json":
        trees = [parse_mapping(text, str(path))]
    elif path.suffix in (".ipynb", ".py"):
        options = dict(_parse_assignment(override) for override in overrides)
        tree, docstring = build_tree(text, path, options)
        trees = [tree] if docstring is None else list_commands(docstring, path)
        overrides = [override for override in overrides if override.partition("=")[0] in options]
    elif path.suffix in (".yaml", ".yml"):
        trees = [parse_mapping(text, str(path))]
    elif path.suffix == ".md":
        trees = _read_blocks(text, path, overrides)
    else:
        trees = list_commands(text, path, overrides)
    for tree in trees:
        tree.file = path
        launcher = tree.values.get(LAUNCHER)
        if not (isinstance(launcher, dict) and launcher.get("composed")):
            for override in overrides:
                put(tree, *_parse_assignment(override), Origin(f"argument {override!r}"))
        resolve(tree)
    return trees


def _parse_assignment(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise RequestError(f"{override}: expected KEY=VALUE, a key of the file's tool")
    return key, parse_value(text, f"argument {override!r}", ())[0]


def _read_blocks(text: str, path: Path, overrides: Sequence[str]) -> list[Tree]:
    """Return the configurations, commands and scripts in the code blocks of a Markdown file, such as a model's card."""
    trees: list[Tree] = []
    problems: list[RequestError] = []
    for language, block in _iterate_fenced_blocks(text):
        try:
            if language in ("yaml", "yml", "json"):
                trees.append(parse_mapping(block, str(path)))
            elif language in ("python", "py"):
                trees.append(build_tree(block, path, {})[0])
            elif language in ("bash", "sh", "shell", "console", ""):
                trees += list_commands(block, path, overrides)
        except RequestError as error:  # a block of something else
            problems += [error] if language in ("yaml", "yml", "json") else []
    if not trees:
        why = f"{path}: has no code block with a configuration, a command or a script (yaml, json, bash, python)"
        raise problems[0] if problems else RequestError(why)
    return trees


def _iterate_fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
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
