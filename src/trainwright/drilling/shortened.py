"""The setting of a user's recipe: shortened, with checkpoints and evaluations at the steps that trials count on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import trainwright
from trainwright.drilling import phases
from trainwright.drilling.kinds import Spread
from trainwright.drilling.setting import Setting
from trainwright.errors import RequestError
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.schema import Recipe
from trainwright.recipe.strategy_spec import all_specs, spec_of
from trainwright.recipe.yaml_text import Tree

_SHORT = (
    "train.epochs=null",
    "train.max_tokens=null",
    f"train.max_steps={phases.STEPS}",
    "train.deterministic=true",  # so that losses can be compared to the bit on every machine
    f"checkpoint.every={phases.SAVES_EVERY}",
    "checkpoint.keep_last=3",
    "checkpoint.keep_best=false",
    "logging.tensorboard=false",
)


def shortened(source: Path | Tree, overrides: Sequence[str]) -> Recipe:
    """Return the recipe as it is trained in trials. Raises RequestError like load_recipe."""
    recipe = load_recipe(source, [*overrides, *_SHORT])
    if not recipe.data.validation:
        return recipe
    return load_recipe(source, [*overrides, *_SHORT, f"evaluate.every={phases.EVALUATES_EVERY}"])


def spreads_of(recipe: Recipe, strategies: Sequence[str], processes: Sequence[int]) -> tuple[Spread, ...]:
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
    known = all_specs()
    for name in names:
        if name not in known:
            raise RequestError(f"--strategies {name}: unknown; one of {', '.join(known)}")
    numbers = list(processes) or [1, 2]
    if min(numbers) < 1:
        raise RequestError(f"--processes {min(numbers)}: expected at least 1")
    found = tuple((name, number) for name in names for number in numbers if _supports(name, number))
    if not found:
        raise RequestError(
            f"--processes {','.join(map(str, numbers))}: {', '.join(names)} supports none of these numbers"
        )
    return found


def phases_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the phases that a run of the recipe has."""
    absent: set[str] = set()
    if not recipe.data.validation:
        absent = {phases.EVALUATION, phases.GENERATION}
    elif not recipe.evaluate.prompts:
        absent = {phases.GENERATION}
    return tuple(phase for phase in phases.ALL if phase not in absent)


def setting_of(recipe: Recipe, file: Path, spreads: tuple[Spread, ...], shared: Path) -> Setting:
    """Return the setting of a shortened recipe, which is written to ``file``."""
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    package = str(Path(trainwright.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return Setting(
        files={"recipe.yaml": file},
        spreads=spreads,
        shared=shared,
        variables={**os.environ, "PYTHONPATH": path},
        directory=Path.cwd(),
        halvable=("model.dropout=0",) if recipe.model.dropout else (),
    )


def _supports(strategy: str, processes: int) -> bool:
    spec = spec_of(strategy)
    return spec.least_processes <= processes <= (spec.most_processes or processes)
