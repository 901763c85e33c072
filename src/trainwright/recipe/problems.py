"""Validation errors as messages for users: the place, the key, the expected value, the nearest known name."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainwright.errors import RequestError
from trainwright.recipe.schema import build_recipe_model, choose_recipe_model
from trainwright.recipe.sections.fields import Contradiction, Contradictions, Registered
from trainwright.recipe.synonyms import SECTIONS, OwnKey, look_up_key, look_up_value
from trainwright.recipe.yaml_text import KeyPath, Origin, Problem, Tree, format_key_path, quote_flow_text
from trainwright.utils.text import quote_word

_OF_MANY_KEYS = ("auto", "none")  # words that say nothing about the key
_MAX_UNKNOWN = 30  # unknown keys that are explained; the rest are counted

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "dataclass_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
    "too_short": "a list of at least {min_length}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
}


def explain(error: ValidationError, tree: Tree, file: Origin) -> list[Problem]:
    """Return every problem of an invalid recipe; ``file`` is the origin of values that are written nowhere."""
    model, details = _choose_model(tree), error.errors(include_url=False)
    unknown = [item for item in details if item["type"] == "extra_forbidden"]
    paths = [path for item in unknown for path in _iterate_foreign_keys(convert_location(item["loc"], model), tree)]
    suggestions = {path: _find_nearest(path, model, tree) for path in paths[:_MAX_UNKNOWN]}
    problems = [
        Problem(
            find_origin(path, tree, file),
            f"{format_key_path(path)}: unknown key{_suggest_key(path, near, model, tree)}",
        )
        for path, near in suggestions.items()
    ]
    if len(paths) > _MAX_UNKNOWN:
        next_ = paths[_MAX_UNKNOWN]
        more = f"{format_key_path(next_)}: and {len(paths) - _MAX_UNKNOWN:,} more unknown keys"
        problems.append(Problem(find_origin(next_, tree, file), more))
    keys = {path for path in suggestions.values() if not isinstance(path, str)}
    problems += _iterate_mistaken_values(details, keys, tree, file, model)
    return problems + explain_contradictions(extract_contradictions(error), tree, file)


def explain_contradictions(contradictions: list[Contradiction], tree: Tree, file: Origin) -> list[Problem]:
    """Return the contradictions as problems: those that one value written elsewhere causes are one problem, under that
    value and with what removes them all.
    """
    causes = [_list_written_elsewhere(item, tree) for item in contradictions]
    [(cause, count)] = Counter(key for keys in causes for key in keys).most_common(1) or [("", 0)]
    if count < 2:
        return [_locate_contradiction(item, tree, file) for item in contradictions]
    of_cause = [item for item, keys in zip(contradictions, causes, strict=True) if cause in keys]
    other_items = [item for item in contradictions if item not in of_cause]
    cause_problem = _build_cause_problem(cause, of_cause, contradictions, tree, file)
    return [cause_problem, *explain_contradictions(other_items, tree, file)]


def _list_written_elsewhere(contradiction: Contradiction, tree: Tree) -> list[str]:
    """Return the keys that contradict the first one from another file or an override."""
    sources = {key: origin.source for key, origin in _find_origins(contradiction, tree).items()}
    first, *other_keys = contradiction.keys
    return [key for key in other_keys if key in sources and first in sources and sources[key] != sources[first]]


def _build_cause_problem(
    cause: str, of_cause: list[Contradiction], contradictions: list[Contradiction], tree: Tree, file: Origin
) -> Problem:
    path = tuple(cause.split("."))
    origin, fix = tree.origins[path], ""
    lines = [str(_locate_contradiction(item, tree, file, origin)) for item in of_cause]
    if defaults := _find_defaults(of_cause, contradictions, tree):
        lines = [line.partition("; ")[0] for line in lines]
        fix = f", or add {' '.join(quote_word(f'{key}={value}') for key, value in defaults.items())}"
    head = (
        f"{cause}: {_format_value(_look_up_value(path, tree))} does not go with {len(of_cause)} values written "
        "elsewhere; change it"
    )
    return Problem(origin, "\n  ".join([head + fix, *lines]))


def _find_defaults(of_cause: list[Contradiction], contradictions: list[Contradiction], tree: Tree) -> dict[str, str]:
    """Return the keys whose defaults leave the recipe with none of its ``own`` contradictions of all that were
    ``contradictions``, and with no others, and these defaults as overrides have them; empty if they do not.
    """
    model, values, defaults, remaining = _choose_model(tree), deepcopy(tree.values), dict[str, str](), of_cause
    while remaining:
        for item in remaining:
            *above, last = item.keys[0].split(".")
            section, inside = _find_section_at(tuple(above), model), values
            field = section.model_fields.get(last) if section is not None else None
            if field is None or field.is_required() or item.keys[0] in defaults:
                return {}
            for part in above:
                inside = inside.setdefault(part, {})
            inside[last] = default = field.get_default(call_default_factory=True)
            defaults[item.keys[0]] = default if isinstance(default, str) else json.dumps(default, default=str)
        try:
            model.model_validate(values)
            remaining = []
        except ValidationError as error:
            remaining = [
                item for item in extract_contradictions(error) if item in of_cause or item not in contradictions
            ]
    return defaults


def check_placeholders(tree: Tree, file: Origin) -> Iterator[Problem]:
    """Yield a problem for every value that is a placeholder of Hydra; a text with spaces is a text."""
    stack: list[tuple[KeyPath, Any]] = [((), tree.values)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict | list):
            stack += [
                ((*path, key), item) for key, item in (value.items() if isinstance(value, dict) else enumerate(value))
            ]
        elif isinstance(value, str) and (
            value == "???" or ("}" in value.partition("${")[2] and len(value.split()) == 1)
        ):
            reason = "is Hydra's word for a missing value" if value == "???" else "is not replaced as in Hydra"
            yield Problem(
                find_origin(path, tree, file),
                f"{format_key_path(path)}: {_format_value(value)} {reason}; write the value",
            )


def extract_contradictions(error: ValidationError) -> list[Contradiction]:
    """Return the contradictions of checks.contradictions, extracted from pydantic's error."""
    causes = (item.get("ctx", {}).get("error") for item in error.errors(include_url=False))
    return [item for cause in causes if isinstance(cause, Contradictions) for item in cause.items]


