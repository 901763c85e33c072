"""Convert the keys of another tool to a recipe: apply the rules of its table, and say what became of each key.

Tables are TOML files in ``tables``, without code. One has

- ``name``, ``source``: the tool, and where its keys are documented;
- ``recognized_by``: lists of keys; a file with all keys of one of them is the tool's;
- ``include``: tables of keys that the tool shares with others, each with the prefix that they have here;
- ``[keys]``: a key of the tool, and its rule (`Rule`); ``[]`` is an item of a list, ``*`` any text;
- ``[[without_effect]]``, ``[[not_possible]]``: keys, and the reason that they share;
- ``[[defaults]]``: what the tool does without a key, for files with all values of ``when``, or of one of several; the
  last that fits counts.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainwright.compatibility.conversion.script_values import Code, is_absent
from trainwright.compatibility.conversion.scripts import find_file_near, format_value
from trainwright.compatibility.conversion.shell import LAUNCHER
from trainwright.data.sources.row_files import READERS, iterate_rows, parse_suffix
from trainwright.errors import RequestError
from trainwright.recipe.extensions import load
from trainwright.recipe.loading import check_tree
from trainwright.recipe.schema import build_recipe_model
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, format_key_path

NULL = "null"  # TOML has no null
PASS_ROWS = "write the rows that reach the trainer to a file, and pass --train FILE"


@dataclass(frozen=True)
class Rule:
    """What a key becomes.

    Attributes:
        to: our key that gets the value, ``section.key``; with ``[0]``, an item of it; with a first dot, a key of the
            item's source.
        values: by the tool's value, ours (`NULL` for null); or a table with ``value`` and a ``note``, or with ``drop``
            or ``refuse`` in place of a value, or with values of several keys by their names; ``over``: as below,
            of this value alone.
        others: whether values that are not in ``values`` stay as they are; otherwise they are not possible.
        drop: why the key has no effect here.
        refuse: what the key does, which is not possible here; not if it is ``off``.
        by: a function of ``functions.py`` that computes the values, with the keys of the tool in ``with``.
        off: further values with which the key asks for nothing.
        over: keys of the tool that have no effect if this one has a value.
        note: what differs although training is the same.
        differs: whether something does that ``drop`` says.
        aside: the kind of training or data that the key asks for, if that is not what we do.
        alias: another key of the tool, of which this is an older or a shorter name.
        needs: by another key of the tool, the values with one of which this key has an effect; ``*``: any value.
    """

    to: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    others: bool = False
    drop: str | None = None
    refuse: str | None = None
    by: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    off: tuple[Any, ...] = ()
    over: tuple[str, ...] = ()
    note: str | None = None
    differs: bool = False
    aside: str | None = None
    alias: str | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """The table of a tool.

    Attributes:
        ignores_others: whether the tool ignores keys that it does not have, such as those of another tool.
        of_rows: by use (train, validation), patterns of the keys that say where rows are and how they are made.
    """

    name: str
    source: str
    ignores_others: bool
    recognized_by: tuple[tuple[str, ...], ...]
    rules: Mapping[str, Rule]
    defaults: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]
    of_rows: Mapping[str, tuple[str, ...]]

    def rule(self, pattern: str) -> Rule | None:
        """Return the rule of a key, whose places in lists are written ``[]``: its own, or that of the longest match."""
        if pattern in self.rules:
            return self.rules[pattern]
        near = [name for name in self.rules if "*" in name and _is_match(pattern, name)]
        return self.rules[max(near, key=len)] if near else None

    def is_of_rows(self, pattern: str, use: str = "train") -> bool:
        """Return whether a key says where rows are, or how they are made."""
        return any(_is_match(pattern, name) for name in self.of_rows.get(use, ()))

    def has_rules_inside(self, pattern: str) -> bool:
        """Return whether keys inside a key have rules of their own."""
        return any(name.startswith((f"{pattern}.", f"{pattern}[]")) for name in self.rules)


def _is_match(key: str, name: str) -> bool:
    """Return whether a key is one of those that a name of a table stands for."""
    return fnmatchcase(key, name.replace("[]", "[[]]"))


def list_tools() -> list[str]:
    """Return the names of the tools, in the order in which files are recognized."""
    return ["open-unlearning", "torchtune", "axolotl", "llamafactory", "unsloth", "trl"]


@cache
def load_table(name: str) -> Table:
    """Return the table of a tool."""
    document = read_document(name)
    rules: dict[str, Rule] = {}
    of_rows: dict[str, tuple[str, ...]] = {}
    defaults: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for include in document.get("include", []):
        base = load_table(include["table"])
        for prefix in include.get("prefixes", [""]):
            rules |= {prefix + key: _prefix_rule(rule, prefix) for key, rule in base.rules.items()}
            defaults += [(_prefix_keys(when, prefix), _prefix_keys(values, prefix)) for when, values in base.defaults]
        of_rows |= base.of_rows
    for group in document.get("without_effect", []):
        rules |= {key: Rule(drop=group["reason"]) for key in group["keys"].split()}
    for group in document.get("not_possible", []):
        rule = Rule(refuse=group["reason"], off=tuple(group.get("off", ())), aside=group.get("aside"))
        rules |= dict.fromkeys(group["keys"].split(), rule)
    rules |= {key: _parse_rule(entry) for key, entry in document.get("keys", {}).items()}
    for item in document.get("defaults", []):
        whens = item.get("when", {})
        defaults += [(when, item["values"]) for when in (whens if isinstance(whens, list) else [whens])]
    recognized_keys = tuple(tuple(keys.split()) for keys in document.get("recognized_by", []))
    for use, patterns in document.get("of_rows", {}).items():
        of_rows[use] = (*of_rows.get(use, ()), *patterns.split())
    ignores_others = document.get("ignores_others", False)
    return Table(document["name"], document["source"], ignores_others, recognized_keys, rules, tuple(defaults), of_rows)


def read_document(name: str) -> dict[str, Any]:
    """Return a table as its file has it."""
    return tomllib.loads((Path(__file__).with_name("tables") / f"{name}.toml").read_text(encoding="utf-8"))


def _parse_rule(written: Any) -> Rule:
    if isinstance(written, str):
        return Rule(to=written)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
    fields["arguments"] = fields.pop("with", {})
    return Rule(**fields)


def _prefix_keys(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in values.items()}


def _prefix_rule(rule: Rule, prefix: str) -> Rule:
    """Return a rule that names keys below a prefix."""
    values = {
        word: {**ours, "over": [prefix + key for key in ours["over"]]}
        if isinstance(ours, dict) and "over" in ours
        else ours
        for word, ours in rule.values.items()
    }
    changes: dict[str, Any] = {
        "values": values,
        "arguments": {name: prefix + key for name, key in rule.arguments.items()},
        "over": tuple(prefix + key for key in rule.over),
        "needs": _prefix_keys(rule.needs, prefix),
        "alias": rule.alias and prefix + rule.alias,
    }
    return replace(rule, **changes) if prefix else rule


Status = Literal["taken", "computed", "dropped", "needs", "not possible", "unknown"]
STATUSES: tuple[Status, ...] = ("taken", "computed", "dropped", "needs", "not possible", "unknown")
FAILED: tuple[Status, ...] = ("needs", "not possible", "unknown")

_FUNCTIONS = "trainwright.compatibility.conversion"
# Functions that read expressions of scripts.
_OF_CODE = (
    *("unsloth:", "functions:precision", "functions:model_name", "functions:observers", "llamafactory:precision"),
    "torchtune:model",
)
_AROUND = ("functions:read_launcher", "sources:set_sources")
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_OFF_WORDS = ("none", "false", "no", "null", "off")
_INDEX = re.compile(r"\[\d+\]")
_UNRESOLVED = re.compile(r"\$\{[\w.:,/-]+\}")  # a variable of Hydra or of a shell


class Setting(NamedTuple):
    """A key of the tool with its value. ``pattern``: the key as tables have it, with ``[]`` for places in lists."""

    key: str
    pattern: str
    value: Any
    origin: Origin
    is_default: bool = False

    @property
    def is_on(self) -> bool:
        """Whether the value asks for anything."""
        value = self.value
        return not (value in _OFF or (isinstance(value, str) and value.lower() in _OFF_WORDS))


class ResultLine(NamedTuple):
    """What became of a key.

    ``text``: our key and value, or the reason. ``differs``: it is done in another way with the same training.
    ``aside``: the kind of training or data that is asked for, if that is not what we do.
    """

    status: Status
    setting: Setting
    text: str
    differs: bool = False
    aside: str | None = None


@dataclass(frozen=True)
class Options:
    """What configurations do not have: numbers of processes, of training rows and of the model's blocks, and files with
    the rows that a script makes.
    """

    processes: int | None = None
    rows: int | None = None
    layers: int | None = None
    train: Path | None = None
    validation: Path | None = None


@dataclass
class Conversion:
    """A configuration as a recipe.

    Attributes:
        tool: the table of its tool.
        file: where it was read.
        options: what is known beside the file.
        lines: what became of each key.
        values: our values by dotted key, each with the setting that decided it.
        sources: by use (train, validation, forget, retain), the sources, each with its keys.
    """

    tool: Table
    file: Path
    options: Options
    settings: dict[str, Setting] = field(default_factory=dict)
    lines: list[ResultLine] = field(default_factory=list)
    values: dict[str, tuple[Any, Setting]] = field(default_factory=dict)
    sources: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """Return the value of a key of the tool, which may be its default; None if there is none."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value

    def is_on(self, key: str) -> bool:
        """Return whether a key of the tool asks for anything."""
        setting = self.settings.get(key)
        return setting is not None and setting.is_on

    def has_effect(self, key: str) -> bool:
        """Return whether a key of the tool asks for anything, beside the keys that its rule needs."""
        rule = self.tool.rule(_INDEX.sub("[]", key))
        return self.is_on(key) and rule is not None and all(_is_met(self, *need) for need in rule.needs.items())

    @property
    def processes(self) -> int:
        """The number of processes, 1 if nothing says another."""
        return self.options.processes or 1

    def take(self, setting: Setting, key: str, value: Any, note: str | None = None, *, computed: str = "") -> None:
        """Set our key; with ``@train.source`` and the like, a key of the item's source."""
        if isinstance(value, Code) or (isinstance(value, str) and _UNRESOLVED.search(value)):
            self.need_value(setting)
            return
        if key.startswith("@"):
            use, _, name = key[1:].partition(".")
            self.source(use, setting)[name] = value
            text = f"data.{use}: {name} {format_value(value)}"
        else:
            earlier = self.values.get(key)
            if earlier is not None and earlier[0] != value:
                if setting.is_default:
                    return
                if not earlier[1].is_default:
                    earlier_text = (
                        f"{earlier[1].key} on line {earlier[1].origin.line}, which means {format_value(earlier[0])}"
                    )
                    self.refuse(
                        setting,
                        f"means {key}: {format_value(value)}, and contradicts {earlier_text}; remove one of the two",
                    )
                    return
            if earlier is None or earlier[0] != value or earlier[1].is_default:
                self.values[key] = (value, setting)
            text = f"{key}: {format_value('null' if value is None else value)}"
        text += f" ({computed})" if computed else ""
        text += f"; {note}" if note else ""
        self.add("computed" if computed else "taken", setting, text, differs=note is not None)

    def source(self, use: str, setting: Setting) -> dict[str, Any]:
        """Return the keys of the source that a setting is of."""
        items = self.sources.setdefault(use, {})
        indices = _INDEX.search(setting.key)
        return items.setdefault(setting.key[: indices.end()] if indices else "", {"setting": setting})

    def drop(self, setting: Setting, reason: str, *, differs: bool = False) -> None:
        """Say why a key has no effect; of a default, only if it differs."""
        if not setting.is_default or differs:
            self.add("dropped", setting, reason, differs=differs)

    def refuse(self, setting: Setting, reason: str, aside: str | None = None) -> None:
        """Say what a key would have done; of rows, that they can be passed instead."""
        if aside is None and self.tool.is_of_rows(setting.pattern):
            self.need(setting, f"{reason}; {PASS_ROWS}")
        else:
            self.add("not possible", setting, reason, aside=aside)

    def need_value(self, setting: Setting) -> None:
        """Say that only the script, or whoever starts it, knows a value; or which file has it that is not there."""
        if is_absent(setting.value):
            name = str(ast.literal_eval(setting.value.partition("(")[2].removesuffix(")")))
            file = Setting(name, name, setting.value, Origin(str(self.file)))
            why = "the script loads its settings from it, and it is not there"
            self.need(file, f"{why}; put it there, or pass the option that names it")
            return
        why = "the script computes it" if isinstance(setting.value, Code) else "it is set elsewhere"
        self.need(setting, f"{why}: {format_value(setting.value)}; pass {setting.key}=VALUE")

    def need(self, setting: Setting, what: str) -> None:
        """Say which number is missing, and how to pass it."""
        self.add("needs", setting, what)

    def add(
        self, status: Status, setting: Setting, text: str, *, differs: bool = False, aside: str | None = None
    ) -> None:
        """Add a line; a key that depends on another's value may be explained only once."""
        line = ResultLine(status, setting, text, differs, aside)
        if line not in self.lines:
            self.lines.append(line)

    @property
    def failures(self) -> list[ResultLine]:
        """The lines of what is not in the recipe."""
        return [line for line in self.lines if line.status in FAILED]

    @property
    def kind(self) -> Literal["as it is", "harmlessly", "computed", "not", "aside"]:
        """How much of the file is in the recipe: aside, if it is for a kind of training that we do not do."""
        statuses = {line.status for line in self.lines}
        if any(line.aside for line in self.lines):
            return "aside"
        if statuses & {"not possible", "unknown"}:
            return "not"
        if "needs" in statuses:
            return "computed"
        return "harmlessly" if any(line.differs for line in self.lines) else "as it is"

    def recipe(self) -> Tree:
        """Return our values as a recipe's tree, with the places of the settings that decided them."""
        tree = Tree(file=self.file)
        for key, (value, setting) in self.values.items():
            path, index = _parse_path(key)
            inside = tree.values
            for part in path[:-1]:
                inside = inside.setdefault(str(part), {})
            if index is not None:
                items = inside.setdefault(str(path[-1]), list(_look_up_default(path)))
                items[index] = value
            else:
                inside[str(path[-1])] = deepcopy(value)
            tree.origins[path] = setting.origin
        order = ["task", *build_recipe_model().model_fields]
        tree.values = dict(sorted(tree.values.items(), key=lambda item: order.index(item[0])))
        return tree


