"""Recipes of small models on texts of a chosen length, for benches that run many of them; and this machine's rates."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, load_calibration, save_calibration
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {**LLAMA, "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 704,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    "wide": {**LLAMA, "hidden_size": 768, "num_hidden_layers": 4, "intermediate_size": 2048,
             "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 512},
    "words": {**LLAMA, "hidden_size": 320, "num_hidden_layers": 4, "intermediate_size": 896,
              "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 32000},
    "gpt2": {"model_type": "gpt2", "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 2048, "vocab_size": 512,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def small_recipe(
    model: str, length: int, pack: int | None, examples: int, work: Path, overrides: Sequence[str]
) -> RecipeSchema:
    """One of ``MODELS`` on documents of about ``length`` tokens, ``examples`` of them a step, with ``overrides``.

    ``pack``: tokens of a pack; None for padded rows. It is never compiled.
    """
    values = {
        "task": "sft",
        "model": {"config": MODELS[model], "tokenizer": "bytes"},
        "data": {"train": str(_texts(length, work)), "validation": None, "format": "text",
                 "max_length": min(1024, pack or 1024),
                 "pack_length": pack},
        "optimizer": {"learning_rate": 1e-4},
        "train": {"max_steps": 100, "global_batch_size": examples, "compile": False},
        "logging": {"observers": {"tensorboard": False}},
    }  # fmt: skip
    file = work / "recipe.json"  # JSON is YAML
    file.write_text(json.dumps(values))
    return load_recipe(file, list(overrides))


def _texts(length: int, work: Path) -> Path:
    """Texts of about ``length`` bytes."""
    file = work / f"rows-{length}.jsonl"
    if not file.exists():
        draw = random.Random(length)
        texts = ["".join(draw.choices("abcdefgh ", k=round(length * draw.uniform(0.85, 1.0)))) for _ in range(400)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def calibrated(file: Path | None, machine: Machine) -> Calibration:
    """The calibration in ``file``, made and written there if it does not exist."""
    found = load_calibration(file) if file else None
    if found is None:
        from trainwright.doctor.calibrate import calibrate

        found = calibrate(machine, say=print)
        if file:
            save_calibration(found, file)
    return found