def list_invalid_keys(error: ValidationError, tree: Tree) -> dict[KeyPath, str]:
    """Return the paths of all keys that are not in the schema, and of all whose values are not allowed, with the prefix
    of the keys of which nothing is known therefore: a mistyped key leaves one of its section missing.
    """
    model, by_path = _choose_model(tree), dict[KeyPath, str]()
    for item in error.errors(include_url=False):
        path = convert_location(item["loc"], model)
        if item["type"] == "extra_forbidden":
            by_path[path] = f"{path[0]}."
        elif path[1:] and item["type"] != "missing":
            by_path.setdefault(path[:2], format_key_path(path[:2]))
    return by_path


def convert_location(loc: tuple[int | str, ...], root: type[BaseModel]) -> KeyPath:
    """Return the recipe path of a pydantic error, without the union members that pydantic adds."""
    path: KeyPath = ()
    model: type[BaseModel] | None = root
    items: type[BaseModel] | None = None  # of the list at `path`, if it is one
    in_mapping = False  # whether `path` is a mapping of somebody's names, or something in it
    named_sections: type[BaseModel] | None = None  # of the mapping of sections at `path`, if it is one
    members = iter(loc)
    for part in members:
        if named_sections is not None:  # the part is a union member, and so is the one after the name
            name = next(members, None)
            path, model, named_sections = (path if name is None else (*path, name)), named_sections, None
            next(members, None)
            continue
        if items is not None and not isinstance(part, int):
            continue
        if model is None and not isinstance(part, int) and not in_mapping:
            break
        path = (*path, part)
        if in_mapping:
            continue
        if isinstance(part, int):
            model, items = items, None
        else:
            field = model.model_fields.get(part) if model is not None else None
            in_mapping = field is not None and get_origin(field.annotation) is dict
            model, items, named_sections = _find_sections(model, part)
    return path


def find_origin(path: KeyPath, tree: Tree, file: Origin) -> Origin:
    """Return where ``path`` was written, or else something inside it, or else its nearest parent."""
    while path:
        inside = (origin for key_path, origin in tree.origins.items() if key_path[: len(path)] == path)
        if origin := tree.origins.get(path) or next(inside, None):
            return origin
        path = path[:-1]
    return file


def _choose_model(tree: Tree) -> type[BaseModel]:
    try:
        return choose_recipe_model(tree.values)
    except RequestError:  # about the task, which is one of the problems
        return build_recipe_model()


def _iterate_mistaken_values(
    details: list[ErrorDetails], suggested: set[KeyPath | None], tree: Tree, file: Origin, model: type[BaseModel]
) -> Iterator[Problem]:
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for item in details:
        if item["type"] != "extra_forbidden" and not isinstance(item.get("ctx", {}).get("error"), Contradictions):
            by_path.setdefault(convert_location(item["loc"], model), []).append(item)
    for path, items in by_path.items():
        if items[0]["type"] == "missing":
            if path not in suggested:  # otherwise its mistyped name is already reported
                message = f"{format_key_path(path)}: is missing. {_look_up_description(path, model)}".rstrip()
                yield Problem(find_origin(path, tree, file), message)
            continue
        yield Problem(
            find_origin(path, tree, file),
            f"{format_key_path(path)}: {describe_mismatch(*items, key=format_key_path(path))}",
        )