def recognize(tree: Tree) -> Table | None:
    """Return the table of the tool that a file is for; None if it is for none of them."""
    keys = {setting.pattern for setting in _flatten(tree.values, (), tree, None)}
    words = {*keys, *(".".join(key.split(".")[:at]) for key in keys for at in range(1, key.count(".") + 1))}
    for name in list_tools():
        candidate = load_table(name)
        if any(set(required_keys) <= words for required_keys in candidate.recognized_by):
            return candidate
    return None


def convert(tree: Tree, tool: Table, options: Options) -> Conversion:
    """Return the conversion of what was read from a file of ``tool``. What is not possible is in its lines."""
    conversion = Conversion(tool, tree.file or Path(str(tree)), options)
    named_settings = [_rename_setting(setting, tool) for setting in _flatten(tree.values, (), tree, tool)]
    for problem in tree.problems:
        text = problem.message.replace("keep one of the two", "the later one counts, as for the tool")
        conversion.drop(
            Setting(text.partition(":")[0], "", None, problem.origin), text.partition(": ")[2], differs=True
        )
    conversion.settings = {setting.key: setting for setting in named_settings}
    _add_program(conversion)
    _add_defaults(conversion)
    before, after = (load(f"{_FUNCTIONS}.{name}", "a function of conversions") for name in _AROUND)
    before(conversion)
    _replace_rows(conversion)
    overruling_settings = {
        key: setting for setting in conversion.settings.values() for key in _iterate_overruled(setting, tool)
    }
    for setting in list(conversion.settings.values()):
        overruling_setting = overruling_settings.get(setting.key)
        if setting.key not in conversion.settings:
            continue  # another key has decided that it has no effect
        if overruling_setting is not None:
            conversion.drop(setting, f"has no effect beside {overruling_setting.key}")
            continue
        _apply(conversion, setting, tool.rule(setting.pattern))
    after(conversion)
    _stream_if_possible(conversion)
    _validate(conversion)
    return conversion


