"""``trainwright recipe from``: convert a configuration of another tool to a recipe."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.command import command
from trainwright.errors import RequestError
from trainwright.recipe.extensions import set_trust
from trainwright.utils.text import format_plural, format_table, quote_word, say

if TYPE_CHECKING:
    from trainwright.compatibility.conversion.convert import Conversion, Options, ResultLine
    from trainwright.recipe.yaml_text import Tree

_MOST_BLOCKING = 30
_HEADINGS = {
    "taken": "taken",
    "computed": "computed",
    "dropped": "without effect on the training here",
    "needs": "needs a value that the file does not have",
    "not possible": "not possible",
    "unknown": "unknown",
}


@command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="A configuration, a script, or with --check a folder.")
    ],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the other tool, over the file's.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="RECIPE", help="Write the recipe there, not to the console."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that the tool starts. Default: the file's or its launcher's, or 1."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Training rows, for intervals that are a part of an epoch.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the model, for a file that trains the last ones.")
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rows to train on in place of the file's, such as those that a script makes."
        ),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to evaluate on in place of the file's.")
    ] = None,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The Accelerate or DeepSpeed file that the tool is started with."),
    ] = None,
    partly: Annotated[
        bool, typer.Option("--partly", help="Write what is possible; the rest is named in the recipe's first lines.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Convert all files of a folder, write nothing, and show what is not possible."),
    ] = False,
) -> None:
    """Convert a configuration of Axolotl, LLaMA-Factory, TRL, alignment-handbook, torchtune, Unsloth or
    open-unlearning to a recipe that does the same.

    Every key of the file is listed with what becomes of it, and the defaults of its tool are written out. If a key is
    unknown or not possible, nothing is written, and the command ends with 2. Nothing in the file is executed.
    """
    from trainwright.compatibility.conversion.convert import Options

    options = Options(processes, rows, layers, train, validation)
    with set_trust(False):  # a file may name code as the source of its rows
        if check:
            for line in _check_folder(source, options):
                say(line)
            return
        conversion = _convert_one(source, values or [], options, accelerate_config)
    is_written = partly or not conversion.failures
    text = _format_recipe(conversion) if is_written else ""
    if is_written and output is not None:
        if output.exists():
            raise RequestError(f"{output}: exists; name another file, or remove it")
        output.write_text(text, encoding="utf-8")
    elif is_written:
        say(text, end="", wrap=False)
    for line in _report(conversion):
        say(line, file=sys.stderr if output is None else None)
    if not is_written:
        count = len(conversion.failures)
        raise RequestError(
            f"{source}: {format_plural(count, 'key')} cannot be converted, as listed above, so nothing was written; "
            "--partly "
            "writes the rest"
        )


def _convert_one(source: Path, values: list[str], options: Options, accelerate_config: Path | None) -> Conversion:
    """Return the conversion of a file, or of the command on a line of a script, FILE:LINE."""
    from trainwright.compatibility.conversion.convert import convert, list_tools, load_table, recognize
    from trainwright.compatibility.conversion.reading import read
    from trainwright.compatibility.conversion.scripts import put
    from trainwright.compatibility.conversion.shell import LAUNCHER
    from trainwright.recipe.yaml_text import Origin

    name, _, line = str(source).rpartition(":")
    file, number = (Path(name), int(line)) if name and line.isdigit() else (source, None)
    trees = read(file, values)
    trees = [tree for tree in trees if recognize(tree) is not None] or trees
    at = [_find_line(tree) for tree in trees]
    if len(trees) > 1 and number not in at:
        raise RequestError(
            f"{file}: has {len(trees)} configurations; choose one: {', '.join(f'{file}:{n}' for n in at)}"
        )
    tree = trees[at.index(number)] if number in at else trees[0]
    tool = recognize(tree)
    if tool is None:
        tools = ", ".join(load_table(name).name for name in list_tools())
        raise RequestError(f"{file}: has the keys of no tool that is known: {tools}")
    if accelerate_config is not None:
        origin = Origin(f"--accelerate-config {quote_word(str(accelerate_config))}")
        put(tree, f"{LAUNCHER}.accelerate_config", str(accelerate_config), origin)
    return convert(tree, tool, options)


def _find_line(tree: Tree) -> int | None:
    origin = tree.origins.get(("launcher", "program")) or next(iter(tree.origins.values()), None)
    return None if origin is None else origin.line


def _format_recipe(conversion: Conversion) -> str:
    from trainwright.recipe.yaml_text import to_yaml

    head = [f"# From {conversion.file} ({conversion.tool.name}), by trainwright recipe from."]
    head += [f"# Not here: {location}: {text}" for location, text in map(_format_failure, conversion.failures)]
    lines = [line.replace("\n", " ") for line in head]
    return "\n".join(lines) + "\n" + to_yaml(conversion.recipe().values)


def _format_failure(line: ResultLine) -> tuple[str, str]:
    setting = line.setting
    return str(setting.origin), f"{setting.key}: {line.text}" if setting.key else line.text


def _report(conversion: Conversion) -> Iterator[str]:
    from trainwright.compatibility.conversion.convert import FAILED, STATUSES

    yield f"{conversion.file}: {conversion.tool.name}"
    for status in STATUSES:
        lines = [line for line in conversion.lines if line.status == status]
        if not lines:
            continue
        yield ""
        yield f"{_HEADINGS[status]}:"
        if status in FAILED:
            yield from (f"  {location}: {text}" for location, text in map(_format_failure, lines))
            continue
        rows = [(f"  {line.setting.key}{' (default)' * line.setting.is_default}", line.text) for line in lines]
        yield from format_table(rows)


def _check_folder(folder: Path, options: Options) -> Iterator[str]:
    """Yield which share of a folder's files can be converted, by tool, and what blocks the rest."""
    from trainwright.compatibility.conversion.convert import convert, recognize
    from trainwright.compatibility.conversion.reading import SUFFIXES, read

    if not folder.is_dir():
        raise RequestError(f"{folder}: is not a folder; --check converts all files in one")
    counts: dict[str, Counter[str]] = {}
    blocking: Counter[str] = Counter()
    aside: Counter[str] = Counter()
    unreadable: list[str] = []
    unknown_files = 0
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        try:
            trees = read(file)
        except RequestError as error:
            unreadable.append(str(error))
            continue
        for tree in trees:
            tool = recognize(tree)
            if tool is None:
                unknown_files += 1
                continue
            conversion = convert(tree, tool, options)
            counts.setdefault(tool.name, Counter())[conversion.kind] += 1
            if conversion.kind == "aside":
                aside[next(line.aside for line in conversion.lines if line.aside) or ""] += 1
            elif conversion.kind == "not":
                blocking.update({_format_cause(line) for line in conversion.failures if line.status != "needs"})
    kinds = {
        "as it is": "as they are",
        "harmlessly": "harmlessly",
        "computed": "with an option",
        "not": "not",
        "aside": "aside",
    }
    rows = [("", "files", *kinds.values())]
    for name, count in counts.items():
        ours = count.total() - count["aside"]
        shares = [f"{count[kind]} ({count[kind] / max(1, ours):.0%})" for kind in list(kinds)[:-1]]
        rows.append((name, str(count.total()), *shares, str(count["aside"])))
    yield from format_table(rows)
    yield ""
    yield "as they are: every key is taken, or has no effect on the training here. harmlessly: something is done"
    yield "in another way. with an option: a value is missing in the file. aside: other kinds of training, in no share."
    if aside:
        yield f"aside: {', '.join(f'{kind} {count}' for kind, count in aside.most_common())}"
    if blocking:
        yield ""
        yield "what blocks the others, by the number of files:"
        yield from format_table([(f"  {count}", cause) for cause, count in blocking.most_common(_MOST_BLOCKING)])
    if unknown_files or unreadable:
        yield ""
        yield f"{format_plural(unknown_files, 'file')} of no known tool, {len(unreadable)} not readable"
        yield from (f"  {problem.splitlines()[0]}" for problem in unreadable[:_MOST_BLOCKING])


def _format_cause(line: ResultLine) -> str:
    setting = line.setting
    return f"{setting.pattern}: {line.text}" if setting.pattern else line.text
