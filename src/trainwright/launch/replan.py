"""Continue a run whose plan proved wrong with another plan: the same run, from its newest checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.launch import run_directory
from trainwright.observe.plan_watch import REPLAN
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import Recipe

_PARALLEL = ("strategy", "num_processes", "replicate_size", "reshard_after_forward")
_TRAIN = ("micro_batch_size", "activation_checkpointing")


def is_asked(run: Path) -> bool:
    """Return whether the run is to stop after its next checkpoint, to continue with another plan."""
    return (run / REPLAN).is_file()


def take(run: Path) -> tuple[Recipe, int | None] | None:
    """Return the recipe to continue with and the threads per process; None if no change is requested.

    The run's recipe and plan are updated.
    """
    file = run / REPLAN
    try:
        offer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    except (OSError, ValueError):
        return None
    before = load_recipe(run / run_directory.RECIPE)
    recipe = _changed(before, offer)
    text = run_directory.recipe_text(recipe)
    for section, keys in (("parallel", _PARALLEL), ("train", _TRAIN)):
        for key in keys:
            old, new = getattr(getattr(before, section), key), getattr(getattr(recipe, section), key)
            if old != new:
                why = f"{section}.{key} {new}: {old} was slower than planned (train.replan: auto)"
                run_directory.change(run, text, why)
    run_directory.expect(run, {"step_time": offer["seconds"]}, offer)
    return recipe, offer.get("threads")


def _changed(recipe: Recipe, offer: Mapping[str, Any]) -> Recipe:
    values = recipe.model_dump()
    values["parallel"].update({key: offer[key] for key in _PARALLEL})
    values["train"].update({key: offer[key] for key in _TRAIN})
    values["train"]["gradient_accumulation_steps"] = "auto"
    return type(recipe).model_validate(values)