_BEFORE_TEXTS = {"messages", "conversations", "prompt", "chosen"}  # columns that count before a text (TRL)
_ALL_TOKENS = "DataCollatorForLanguageModeling"
TEXT_FIELDS = ("SFTTrainer.dataset_text_field", "dataset_text_field")


def is_text_first(conversion: Conversion) -> bool:
    """Return whether the column of texts counts before turns: for Unsloth and, if it is named, for TRL before it had a
    configuration of its own.
    """
    whose = conversion.value("trainer_arguments")
    text_settings = [conversion.settings[key] for key in TEXT_FIELDS if key in conversion.settings]
    return whose == "unsloth" or (whose == "transformers" and not all(setting.is_default for setting in text_settings))


def _replace_rows(conversion: Conversion) -> None:
    """Take the rows of the options' files in place of the configuration's."""
    options = conversion.options
    field = next(filter(None, map(conversion.value, TEXT_FIELDS)), "text")
    is_first = is_text_first(conversion)
    for use, file in (("train", options.train), ("validation", options.validation)):
        if file is None and (use == "train" or options.train is None):
            continue
        why = "pass --validation FILE for these rows" if file is None else f"the rows are those of {file}"
        for setting in list(conversion.settings.values()):
            if conversion.tool.is_of_rows(setting.pattern, use):
                del conversion.settings[setting.key]
                if setting.pattern.endswith(".drop_system_message") and setting.is_on:
                    conversion.take(setting._replace(key="--train"), "@train.drop_system_message", True)
                    continue
                conversion.drop(setting, why, differs=file is None and not setting.is_default)
        if file is not None:
            _take_rows(conversion, use, file, field, is_first)


