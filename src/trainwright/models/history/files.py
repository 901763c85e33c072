"""Save and load history models: weights, shape, environment, and evaluation settings.

model.safetensors   the weights, with the names of ``HistoryModel``
agent.json          ``model`` (its shape), ``environment`` (name and options), ``tried`` (the held-out tasks and the
                    evaluation settings, with the keys of the recipe's section)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import RequestError
from trainwright.models.files.safetensors_files import read_header, write_weights
from trainwright.models.files.save import replacing
from trainwright.models.history.model import HistoryModel, HistoryShape

WEIGHTS, ABOUT = "model.safetensors", "agent.json"


def save_history_model(
    directory: Path, shape: HistoryShape, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a model; ``about`` has the keys ``environment`` and ``tried``."""
    about = {"model": shape.as_json(), **about}
    with replacing(directory) as scratch:
        write_weights({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, scratch / WEIGHTS)
        (scratch / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def is_history_model(directory: Path) -> bool:
    """Return whether a directory holds a history model."""
    return (directory / ABOUT).is_file() and (directory / WEIGHTS).is_file()


def load_history_model(directory: Path) -> tuple[HistoryModel, dict[str, Any]]:
    """Return the model on the CPU, and the content of ``agent.json``.

    Raises:
        RequestError: files are missing or inconsistent.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        shape, stored = HistoryShape.from_json(about["model"]), read_header(directory / WEIGHTS)
        if max(shape.layers, len(shape.observations)) > len(stored):  # each has tensors of its own, which are made here
            raise ValueError(f"{ABOUT} has more layers or observations than {WEIGHTS} has tensors ({len(stored):,})")
        with torch.device("meta"):  # without memory, whatever sizes it names
            model = HistoryModel(shape, seed=0)
        model.load_state_dict(load_file(directory / WEIGHTS), assign=True)
        return model, about
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RequestError(f"{directory}: is not a model of histories that can be read: {error}") from error
