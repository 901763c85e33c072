"""Pages of the site that are generated when mkdocs builds it: from the schema, the command line and root files."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import typer

from trainwright.cli.main import app
from trainwright.cli.recipe import recipe_json_schema
from trainwright.compatibility.conversion.convert import list_tools, load_table
from trainwright.recipe import registries
from trainwright.recipe.extensions import Registry

ROOT = Path(__file__).parents[1]
# Files of the repository that are pages of the site, with the titles that the site gives them.
ROOT_FILES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    pages = {target: root_page(source) for source, target in ROOT_FILES.items()}
    pages |= {"reference/recipe.md": recipe_reference(), "reference/commands.md": command_reference()}
    pages["reference/extensions.md"] = extension_reference()
    pages["reference/other-tools.md"] = conversion_reference()
    for target, content in pages.items():
        files.append(File.generated(config, target, content=content))
    return files


def root_page(name: str) -> str:
    """Return a Markdown file of the repository's root with its links as they are in the site.

    Links to pages keep working; links to other files of the repository become their paths.
    """

    def relinked(match: re.Match[str]) -> str:
        image, text, target = match["image"], match["text"], match["target"]
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        if path in ROOT_FILES:
            path = ROOT_FILES[path]
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            return f"{text} (`{path}`)" if text.strip("`") != path else text
        return f"{image}[{text}]({path}{hash_sign}{anchor})"

    content = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", relinked, content)


def recipe_reference() -> str:
    """Return the reference of every recipe key, from the JSON Schema that `trainwright recipe schema` prints."""
    schema = recipe_json_schema()
    lines = [
        "# Recipe keys",
        "",
        "Generated from the schema of this version. `trainwright recipe schema` prints it as JSON Schema.",
        "",
        *_table(schema["properties"], schema, ""),
    ]
    for key, value in schema["properties"].items():
        lines += _section(key, value, schema, level=2)
    return "\n".join(lines) + "\n"


def _section(path: str, value: dict[str, Any], schema: dict[str, Any], level: int) -> list[str]:
    """Return a heading and a table for the section at ``path``, then the sections in it; nothing for a plain key."""
    lines: list[str] = []
    for section in _sections_of(value, schema):
        about = value.get("description") or section.get("description", "")
        lines += ["", f"{'#' * min(level, 4)} `{path}`", "", _text(about), ""]
        lines += _table(section["properties"], schema, f"{path}.")
        for key, inner in section["properties"].items():
            lines += _section(f"{path}.{key}", inner, schema, level + 1)
    return lines


def _table(properties: dict[str, Any], schema: dict[str, Any], prefix: str) -> list[str]:
    lines = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for key, value in properties.items():
        sections = _sections_of(value, schema)
        about = value.get("description") or (sections[0].get("description", "") if sections else "")
        default = f"`{_yaml(value['default'])}`" if "default" in value else ""
        lines.append(f"| `{prefix}{key}` | {_type(value, schema)} | {default} | {_text(about)} |")
    return lines


def _sections_of(value: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections (objects with named keys) that a key's value may be, or be a list or mapping of."""
    if "$ref" in value:
        return _sections_of(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    if value.get("properties"):
        return [value]
    inner = [*value.get("anyOf", ()), *value.get("oneOf", ()), *value.get("allOf", ()), *_items(value)]
    return [section for each in inner for section in _sections_of(each, schema)]


def _items(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [items for key in ("items", "additionalProperties") if isinstance(items := value.get(key), dict)]


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a key's type in words: its values where they are listed, else its JSON type with its bounds."""
    if "$ref" in value:
        return _type(schema["$defs"][value["$ref"].rpartition("/")[2]], schema)
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in value:
            return ", or ".join(dict.fromkeys(_type(each, schema) for each in value[kind]))
    if "enum" in value:
        return ", ".join(f"`{_yaml(each)}`" for each in value["enum"])
    if "const" in value:
        return f"`{_yaml(value['const'])}`"
    kind = value.get("type", "any value")
    if kind == "array":
        return " ".join(["list of", *(_type(each, schema) for each in _items(value))]).strip()
    if kind == "object":
        return "section" if value.get("properties") else "mapping"
    return {"null": "`null`", "string": "text"}.get(kind, str(kind)) + _bounds(value)


def _bounds(value: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {value[key]:g}" for key, sign in signs.items() if key in value and abs(value[key]) < 1e9]
    return f" ({', '.join(found)})" if found else ""


def _yaml(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _plain(value) else str(value)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _text(text: str) -> str:
    """Return a description in one line of a table; outside of code, characters of Markdown are escaped."""
    parts = re.split(r"`{1,2}([^`]+)`{1,2}", " ".join(text.split()))
    plain = [re.sub(r"([|<>\[\]*_])", r"\\\1", part) for part in parts[::2]]
    code = [f"`{_in_table(part)}`" for part in parts[1::2]] + [""]
    return "".join(text for pair in zip(plain, code, strict=True) for text in pair)


def extension_reference() -> str:
    """Return the reference of every registry: its entry points, what an object needs, and the names there are."""
    lines = [
        "# Extensions",
        "",
        "Generated from the registries of this version and of the installed packages. In a recipe, a place",
        "`module:Name` can stand for a name. [Contributing](../contributing.md#add-an-extension): how to add one.",
    ]
    for registry in all_registries():
        required = ", ".join(f"`{name}`" for name in registry.required)
        lines += [
            "",
            f"## {registry.group.rpartition('.')[2].replace('_', ' ').capitalize()}",
            "",
            f"Entry points: `{registry.group}`.",
        ]
        lines += [f"An object has {required}."] if required else []
        if registry.names():
            lines += ["", "| Name | Description | From |", "| --- | --- | --- |"]
        for name in registry.names():
            lines.append(
                f"| `{name}` | {_text(_summary(registry.get(name)))} | {registry.package(name) or 'built in'} |"
            )
    return "\n".join(lines) + "\n"


def conversion_reference() -> str:
    """Return what the keys of other tools become, by tool, and our keys with theirs, from the tables of conversions."""
    lines = ["# Keys of other tools", "", "Generated from the tables that `trainwright recipe from` applies."]
    theirs: dict[str, list[str]] = {}
    for name in list_tools():
        tool = load_table(name)
        lines += [
            "",
            f"## {tool.name}",
            "",
            f"Their documentation: {tool.source}",
            "",
            "| Key | Here |",
            "| --- | --- |",
        ]
        for key, rule in tool.rules.items():
            ours = sorted(
                {*([rule.to] if rule.to else []), *(word for value in rule.values.values() for word in _ours(value))}
            )
            what = ", ".join(f"`{word.replace('@', 'data.')}`" for word in ours)
            what += f"; {rule.by.partition(':')[2].replace('_', ' ')}, computed" if rule.by else ""
            reason = rule.drop or (f"not possible: {rule.refuse}" if rule.refuse else "")
            if not what and not reason:
                words = [value.get("drop") or value.get("refuse") or "" for value in rule.values.values()]
                reason = "; ".join(filter(None, dict.fromkeys(words)))
            reason = f"another name of `{rule.alias}`" if rule.alias else reason
            lines.append(f"| `{key}` | {_text('; '.join(filter(None, (what.removeprefix('; '), reason))))} |")
            for word in ours:
                theirs.setdefault(word.replace("@", "data."), []).append(f"{tool.name} `{key}`")
    lines += ["", "## Our keys", "", "| Here | There |", "| --- | --- |"]
    lines += [f"| `{key}` | {_text(', '.join(words))} |" for key, words in sorted(theirs.items())]
    return "\n".join(lines) + "\n"


def _ours(value: Any) -> list[str]:
    """Return the keys of ours that a value of another tool sets."""
    return [key for key in value if "." in key or key == "task"] if isinstance(value, dict) else []


def all_registries() -> list[Registry[Any]]:
    """Return the registries of the package."""
    return [value for value in vars(registries).values() if isinstance(value, Registry)]


def _summary(extension: Any) -> str:
    """Return an object's summary, its line, a row as an example, or the first line of its docstring."""
    for attribute in ("summary", "line"):
        if isinstance(text := getattr(extension, attribute, None), str):
            return text
    if example := getattr(extension, "example", None):
        return f"rows such as {json.dumps(example)}"
    return (inspect.getdoc(extension) or "").partition("\n")[0]


def command_reference() -> str:
    """Return the reference of every command with its options, from what `--help` shows."""
    lines = ["# Commands", "", "Generated from `trainwright COMMAND --help` of this version."]
    for path, command, context in _commands(typer.main.get_command(app), ("trainwright",), None):
        lines += ["", f"{'#' * min(len(path), 4)} `{' '.join(path)}`", "", _paragraphs(command.help or "")]
        records = [parameter.get_help_record(context) for parameter in command.params]
        rows = [f"| `{_in_table(names)}` | {_text(about)} |" for names, about in filter(None, records)]
        if rows:
            lines += ["", "| Option | Meaning |", "| --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _commands(command: Any, path: tuple[str, ...], parent: Any) -> list[tuple[tuple[str, ...], Any, Any]]:
    """Return a command and all under it, each with its words and the context that it is parsed in."""
    context = typer.Context(command, info_name=path[-1], parent=parent)
    found = [(path, command, context)]
    for name, each in getattr(command, "commands", {}).items():
        found += _commands(each, (*path, name), context)
    return found


def _in_table(code: str) -> str:
    return code.replace("|", r"\|")


def _paragraphs(text: str) -> str:
    return "\n\n".join(_text(paragraph) for paragraph in text.replace("\b", "").split("\n\n"))