def _take_rows(conversion: Conversion, use: str, file: Path, field: str, is_first: bool) -> None:
    """Take the rows of a file; ``field``: the column of texts that is trained on; ``is_first``: before turns.

    Raises:
        RequestError: the file is not there, has no rows, or rows of another kind than those to train on.
    """
    option = Setting(f"--{use}", f"--{use}", str(file), Origin(f"--{use}"))
    conversion.take(option, f"@{use}.source", str(file))
    columns = set(_read_first_row(option, file))
    is_text = field in columns and (is_first or not _BEFORE_TEXTS & columns)
    is_read = TEXT_FIELDS[-1] in conversion.tool.rules
    kind = "tokens" if "input_ids" in columns else "text" if is_text and is_read else None
    if use == "validation":
        if conversion.options.train is not None and conversion.source("train", option).get("format") != kind:
            raise RequestError(f"--validation {file}: has rows of another kind than {conversion.options.train}")
        return
    if kind is not None:
        conversion.take(option, "@train.format", kind)
    if kind == "text":
        conversion.take(option, "@train.columns.text", field)
    if kind == "tokens" and {"labels", "assistant_masks"} & columns:
        conversion.take(option, "data.targets", "answers", computed="what is marked in the rows")
        if "labels" in columns and any(key.startswith(_ALL_TOKENS) for key in conversion.settings):
            conversion.need(option, f"has labels, which {_ALL_TOKENS} replaces by all tokens: leave them out of it")
    elif "completion" in columns and conversion.settings.get("completion_only_loss", option).is_default:
        conversion.take(option, "data.targets", "answers", computed="the completions, as TRL does by default")
    if kind == "tokens" and conversion.value("trainer_arguments") == "transformers":  # whose Trainer does not cut rows
        longest = 0
        for line, row in iterate_rows(file):
            if not isinstance(ids := row.get("input_ids"), list):
                raise RequestError(f"{file}:{line}: input_ids should be a list of token ids")
            longest = max(longest, len(ids))
        conversion.settings["max_length"] = Setting("max_length", "max_length", longest, option.origin)


