"""The setting of a user's recipe: shortened, with checkpoints and evaluations at the steps that trials count on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trainwright
from trainwright.errors import RequestError
from trainwright.faults.drills import phases
from trainwright.faults.drills.kinds import Spread
from trainwright.faults.drills.trial_settings import TrialSettings
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.registries import SCHEDULES
from trainwright.recipe.schema import FaultsSection, OptimizerSection, RecipeSchema
from trainwright.recipe.strategy_spec import all_specs, spec_of
from trainwright.recipe.yaml_text import Tree

_SHORT = (
    "train.epochs=null",
    "train.max_tokens=null",
    f"train.max_steps={phases.STEPS}",
    "train.deterministic=true",  # so that losses can be compared to the bit on every machine
    "train.gradient_accumulation_steps=auto",  # one number fits one number of processes
    "train.replan=offer",  # trials choose the strategy and the processes
    "train.profile=null",
    f"checkpoint.every={phases.SAVES_EVERY}",
    "checkpoint.keep_last=3",
    "checkpoint.keep_best=false",
    # Trials write to their own directories only, and read events.jsonl.
    "checkpoint.copies=[]",
    "logging.observers={tensorboard: false, report: false}",
    # Trials expect the defaults, and set what their fault is about.
    *(f"faults.{key}={json.dumps(field.default)}" for key, field in FaultsSection.model_fields.items()),
)
# Of the warm-up and of the decay, if they are numbers of steps of the whole run.
_MOST_SCHEDULED = phases.STEPS // 4


def shortened(source: Path | Tree, overrides: Sequence[str]) -> RecipeSchema:
    """Return the recipe as it is trained in trials. Raises RequestError like load_recipe."""
    recipe = load_recipe(source, overrides)
    more = list(_schedule(recipe.optimizer))
    if recipe.validates or recipe.evaluate.prompts:
        more.append(f"evaluate.every={phases.EVALUATES_EVERY}")
    return load_recipe(source, [*overrides, *_SHORT, *more])


def spreads_of(recipe: RecipeSchema, strategies: Sequence[str], processes: Sequence[int]) -> tuple[Spread, ...]:
    """Return the strategies with the numbers of processes that each of them supports.

    Args:
        strategies: by default the recipe's, or with ``auto`` all that need no other library.
        processes: by default 1 and 2.

    Raises:
        RequestError: a strategy is unknown, a number is below 1, or no strategy supports any of the numbers.
    """
    names = list(strategies) or [recipe.parallel.strategy]
    if names == ["auto"]:
        names = [name for name, spec in all_specs().items() if spec.library is None]
    specs = all_specs()
    for name in names:
        if name not in specs:
            raise RequestError(f"--strategies {name}: unknown; one of {', '.join(specs)}")
    numbers = list(processes) or [1, 2]
    if min(numbers) < 1:
        raise RequestError(f"--processes {min(numbers)}: expected at least 1")
    supported = tuple((name, number) for name in names for number in numbers if _supports(name, number))
    if not supported:
        raise RequestError(
            f"--processes {','.join(map(str, numbers))}: {', '.join(names)} supports none of these numbers"
        )
    return supported


def phases_of(recipe: RecipeSchema) -> tuple[str, ...]:
    """Return the phases that a run of the recipe has."""
    absent = set() if recipe.validates else {phases.EVALUATION}
    if not recipe.evaluate.prompts:
        absent.add(phases.GENERATION)
    return tuple(phase for phase in phases.ALL if phase not in absent)


def setting_of(recipe: RecipeSchema, file: Path, spreads: tuple[Spread, ...], shared: Path) -> TrialSettings:
    """Return the setting of a shortened recipe, which is written to ``file``."""
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    package = str(Path(trainwright.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return TrialSettings(
        files={"recipe.yaml": file},
        spreads=spreads,
        shared=shared,
        variables={**os.environ, "PYTHONPATH": path},
        directory=Path.cwd(),
        evaluates=recipe.validates,
        halvable=tuple(_without_dropout(recipe.model_dump(), "")),
    )


def _without_dropout(section: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield overrides that switch off dropout, whose random numbers depend on the micro-batches."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _without_dropout(value, f"{prefix}{key}.")
        # A model without a value of its own has that of its configuration.
        elif key == "dropout" and (
            value or (value is None and prefix == "model." and (section["name"] or section["config"]))
        ):
            yield f"{prefix}{key}=0"


def _schedule(optimizer: OptimizerSection) -> Iterator[str]:
    """Yield overrides for a warm-up and a decay that fit in the short run; fractions of the run stay as they are."""
    lengths = {"warmup_steps": optimizer.warmup_steps}
    if SCHEDULES.get(optimizer.schedule).in_decay_steps:
        lengths["decay_steps"] = optimizer.decay_steps
    remaining = int(phases.STEPS * (1 - sum(length for length in lengths.values() if isinstance(length, float))))
    for key, length in lengths.items():
        if isinstance(length, int):
            yield f"optimizer.{key}={min(length, remaining, _MOST_SCHEDULED)}"


def _supports(strategy: str, processes: int) -> bool:
    spec = spec_of(strategy)
    return spec.least_processes <= processes <= (spec.most_processes or processes)