def describe_mismatch(*items: ErrorDetails, key: str = "") -> str:
    """Return the message for a value of ``key`` that matches none of its types; ``items``: the error of each."""
    if items[0]["type"] == "extension":
        return items[0]["msg"]
    expected_types = " or ".join(dict.fromkeys(_describe_expected(item) for item in items))
    value = items[0]["input"]
    close = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", expected_types), n=1)
    near = look_up_value(key, value) or next(iter(close), None)
    hint = f"; did you mean {near}?" if near else ""
    if expected_types.startswith("text") and isinstance(value, int | float):
        hint = "; put it in quotes"
    if isinstance(value, str) and (match := re.match(r"(\w+):([^\s/]\S*)", value)) and expected_types == "a mapping":
        hint = f"; a space is missing after the colon: {match[1]}: {match[2]}"
    elif isinstance(value, str) and expected_types == "a mapping" and re.fullmatch(r"data\.train\[\d+\]", key):
        hint = f"; write {{source: {quote_flow_text(value)}}}"
    if isinstance(value, str) and re.match(r"-\S", value) and expected_types.startswith("a list"):
        hint = "; a space is missing after the dash of each item"
    return f"expected {expected_types}, not {_format_value(value)}{hint}"


def _describe_expected(item: ErrorDetails) -> str:
    context = {key: f"{value:g}" if isinstance(value, float) else value for key, value in item.get("ctx", {}).items()}
    template = _EXPECTED.get(item["type"])
    return template.format(**context) if template is not None else item["msg"]


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _find_origins(contradiction: Contradiction, tree: Tree) -> dict[str, Origin]:
    paths: dict[str, KeyPath] = {key: tuple(key.split(".")) for key in contradiction.keys}
    return {key: tree.origins[path] for key, path in paths.items() if path in tree.origins}


def _locate_contradiction(
    contradiction: Contradiction, tree: Tree, file: Origin, cause: Origin | None = None
) -> Problem:
    """Return a contradiction as a problem; ``cause`` is where a value was written that is named before."""
    origins = _find_origins(contradiction, tree)
    origin = next(iter(origins.values()), None) or find_origin(tuple(contradiction.keys[0].split(".")), tree, file)
    # The reader of one file does not see that a value comes from another.
    elsewhere = [
        f"{key}: {written_at}"
        for key, written_at in origins.items()
        if written_at.source != origin.source and written_at != cause
    ]
    suffix = f" ({', '.join(elsewhere)})" if elsewhere else ""
    return Problem(origin, f"{contradiction.keys[0]}: {contradiction.message}{suffix}")


def find_meaning(name: str) -> OwnKey | str | None:
    """Return the recipe key that a word of another tool means, such as ``lr``, or a sentence on what to do instead.

    None if nothing is known or spelled alike.
    """
    path, model = tuple(name.split(".")), build_recipe_model()
    values: Any = None
    for part in reversed(path):
        values = {part: values}
    near = _find_nearest(path, model, Tree(values))
    if near is None or isinstance(near, str):
        return near
    return _look_up_own_key(path, near)


def _look_up_own_key(path: KeyPath, near: KeyPath) -> OwnKey:
    """Return the key ``near`` with what the table has about its value."""
    ours = look_up_key(str(path[-1]))
    return ours if isinstance(ours, OwnKey) and ours.key == format_key_path(near) else OwnKey(format_key_path(near))


def _iterate_foreign_keys(path: KeyPath, tree: Tree) -> Iterator[KeyPath]:
    """Yield the path of an unknown key, or of all that is in it if it is a section of another tool."""
    value = _look_up_value(path, tree) if path[-1] in SECTIONS else None
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key in value:
        yield from _iterate_foreign_keys((*path, key), tree)


def _suggest_key(path: KeyPath, near: KeyPath | str | None, model: type[BaseModel], tree: Tree) -> str:
    if isinstance(near, str):
        return f"; {near}"
    if near is None:
        choices = ", ".join(_list_keys(_find_section_path(path), model))
        return f"; choose from {choices}" if choices else ""
    suggestion = str(near[-1] if near[:-1] == path[:-1] else format_key_path(near))
    return f"; did you mean {_look_up_own_key(path, near).shown(suggestion, _look_up_value(path, tree))}?"


