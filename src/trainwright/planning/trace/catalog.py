"""Known models with the sizes of their config.json, planned without weights or network.

The sizes are in ``models.json``, each with its repository. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError

_FILE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class KnownModel:
    """``id``: the Hugging Face repository of the config.json. ``config``: its relevant keys."""

    id: str
    config: Mapping[str, Any] = field(hash=False)


def look_up_model(name: str) -> KnownModel | None:
    """Return the model with the id ``name``, with or without its organization, case-insensitive; None if unknown."""
    return _index_by_id().get(name.strip().lower())


def list_models() -> list[str]:
    """Return the ids of all models, those that have the configuration of another one left out."""
    return [entry["id"] for entry in _read_entries()]


def find_model(name: str) -> KnownModel:
    """Return the model with the id ``name``.

    Raises:
        RequestError: it is not in the catalog; the message names similar ids.
    """
    if (model := look_up_model(name)) is not None:
        return model
    near = suggest_models(name)
    hint = f"did you mean {near}?" if near else "no similar name found."
    raise RequestError(
        f"{name}: no such model in the catalog; {hint} For other models, pass a directory with a config.json"
    )


def suggest_models(name: str) -> str:
    """Return up to three ids of the catalog similar to ``name``, as text; empty if none is."""
    query = name.strip().lower().rpartition("/")[2]
    near = difflib.get_close_matches(query, [key for key in _index_by_id() if "/" not in key], n=8, cutoff=0.6)
    ids = list(dict.fromkeys(_index_by_id()[key].id for key in near))[:3]
    return " or ".join([", ".join(ids[:-1]), ids[-1]] if ids[1:] else ids)


@cache
def _index_by_id() -> dict[str, KnownModel]:
    """Return the models by lower-case id, and by the name without organization; the first of equal names is used."""
    models: dict[str, KnownModel] = {}
    for entry in _read_entries():
        for full, differences in {entry["id"]: {}, **entry.get("also", {})}.items():
            model = KnownModel(full, {**entry["config"], **differences})
            models[full.lower()] = model
            models.setdefault(full.lower().rpartition("/")[2], model)
        for name in entry.get("called", ()):
            models.setdefault(name.lower(), models[entry["id"].lower()])
    return models


@cache
def list_families() -> frozenset[str]:
    """Return the model types of the catalog."""
    return frozenset(entry["config"]["model_type"] for entry in _read_entries())


@cache
def _read_entries() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))["models"]
    return content