def _read_first_row(option: Setting, file: Path) -> dict[str, Any]:
    if file.is_dir() or parse_suffix(file) not in READERS:
        raise RequestError(f"{option.key} {file}: is no file of rows; they have the endings {', '.join(READERS)}")
    row = next((row for _, row in iterate_rows(file)), None)
    if row is None:
        raise RequestError(f"{option.key} {file}: has no rows")
    return dict(row)


def _apply(conversion: Conversion, setting: Setting, rule: Rule | None) -> None:
    if rule is None:
        if setting.key.startswith(f"{LAUNCHER}."):
            conversion.drop(setting, "is for the launcher; see trainwright train --help")
        elif f"${{{setting.key}}}" in _read_text(conversion.file):
            conversion.drop(setting, "is read where other keys name it")
        elif conversion.tool.ignores_others and _is_key_of_another(setting.pattern):
            conversion.drop(setting, f"is no key of {conversion.tool.name}, which ignores it", differs=True)
        else:
            conversion.add("unknown", setting, f"is no key that the table of {conversion.tool.name} has")
        return
    unmet = [key for key, values in rule.needs.items() if not _is_met(conversion, key, values)]
    if unmet:
        conversion.drop(setting, f"has no effect with {unmet[0]}: {format_value(conversion.value(unmet[0]))}")
        return
    word = _normalize_value(setting.value)
    if is_absent(setting.value) and rule.drop is None:
        conversion.need_value(setting)
    elif word in rule.values:
        _apply_value(conversion, setting, rule, rule.values[word])
    elif rule.by is not None:
        _compute(conversion, setting, rule, rule.by)
    elif not setting.is_on or setting.value in rule.off or word in map(_normalize_value, rule.off):
        if rule.to is not None and setting.value not in (None, "", [], {}) and not rule.values:
            conversion.take(setting, rule.to, setting.value, rule.note)
        else:
            conversion.drop(setting, "asks for nothing" if rule.drop is None else rule.drop)
    elif rule.refuse is not None and isinstance(setting.value, Code) and rule.values:
        conversion.need_value(setting)
    elif rule.refuse is not None:
        conversion.refuse(setting, rule.refuse, rule.aside)
    elif rule.drop is not None:
        conversion.drop(setting, rule.drop, differs=rule.differs)
    elif isinstance(setting.value, Code):
        conversion.need_value(setting)
    elif rule.values and not rule.others:
        conversion.refuse(
            setting, f"{format_value(setting.value)} is not supported; {', '.join(rule.values)} are", rule.aside
        )
    elif rule.to is not None:
        conversion.take(setting, rule.to, setting.value, rule.note)


