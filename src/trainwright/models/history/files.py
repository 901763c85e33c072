"""A trained model of histories on disk: weights, shape, the environment it acts in, and how it is tried there.

model.safetensors   the weights, by the names of ``HistoryModel``
agent.json          ``model`` (its shape), ``environment`` (name and options), ``tried`` (which tasks were held back
                    from it and how it is tried on them, by the keys of a recipe's section)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import RequestError
from trainwright.models.files.save import replacing
from trainwright.models.files.weight_files import write_weights
from trainwright.models.history.model import HistoryModel, HistoryShape

WEIGHTS, ABOUT = "model.safetensors", "agent.json"


def save_history_model(
    directory: Path, shape: HistoryShape, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a model; ``about`` is ``environment`` and ``tried``."""
    about = {"model": shape.as_json(), **about}
    with replacing(directory) as scratch:
        write_weights({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, scratch / WEIGHTS)
        (scratch / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def is_history_model(directory: Path) -> bool:
    """Whether such a model lies in a directory."""
    return (directory / ABOUT).is_file() and (directory / WEIGHTS).is_file()


def load_history_model(directory: Path) -> tuple[HistoryModel, dict[str, Any]]:
    """Return the model on the CPU, and what ``agent.json`` says of it.

    Raises:
        RequestError: files are missing, or do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        model = HistoryModel(HistoryShape.from_json(about["model"]), seed=0)
        model.load_state_dict(load_file(directory / WEIGHTS))
        return model, about
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RequestError(f"{directory}: is no model of histories that can be read: {error}") from error
