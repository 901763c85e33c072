"""Ablations: the effect of single keys of a recipe, each varied while the others are fixed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api.recipe import Recipe, source_of
from trainwright.api.run import Run
from trainwright.api.training import resume, train
from trainwright.errors import RequestError, TrainingError
from trainwright.paths import user_path
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.recipe import schema
    from trainwright.recipe.yaml_text import Tree

TABLE = "ablation.json"


@dataclass(frozen=True)
class Variant:
    """One run: ``value`` replaces the recipe's value of ``key``; both are empty for the unchanged recipe."""

    key: str = ""
    value: str = ""

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        if not self.key:
            return "as-it-is"
        kept = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in self.value)
        return f"{self.key.rpartition('.')[2]}={kept}"

    @property
    def overrides(self) -> list[str]:
        """Return the override that makes this variant; none for the unchanged recipe."""
        return [f"{self.key}={self.value}"] if self.key else []


@dataclass(frozen=True)
class Ablation:
    """The final metrics of all variants; ``str()`` gives the table that ``trainwright ablate`` prints.

    Attributes:
        directory: contains the runs, and the rows as ``ablation.json``.
        rows: of the unchanged recipe (with an empty key), then of each value: ``key``, ``value``, the name of its
            ``run``, and ``metrics``.
    """

    directory: Path
    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        labels = [Variant(row["key"], row["value"]).name for row in self.rows]
        names = list(dict.fromkeys(name for row in self.rows for name in row["metrics"]))
        label = max(map(len, labels)) + 2
        widths = [max(len(name), 10) + 2 for name in names]
        heads = (f"{name.replace('_', ' '):>{width}}" for name, width in zip(names, widths, strict=True))
        lines = [f"{'':<{label}}" + "".join(heads)]
        for own, row in zip(labels, self.rows, strict=True):
            cells = (f"{row['metrics'][name]:.4f}" if name in row["metrics"] else "-" for name in names)
            same = "" if row["run"] == own else f"  the run {row['run']}"
            columns = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            lines.append(f"{own:<{label}}{columns}{same}")
        return "\n".join(lines)


def ablate(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    over: Mapping[str, Sequence[Any]],
    out: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Ablation:
    """Train the unchanged recipe, and once for every distinct value of every key; what ``trainwright ablate`` does.

    If it is stopped, the same call continues: finished runs are kept, and an unfinished one is resumed.

    Args:
        recipe: a `Recipe`, or the path of a recipe file; with ``data.validation``, for metrics to compare.
        overrides: ``section.key=value``, the value in YAML, for all runs.
        over: the keys to vary, each with its values.
        out: the directory of the runs. Default: ``ablations/<recipe>``.
        progress: show the runs.

    Raises:
        RequestError: a value is invalid; nothing is trained then.
        MachineError, TrainingError, Stopped: of the first run that does not finish.

    Examples:
        >>> import trainwright as tw
        >>> tw.ablate("tiny.yaml", over={"train.max_steps": [2, "many"]})
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: override 'train.max_steps=many': train.max_steps: expected a whole number, ...
    """
    from trainwright.launch.group.environment import refuse_worker
    from trainwright.recipe.loading import load_recipe

    refuse_worker("ablate")
    source = source_of(recipe)
    variants = [Variant(), *(Variant(key, _text(value)) for key, values in over.items() for value in values)]
    # Read every recipe before the first of them is trained.
    runs = _runs({variant: load_recipe(source, [*overrides, *variant.overrides]) for variant in variants})
    stream = sys.stderr if progress else None
    for variant, run in runs.items():
        if stream and variant != run:
            say(f"{variant.name} is trained once, as {run.name}", file=stream)
    directory = user_path(out or Path("ablations") / _stem(source))
    distinct = list(dict.fromkeys(runs.values()))
    for index, variant in enumerate(distinct):
        if stream:
            say(f"[{index + 1}/{len(distinct)}] {' '.join(variant.overrides) or 'unchanged'}", file=stream)
        _train(recipe, [*overrides, *variant.overrides], directory / variant.name, progress)
    rows = tuple(
        {"key": variant.key, "value": variant.value, "run": run.name, "metrics": _metrics(directory / run.name)}
        for variant, run in runs.items()
    )
    (directory / TABLE).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return Ablation(directory, rows)


def _text(value: Any) -> str:
    """Return a value in YAML; texts are YAML already."""
    return value if isinstance(value, str) else json.dumps(value)


def _stem(source: Path | Tree) -> str:
    file = source if isinstance(source, Path) else source.file
    return "recipe" if file is None else Path(file).stem


def _runs(recipes: Mapping[Variant, schema.Recipe]) -> dict[Variant, Variant]:
    """Return for each variant the one whose run it shares: the first with the same values, however they are written.

    Raises:
        RequestError: two different ones would be trained in one directory.
    """
    runs: dict[Variant, Variant] = {}
    for variant, recipe in recipes.items():
        known = dict.fromkeys(runs.values())
        same = next((run for run in known if recipes[run] == recipe), None)
        clash = next((run for run in known if run.name == variant.name), None)
        if same is None and clash is not None:
            names = f"{clash.overrides[0]} and {variant.overrides[0]}"
            raise RequestError(f"--over: {names} would both be {variant.name}/; vary them in two ablations")
        runs[variant] = same or variant
    return runs


def _train(recipe: Recipe | str | PathLike[str], overrides: Sequence[str], run: Path, progress: bool) -> None:
    """Train one variant to its end, unless it is finished. Raises TrainwrightError if it ends early."""
    if (run / "final").is_dir():
        if progress:
            say(f"{run} is already finished", file=sys.stderr)
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):
        if (run / "recipe.yaml").is_file():
            resume(run, progress=progress)
        else:
            train(recipe, *overrides, f"logging.run_directory={run}", progress=progress)


def _metrics(run: Path) -> dict[str, float]:
    if metrics := Run(run).metrics:
        return metrics
    raise TrainingError(f"{run}: no metrics to compare; set data.validation")