def _is_key_of_another(pattern: str) -> bool:
    return any(pattern in load_table(name).rules for name in list_tools())


def _compute(conversion: Conversion, setting: Setting, rule: Rule, by: str) -> None:
    if isinstance(setting.value, Code) and not by.startswith(_OF_CODE):
        conversion.need_value(setting)
        return
    code_keys = [key for key in rule.arguments.values() if isinstance(conversion.value(key), Code)]
    if code_keys and not by.startswith(_OF_CODE):
        if is_absent(conversion.value(code_keys[0])):
            conversion.need_value(conversion.settings[code_keys[0]])
            return
        conversion.need(setting, f"counts with {code_keys[0]}, which the script computes; pass {code_keys[0]}=VALUE")
        return
    function = load(f"{_FUNCTIONS}.{by}", "a function of conversions")
    try:
        function(conversion, setting, rule, **rule.arguments)
    except (TypeError, ValueError, ArithmeticError):  # a text where the tool has a number, and the like
        conversion.refuse(
            setting, f"has a value that {conversion.tool.name} does not take: {format_value(setting.value)}"
        )


@cache
def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="ignore") if file.is_file() else ""


def _apply_value(conversion: Conversion, setting: Setting, rule: Rule, ours: Any) -> None:
    if not isinstance(ours, dict):
        if rule.to is not None:
            conversion.take(setting, rule.to, None if ours == NULL else ours, rule.note)
        return
    ours = {key: value for key, value in ours.items() if key != "over"}
    if (reason := ours.pop("refuse", None)) is not None:
        conversion.refuse(setting, reason, ours.get("aside"))
    elif (reason := ours.pop("drop", None)) is not None:
        conversion.drop(setting, reason, differs=ours.get("differs", False))
    else:
        note = ours.pop("note", rule.note)
        if "value" in ours and rule.to is not None:
            ours[rule.to] = ours.pop("value")
        for key, value in ours.items():
            conversion.take(setting, key, None if value == NULL else value, note)


def _is_met(conversion: Conversion, key: str, values: Any) -> bool:
    if values == "*":
        return conversion.is_on(key)
    return _normalize_value(conversion.value(key)) in (values if isinstance(values, list) else [values])


def _normalize_value(value: Any) -> str:
    """Return a value as tables have it: in lower case, whole numbers without a point."""
    if value is None:
        return NULL
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower()


