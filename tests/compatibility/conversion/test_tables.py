"""Every row of every table against the schema: its keys, its values, its functions, and what it names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter

from trainwright.compatibility.conversion.convert import NULL, Rule, list_tools, load_table
from trainwright.data.rows.chat_templates import resolve_template
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import OBSERVERS
from trainwright.recipe.schema import build_recipe_model
from trainwright.recipe.sections.data import SourceSection

_TABLES = [*list_tools(), "transformers", "peft", "launcher"]
_OF_ITEMS = {"config", "split", "files", "directory", "fraction", *SourceSection.model_fields}
_USES = ("train", "validation", "forget", "retain")
_ACTIONS = ("over", "drop", "refuse", "differs", "aside", "value", "note")


def section_of(kind: Any) -> type[BaseModel] | None:
    kinds = [kind, *getattr(kind, "__args__", ())]
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)


def check(key: str, *values: Any) -> None:
    """Check that a recipe has the key, and that it may have the values."""
    if key.startswith("@"):
        use, _, name = key[1:].partition(".")
        assert use in _USES and name.partition(".")[0] in _OF_ITEMS, key
        return
    path, model, index = key.split("."), build_recipe_model(), re.search(r"\[(\d+)\]$", key)
    for number, part in enumerate(path):
        name = re.sub(r"\[\d+\]$", "", part)
        assert name in model.model_fields, f"{key}: a recipe has no {name} there"
        field = model.model_fields[name]
        inner = section_of(field.annotation)
        if number + 1 < len(path) and inner is None:
            assert field.annotation in (dict[str, Any],) or "dict" in str(field.annotation), key
            return
        if inner is not None:
            model = inner
    assert index is None or "tuple" in str(field.annotation), key
    for value in values:
        kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        TypeAdapter(kind).validate_python(None if value == NULL else value)


def pairs(rule: Rule) -> Iterator[tuple[str, list[Any]]]:
    """Yield the keys of ours that a rule sets, each with the values that the table has."""
    values: dict[str, list[Any]] = {rule.to: []} if rule.to is not None and rule.by is None else {}
    for ours in rule.values.values():
        if not isinstance(ours, dict):
            assert rule.to is not None
            values[rule.to].append(ours)
            continue
        if "value" in ours:
            assert rule.to is not None
            values[rule.to].append(ours["value"])
        for key in ours.keys() - set(_ACTIONS):
            values.setdefault(key, []).append(ours[key])
    yield from values.items()


@pytest.mark.parametrize("name", _TABLES)
def test_every_key_that_a_table_sets_is_one_of_the_recipe_and_may_have_its_values(name: str) -> None:
    rows = [(key, values) for rule in load_table(name).rules.values() for key, values in pairs(rule)]
    assert rows
    for key, values in rows:
        check(key, *values)
        if key == "model.chat_template":
            assert all(resolve_template(value) for value in values)


@pytest.mark.parametrize("name", _TABLES)
def test_every_rule_does_something(name: str) -> None:
    for key, rule in load_table(name).rules.items():
        actions = (rule.to, rule.drop, rule.refuse, rule.by, rule.alias, rule.values or None)
        assert any(action is not None for action in actions), key
        for value, ours in rule.values.items():
            assert value == value.lower(), f"{key}: values are compared in lower case: {value}"
            if isinstance(ours, dict):
                assert {"drop", "refuse", "value"} & ours.keys() or ours.keys() - set(_ACTIONS), f"{key}: {value}"
        assert rule.by is None or rule.refuse is None, key


@pytest.mark.parametrize("name", _TABLES)
def test_every_function_exists_and_takes_the_keys_that_a_rule_passes(name: str) -> None:
    for key, rule in load_table(name).rules.items():
        if rule.by is not None:
            function = load(f"trainwright.compatibility.conversion.{rule.by}", "a function")
            inspect.signature(function).bind(None, None, rule, **rule.arguments)
            for other in rule.arguments.values():
                assert load_table(name).rule(other) is not None, f"{key}: {other} is no key of the table"


@pytest.mark.parametrize("name", _TABLES)
def test_every_key_that_a_rule_names_has_a_rule(name: str) -> None:
    tool = load_table(name)
    for key, rule in tool.rules.items():
        for other in (*rule.over, *rule.needs, *([rule.alias] if rule.alias else [])):
            assert tool.rule(other) is not None, f"{key}: {other} is no key of the table"
        assert rule.alias is None or tool.rules[rule.alias].alias is None, key
    for when, values in tool.defaults:
        for key in (*when, *values):
            assert tool.rule(key) is not None, f"default {key}"


@pytest.mark.parametrize("name", _TABLES)
def test_a_key_of_a_table_is_written_once(name: str) -> None:
    """In groups: a key of its own under [keys] replaces one of an included table, and no other."""
    from trainwright.compatibility.conversion.convert import read_document

    document = read_document(name)
    groups = [*document.get("without_effect", []), *document.get("not_possible", [])]
    words = [word for group in groups for word in group["keys"].split()]
    assert sorted({word for word in words if words.count(word) > 1}) == []
    assert sorted(set(words) & document.get("keys", {}).keys()) == []


@pytest.mark.parametrize(("name", "key"), [("transformers", "optim"), ("trl", "optim"), ("axolotl", "optimizer")])
def test_every_optimizer_of_transformers_is_taken_or_refused_with_a_reason(name: str, key: str) -> None:
    from transformers.training_args import OptimizerNames

    rule = load_table(name).rule(key)
    assert rule is not None
    assert {one.value for one in OptimizerNames} - rule.values.keys() == set()


def test_a_rule_of_the_longest_pattern_counts() -> None:
    tool = load_table("axolotl")
    assert tool.rule("wandb_project") is tool.rules["wandb_project"] and tool.rule("wandb_name") is not None
    assert tool.rule("datasets[].path") is tool.rules["datasets[].path"] and tool.rule("no_such_key") is None


def test_trackers_are_observers() -> None:
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        assert name in OBSERVERS.names()
