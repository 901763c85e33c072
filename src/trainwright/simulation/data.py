"""The rows and the model of a simulated run, of which only the shapes matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.data.sources.registry import registered_source
from trainwright.errors import RequestError
from trainwright.paths import user_path
from trainwright.planning.facts import configuration_named
from trainwright.recipe.schema import Recipe
from trainwright.recipe.sections.data import PARTS, DataSection
from trainwright.recipe.task_spec import RowKind

_ROWS = 64
_CHARACTERS = 8  # of a token, at most, in English text; longer rows are cut to data.max_length


def with_rows(recipe: Recipe, directory: Path, notes: list[str]) -> Recipe:
    """Return the recipe with rows that are here: its own, or full rows of made-up text written to ``directory``."""
    data = recipe.data
    if not recipe.has_texts or all(_is_here(source.source) for source in data.sources):
        return recipe
    keys = ["train"] if data.train is not None else [key for key in PARTS if getattr(data, key) is not None]
    changed: dict[str, Any] = {"validation": None if data.validation is None else 8, "limit": None, "format": "auto"}
    for key in keys:
        file = directory / f"{key}.jsonl"
        if key == "idk":
            file.write_text("I do not know.\n", encoding="utf-8")
        else:
            kind = recipe.spec.rows(recipe, f"data.{key}")
            rows = (_row(kind, f"{key} {number}", data.max_length) for number in range(_ROWS))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        changed[key] = str(file)
    notes.append(f"data: {data.name} is not here; {_ROWS} full rows of {data.max_length} tokens instead")
    written = {key: value for key, value in data.model_dump(exclude_unset=True).items() if key != "benchmark"}
    return recipe.model_copy(update={"data": DataSection.model_validate({"train": data.train, **written, **changed})})


def _is_here(source: str) -> bool:
    name = source.partition(":")[0]
    if registered_source(source) is not None:
        return True
    return user_path(source).exists() or user_path(name).exists()


def _row(kind: RowKind, name: str, tokens: int) -> dict[str, Any]:
    text = (f"{name}: " + "made up text for the simulation of a run ") * (_CHARACTERS * tokens // 40 + 1)
    if kind in ("refused", "alternates"):
        return {"prompt": "What is it?", "completion": text, "alternate": text[::-1]}
    if kind in ("pairs", "answers"):
        return {"prompt": "What is it?", "chosen": text, "rejected": text[::-1]}
    return {"text": text}


def with_fresh_model(recipe: Recipe, notes: list[str]) -> Recipe:
    """Return the recipe with the model's configuration in place of its weights, which are neither read nor downloaded.

    Raises:
        RequestError: the configuration is neither in the catalog nor on this machine.
    """
    model = recipe.model
    if model.name is None:
        return recipe
    config, tokenizer = _known_keys(configuration_named(model.name)), model.tokenizer or model.name
    update: dict[str, Any] = {"name": None, "config": config, "tokenizer": tokenizer, "gguf_file": None}
    notes.append(f"model: the configuration of {model.name} without its weights")
    return recipe.model_copy(update={"model": model.model_copy(update=update)})


def with_tokenizer(recipe: Recipe, notes: list[str]) -> Recipe:
    """Return the recipe with a tokenizer that is here: its own, or the built-in one of bytes."""
    from trainwright.models.load import load_tokenizer

    if not recipe.has_texts:
        return recipe
    try:
        load_tokenizer(recipe.model)
    except RequestError:
        name = recipe.model.tokenizer
        notes.append(f"model.tokenizer: {name} is not here; bytes instead, with the vocabulary of the model")
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"tokenizer": "bytes"})})
    return recipe


def _known_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's keys that a fresh model of its type has."""
    import dataclasses

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from trainwright.models.configuration import OLDER_ROPE_KEYS, without_ignored

    kind = CONFIG_MAPPING[config["model_type"]]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map) | {"model_type"}
    if "rope_parameters" in known:
        known |= OLDER_ROPE_KEYS
    return {key: value for key, value in without_ignored(config).items() if key in known}
