"""Other tools' names for keys and values of a recipe, and what to write instead: ``synonyms.toml``.

The names are from the configurations of transformers' Trainer and TRL, Axolotl, LLaMA-Factory, torchtune, DeepSpeed,
Lightning, Hydra, and the research code that the recipes for unlearning and algorithm distillation follow.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.recipe.registries import TASKS


class OwnKey(NamedTuple):
    """A key of ours, and how its value is written: ``value`` in place of true, or a description."""

    key: str
    value: str | None = None
    note: str | None = None

    def shown(self, key: str, value: object = None) -> str:
        """Return the suggestion for a message: our ``key``, for another tool's ``value``."""
        ours = f": {self.value}" if self.value and value is not False else ""
        return f"{key}{ours}{f' ({self.note})' if self.note else ''}"


@cache
def _read_tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))


@cache
def list_answers() -> dict[OwnKey | str, str]:
    """Return other tools' names, separated by spaces, by answer: a key of ours or a sentence."""
    keys = {OwnKey(key, *(word or None for word in words)): names for key, names, *words in _read_tables()["keys"]}
    return {**keys, **_read_tables()["sentences"]}


# Mappings of other tools, of which each key is answered for itself, and our section that is tried first.
SECTIONS: dict[str, str] = {
    **dict.fromkeys(("trainer", "args", "training_args", "training_arguments", "trainer_args", "training"), "train"),
    **dict.fromkeys(("hparams", "hyperparameters", "sft_config", "dpo_config", "sft_args"), "train"),
    **dict.fromkeys(("optim", "lr_scheduler", "scheduler", "optimizer_config", "optim_args"), "optimizer"),
    **dict.fromkeys(("lora", "peft", "lora_config", "peft_config", "lora_args"), "model.adapter"),
    **dict.fromkeys(("quantization_config", "bnb_config"), "model.adapter"),
    **dict.fromkeys(("model_args", "model_kwargs"), "model"),
    **dict.fromkeys(("data_args", "dataset_args"), "data"),
    **dict.fromkeys(("fsdp_config", "distributed"), "parallel"),
}

# The key that a word in place of a whole section means, as in Hydra's choice of a group.
SECTION_WORDS = {"model": "name", "data": "train", "optimizer": "name", "parallel": "strategy"}


def look_up_key(name: str) -> OwnKey | str | None:
    """Return our key for a key of another tool, or a sentence that says what to do instead; None if unknown."""
    return _map_names().get(name.lower().replace("-", "_"))


def look_up_value(key: str, value: object) -> str | None:
    """Return our value of a dotted ``key`` for another tool's value; None if unknown."""
    name = str(value).lower()
    if key == "task":
        return next((task for task in TASKS.names() if name in TASKS.get(task).also_called), None)
    if key in SECTION_WORDS and isinstance(value, str):
        return f"{key}.{SECTION_WORDS[key]}={value}"
    values: dict[str, str] = _read_tables()["values"].get(key, {})
    return next((ours for ours, theirs in values.items() if name in theirs.split()), None)


@cache
def _map_names() -> dict[str, OwnKey | str]:
    return {name: answer for answer, names in list_answers().items() for name in names.split()}
