"""The tables of other tools' keys: what each becomes in a recipe. They are TOML files in ``tables``, without code.

A table has

- ``name``, ``source``: the tool, and where its keys are documented;
- ``recognized_by``: lists of keys; a file with all keys of one of them is the tool's;
- ``include``: tables of keys that the tool shares with others, each with the prefix that they have here;
- ``[keys]``: a key of the tool, and its rule (`Rule`); ``[]`` is an item of a list, ``*`` any text;
- ``[[without_effect]]``, ``[[not_possible]]``: keys, and the reason that they share;
- ``[[defaults]]``: what the tool does without a key, for files with all values of ``when``; the last that fits counts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "tables"
NULL = "null"  # TOML has no null


@dataclass(frozen=True)
class Rule:
    """What a key becomes.

    Attributes:
        to: our key that gets the value, ``section.key``; with ``[0]``, an item of it; with a first dot, a key of the
            item's source.
        values: by the tool's value, ours (`NULL` for null); or a table with ``value`` and a ``note``, or with ``drop``
            or ``refuse`` in place of a value, or with values of several keys by their names.
        others: whether values that are not in ``values`` stay as they are; otherwise they are not possible.
        drop: why the key has no effect here.
        refuse: what the key does, which is not possible here; not if it is ``off``.
        by: a function of ``functions.py`` that computes the values, with the keys of the tool in ``with``.
        off: further values with which the key asks for nothing.
        over: keys of the tool that have no effect if this one has a value.
        note: what differs although training is the same.
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
    aside: str | None = None
    alias: str | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """The table of a tool."""

    name: str
    source: str
    recognized_by: tuple[tuple[str, ...], ...]
    rules: Mapping[str, Rule]
    defaults: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]

    def rule(self, pattern: str) -> Rule | None:
        """Return the rule of a key, whose places in lists are written ``[]``: its own, or that of the longest match."""
        if pattern in self.rules:
            return self.rules[pattern]
        near = [name for name in self.rules if "*" in name and fnmatchcase(pattern, name.replace("[]", "[[]]"))]
        return self.rules[max(near, key=len)] if near else None

    def has_rules_inside(self, pattern: str) -> bool:
        """Return whether keys inside a key have rules of their own."""
        return any(name.startswith((f"{pattern}.", f"{pattern}[]")) for name in self.rules)


def names() -> list[str]:
    """Return the names of the tools, in the order in which files are recognized."""
    return ["open-unlearning", "torchtune", "axolotl", "llamafactory", "unsloth", "trl"]


@cache
def table(name: str) -> Table:
    """Return the table of a tool."""
    document = read_document(name)
    rules: dict[str, Rule] = {}
    defaults: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for included in document.get("include", []):
        base = table(included["table"])
        for prefix in included.get("prefixes", [""]):
            rules |= {prefix + key: _under(rule, prefix) for key, rule in base.rules.items()}
            defaults += [(_keys_under(when, prefix), _keys_under(values, prefix)) for when, values in base.defaults]
    for group in document.get("without_effect", []):
        rules |= {key: Rule(drop=group["reason"]) for key in group["keys"].split()}
    for group in document.get("not_possible", []):
        rule = Rule(refuse=group["reason"], off=tuple(group.get("off", ())), aside=group.get("aside"))
        rules |= dict.fromkeys(group["keys"].split(), rule)
    rules |= {key: _rule(written) for key, written in document.get("keys", {}).items()}
    defaults += [(item.get("when", {}), item["values"]) for item in document.get("defaults", [])]
    recognized = tuple(tuple(keys.split()) for keys in document.get("recognized_by", []))
    return Table(document["name"], document["source"], recognized, rules, tuple(defaults))


def read_document(name: str) -> dict[str, Any]:
    """Return a table as its file has it."""
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _rule(written: Any) -> Rule:
    if isinstance(written, str):
        return Rule(to=written)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
    fields["arguments"] = fields.pop("with", {})
    return Rule(**fields)


def _keys_under(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in values.items()}


def _under(rule: Rule, prefix: str) -> Rule:
    """Return a rule that names keys below a prefix."""
    changes: dict[str, Any] = {
        "arguments": {name: prefix + key for name, key in rule.arguments.items()},
        "over": tuple(prefix + key for key in rule.over),
        "needs": _keys_under(rule.needs, prefix),
        "alias": rule.alias and prefix + rule.alias,
    }
    return replace(rule, **changes) if prefix else rule