def _find_nearest(path: KeyPath, model: type[BaseModel], tree: Tree) -> KeyPath | str | None:
    """Return the known key that an unknown one most likely means, here or elsewhere, or what to do instead."""
    key, section = path[-1], _find_section_path(path)
    local_keys: dict[str, KeyPath] = {name: (*section, name) for name in _list_keys(section, model)}
    sections = model.model_fields
    elsewhere: dict[str, KeyPath] = {
        name: (section, name) for section in sections for name in _list_keys((section,), model)
    }
    elsewhere |= {name: (name,) for name in sections} | local_keys
    choosing = [name for name in local_keys if _is_choice(_look_up_value(path, tree), local_keys[name], model)]
    if len(choosing) == 1 and not difflib.get_close_matches(str(key), local_keys, n=1, cutoff=0.7):
        return local_keys[choosing[0]]
    if str(key) in elsewhere:
        return elsewhere[str(key)]
    if (ours := look_up_key(str(key))) is not None and not any(isinstance(part, int) for part in path):
        return ours if isinstance(ours, str) else tuple(ours.key.split("."))
    for names in (local_keys, elsewhere):
        if close := difflib.get_close_matches(str(key), names, n=1, cutoff=0.7):
            return names[close[0]]
    return None


def _find_section_path(path: KeyPath) -> KeyPath:
    """Return our section for a key, which may be in a section of another tool."""
    above = path[:-1]
    return tuple(SECTIONS[str(above[-1])].split(".")) if above and above[-1] in SECTIONS else above


def _look_up_value(path: KeyPath, tree: Tree) -> Any:
    value: Any = tree.values
    for part in path:
        value = value[part]
    return value


def _is_choice(value: Any, path: KeyPath, model: type[BaseModel]) -> bool:
    """Return whether a text is one of the words that a key can be, such as `lora` for `model.adapter.type`."""
    *above, key = path
    section = _find_section_at(tuple(above), model)
    field = section.model_fields.get(str(key)) if section is not None else None
    if not isinstance(value, str) or value in _OF_MANY_KEYS or field is None:
        return False
    return value in _iterate_words(field.annotation, *field.metadata)


def _iterate_words(*kinds: Any) -> Iterator[str]:
    """Yield the words of types and of what annotates them."""
    for kind in kinds:
        if isinstance(kind, Registered):
            yield from (*kind.others, *kind.registry.names())
        elif get_origin(kind) is Literal:
            yield from (word for word in get_args(kind) if isinstance(word, str))
        elif get_origin(kind) in (Union, UnionType, Annotated):
            yield from _iterate_words(*get_args(kind))


def _list_keys(path: KeyPath, model: type[BaseModel]) -> list[str]:
    section = _find_section_at(path, model)
    keys = list(section.model_fields) if section is not None else []
    return keys if path else [*keys, "include"]


def _find_section_at(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = model
    items: type[BaseModel] | None = None
    named_sections: type[BaseModel] | None = None
    for part in path:
        if named_sections is not None or isinstance(part, int):
            section, items, named_sections = named_sections or items, None, None
        else:
            section, items, named_sections = _find_sections(section, part)
    return section


def _find_sections(model: type[BaseModel] | None, key: Any) -> tuple[type[BaseModel] | None, ...]:
    """Return the section at ``key`` of ``model``, that of the items of a list there, and that of a mapping's values.

    Each is None if the value at ``key`` is something else, or the key is unknown.
    """
    field = model.model_fields.get(key) if model is not None else None
    kind = field.annotation if field is not None else None
    kinds = [kind, *get_args(kind)] if get_origin(kind) is not list else []  # a section of one task may be None
    section = next((item for item in kinds if isinstance(item, type) and issubclass(item, BaseModel)), None)
    return section, _find_list_section(kind), _find_mapping_section(kind)


def _find_mapping_section(kind: Any) -> type[BaseModel] | None:
    inside = get_args(kind)
    if get_origin(kind) is dict:
        return _find_inner_section(inside[1])
    return next((model for part in inside if (model := _find_mapping_section(part)) is not None), None)


def _find_inner_section(kind: Any) -> type[BaseModel] | None:
    """Return the section type that a type is, or that is a member of it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((model for part in get_args(kind) if (model := _find_inner_section(part)) is not None), None)


def _find_list_section(kind: Any) -> type[BaseModel] | None:
    inside = get_args(kind)
    if get_origin(kind) is list:
        return inside[0] if isinstance(inside[0], type) and issubclass(inside[0], BaseModel) else None
    return next((model for part in inside if (model := _find_list_section(part)) is not None), None)


def _look_up_description(path: KeyPath, model: type[BaseModel]) -> str:
    *above, key = path
    section = _find_section_at(tuple(above), model)
    field = section.model_fields.get(str(key)) if section is not None else None
    return (field.description or "") if field is not None else ""