def _iterate_overruled(setting: Setting, tool: Table) -> Iterator[str]:
    rule = tool.rule(setting.pattern)
    if rule is not None and setting.is_on and not setting.is_default:
        ours = rule.values.get(_normalize_value(setting.value))
        values = ours if isinstance(ours, dict) else {}
        yield from () if "drop" in values else (*rule.over, *values.get("over", ()))


def _rename_setting(setting: Setting, tool: Table) -> Setting:
    """Return a setting by the key that it is another name of."""
    rule = tool.rule(setting.pattern)
    alias = rule.alias if rule is not None else None
    return setting if alias is None else setting._replace(key=alias, pattern=alias)


def _add_program(conversion: Conversion) -> None:
    """Add the program that a file without a command is for, if the file or its folder is named after it."""
    key = f"{LAUNCHER}.program"
    rule = conversion.tool.rules.get(key)
    if rule is not None and key not in conversion.settings:
        words = [word for part in reversed(conversion.file.absolute().parts[-2:]) for word in re.split(r"\W|_", part)]
        program = next((word for word in words if word in rule.values), None)
        if program is not None:
            origin = Origin(f"the name of {conversion.file}")
            conversion.settings[key] = Setting(key, key, program, origin, is_default=True)


def _add_defaults(conversion: Conversion) -> None:
    """Add what the tool does without a key. Later sets replace earlier ones, and may depend on them."""
    for when, values in conversion.tool.defaults:
        if all(_is_met(conversion, key, expected_value) for key, expected_value in when.items()):
            for key, value in values.items():
                present = conversion.settings.get(key)
                if present is None or present.is_default:
                    origin = Origin(f"{conversion.tool.name} by default")
                    conversion.settings[key] = Setting(key, key, value, origin, is_default=True)


def _flatten(value: Any, path: KeyPath, tree: Tree, tool: Table | None) -> Iterator[Setting]:
    key = format_key_path(path)
    pattern = _INDEX.sub("[]", key)
    is_known = tool is not None and pattern in tool.rules and not tool.has_rules_inside(pattern)
    if isinstance(value, dict) and value and not is_known:
        for name, item in value.items():
            yield from _flatten(item, (*path, name), tree, tool)
    elif isinstance(value, list) and not is_known and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, (*path, index), tree, tool)
    elif path:
        origin = next((tree.origins[path[:at]] for at in range(len(path), 0, -1) if path[:at] in tree.origins), None)
        yield Setting(key, pattern, value, origin or Origin(str(tree)))


def _parse_path(key: str) -> tuple[KeyPath, int | None]:
    match = re.fullmatch(r"(.*)\[(\d+)\]", key)
    return (tuple(match[1].split(".")), int(match[2])) if match else (tuple(key.split(".")), None)


def _look_up_default(path: KeyPath) -> Any:
    section: Any = build_recipe_model()
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    return section.model_fields[path[-1]].default


def _stream_if_possible(conversion: Conversion) -> None:
    """Have the rows tokenized before training, if the rest of the recipe needs all of them then."""
    key = "data.streaming"
    if key not in conversion.values:
        return
    try:
        check_tree(conversion.recipe(), Origin(str(conversion.file)))
    except RequestError as error:
        if key in str(error):
            _, setting = conversion.values.pop(key)
            conversion.lines = [line for line in conversion.lines if line.setting != setting]
            conversion.drop(setting, "rows are read into a file, and tokenized before training")


def _validate(conversion: Conversion) -> None:
    """Add what the product's own schema says about the recipe, by the settings that decided its values."""
    if any(line.aside for line in conversion.lines):
        return
    try:
        check_tree(conversion.recipe(), Origin(str(conversion.file)))
    except RequestError as error:
        has_others = bool(conversion.failures)
        has_gaps = any(line.status == "needs" for line in conversion.lines)
        for line in str(error).splitlines():
            location, _, message = line.partition(": ")
            if not has_gaps and not (has_others and ": is missing." in message):  # it follows from the others
                conversion.refuse(Setting("", "", None, Origin(location)), message)


def find_named_file(conversion: Conversion, setting: Setting) -> Path | None:
    """Return the file that a setting names; None if it is not here."""
    return find_file_near(str(setting.value), conversion.file) if isinstance(setting.value, str) else None
