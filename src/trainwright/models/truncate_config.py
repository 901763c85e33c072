"""Models with only their first layers: with the full width, but small enough for one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.models.configuration import convert_creation_errors
from trainwright.models.load import load_config
from trainwright.models.resolve_model import resolve

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainwright.recipe.sections.model import ModelSection


_LAYERS = "num_hidden_layers"
_NUMBERS = ("_period", "_interval", "_pattern", "dense_replace")
MAX_LAYERS = 8  # enough for the patterns of alternating layers in known models


def count_layers(config: PretrainedConfig) -> int:
    """Return the number of layers of the language model."""
    return int(getattr(config.get_text_config(), _LAYERS))


def count_parameters(config: PretrainedConfig, layers: int | None = None) -> int:
    """Return the number of parameters of a causal model cut to ``layers``; tied ones count once."""
    import torch
    from transformers import AutoModelForCausalLM

    with convert_creation_errors(config), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(cut_config(config, count_layers(config) if layers is None else layers))
    return sum(parameter.numel() for parameter in model.parameters())


def cut_config(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration of a model with only the first ``layers`` layers."""
    fields = config.to_dict()
    if layers != count_layers(config):
        _cut(fields, config, layers)
    return type(config).from_dict(fields)


def count_varied_layers(config: PretrainedConfig) -> int:
    """Return how many of the first layers include every kind of layer: at least two and at most eight."""
    text, layers = config.get_text_config().to_dict(), count_layers(config)
    kinds = list(zip(*(value for key, value in text.items() if _has_item_per_layer(key, value, layers)), strict=True))
    varied_count = max((index + 1 for index, kind in enumerate(kinds) if kind not in kinds[:index]), default=1)
    # For patterns with a different layer every n-th time, or with different first layers.
    numbers = [value for key, value in text.items() if key.endswith(_NUMBERS) and isinstance(value, int)]
    return min(max(2, varied_count, *(number + 1 for number in numbers)), MAX_LAYERS, layers)


def cut_model(model: ModelSection, layers: int, directory: Path) -> ModelSection:
    """Return the section of the same model with only its first ``layers`` layers, which keep their weights.

    An adapter of the whole model does not fit, so a new one is trained instead of ``start_from``.

    Args:
        directory: created for a model with weights; gets its configuration, and links to its files.
    """
    config = load_config(model.model_copy(update={"dropout": None, "implementation": "transformers"}))
    source = resolve(model)
    adapter = model.adapter.model_copy(update={"start_from": None, "stack": False})
    model = model.model_copy(update={"adapter": adapter})
    if source.directory is None:
        assert model.config is not None
        fields = copy.deepcopy(model.config)
        _cut(fields, config, layers)
        return model.model_copy(update={"config": fields})
    directory.mkdir(parents=True)
    for file in source.directory.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file.resolve())
    fields = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
    _cut(fields, config, layers)
    (directory / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    return model.model_copy(update={"name": str(directory), "gguf_file": None})


def _cut(fields: dict[str, Any], config: PretrainedConfig, layers: int) -> None:
    """Set the number of layers in a configuration's fields, and shorten lists with one item per layer."""
    text = config.get_text_config()
    full_count = count_layers(config)
    if text is not config:  # in a model of several parts, the language model's fields are in a sub-configuration
        part = next(name for name in config.sub_configs if getattr(config, name, None) is text)
        fields = fields.setdefault(part, {})
    layers_key = text.attribute_map.get(_LAYERS, _LAYERS)
    fields.pop(_LAYERS, None)
    fields[layers_key] = layers
    for key, value in fields.items():
        if _has_item_per_layer(key, value, full_count):
            fields[key] = value[:layers]


def _has_item_per_layer(key: str, value: Any, layers: int) -> bool:
    """Return whether a list has one item per layer: by its name, or because other lists are rarely that long."""
    has_name = "layer" in key or (layers > 8 and not key.endswith(("_id", "_ids")))
    return isinstance(value, list) and len(value) == layers and has_name
