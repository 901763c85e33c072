"""Ablations and sweeps: the effect of keys of a recipe, one at a time, in all combinations, or in a random sample."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainwright.api.recipe import Recipe, source_of
from trainwright.api.studies.variant_runs import Halving, VariantRuns, check_measured, metrics_at
from trainwright.api.studies.variants import Variant, grid, one_at_a_time, runs_of, sample
from trainwright.errors import RequestError, TrainingError
from trainwright.paths import user_path, write_file
from trainwright.text import metric as shown
from trainwright.text import metric_name, say

if TYPE_CHECKING:
    from trainwright.recipe.yaml_text import Tree

TABLE, PAGE = "ablation.json", "ablation.html"


@dataclass(frozen=True)
class Ablation:
    """The last metrics of all variants; ``str()`` gives the table that ``trainwright ablate`` prints.

    Attributes:
        directory: contains the runs, the rows as ``ablation.json``, and with the extra ``report`` a page,
            ``ablation.html``.
        rows: a row of each variant: ``name``, ``changes`` (values by key), the name of its ``run``, the ``step`` of its
            last evaluation, and the ``metrics`` of it.
        metric: what the variants are compared by; None: nothing, so none is the best.
        highest: whether the highest value is the best.
    """

    directory: Path
    rows: tuple[dict[str, Any], ...]
    metric: str | None = "loss"
    highest: bool = False

    @property
    def best(self) -> dict[str, Any]:
        """Return the row with the best value of the metric, among those that were trained longest."""
        if self.metric is None:
            raise RequestError("the loss does not show which run is the best; name a metric with --metric")
        last = max(row["step"] for row in self.rows)
        longest = [row for row in self.rows if row["step"] == last]
        check_measured(self.metric, {name: None for row in longest for name in row["metrics"]})
        rows = [row for row in longest if self.metric in row["metrics"]]
        return (max if self.highest else min)(rows, key=lambda row: row["metrics"][self.metric])

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row["metrics"]))
        steps = len({row["step"] for row in self.rows}) > 1
        lines = [["", *(["step"] if steps else []), *(metric_name(name) for name in names)]]
        notes = [""]
        for row in self.rows:
            cells = [f"{row['metrics'][name]:.4f}" if name in row["metrics"] else "-" for name in names]
            lines.append([row["name"], *([str(row["step"])] if steps else []), *cells])
            notes.append("" if row["run"] == row["name"] else f"  the run {row['run']}")
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        texts = []
        for line, note in zip(lines, notes, strict=True):
            cells = [cell.rjust(max(width, 10)) for cell, width in zip(line[1:], widths[1:], strict=True)]
            texts.append(line[0].ljust(widths[0]) + "".join(f"  {cell}" for cell in cells) + note)
        if self.metric is None:
            return "\n".join(texts)
        best = self.best
        value, which = shown(best["metrics"][self.metric]), "highest " * self.highest
        return "\n".join([*texts, "", f"best: {best['name']} ({which}{self.metric.replace('_', ' ')} {value})"])


def ablate(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    over: Mapping[str, Sequence[Any]],
    combine: Literal["one at a time", "grid", "sample"] = "grid",
    number: int = 10,
    seed: int = 0,
    halving: int | None = None,
    metric: str | None = None,
    highest: bool | None = None,
    jobs: int | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Ablation:
    """Train a recipe with other values of its keys and compare the results; what ``trainwright ablate`` does.

    Variants with the same values are trained once. If it is stopped, the same call continues: finished runs are kept,
    and an unfinished one is resumed.

    Args:
        recipe: a `Recipe`, or the path of a recipe file; with ``data.validation``, for metrics to compare.
        overrides: ``section.key=value``, the value in YAML, for all runs.
        over: the keys to vary, each with its values.
        combine: ``"one at a time"``: the unchanged recipe, and once every value of every key. ``"grid"``: all
            combinations. ``"sample"``: ``number`` random combinations, where a value ``"1e-5..1e-3"`` is a range.
        number: of random combinations.
        seed: of the random combinations.
        halving: train all variants for a part of ``train.max_steps``, and continue only the best of every ``halving``,
            for as many times as many steps, until ``train.max_steps`` (successive halving, Jamieson and Talwalkar,
            arXiv 1502.07943).
        metric: of the validation data, to compare variants by. Default: the loss, if it shows how good a model is,
            as that of unlearning does not.
        highest: whether the highest value of ``metric`` is the best. Default: by its name; the lowest of a loss, the
            highest of an accuracy.
        jobs: how many runs at once. Default: as many as there are GPUs for, on a CPU one.
        out: the directory of the runs. Default: ``runs/<recipe>-sweep``.
        progress: show the runs.

    Raises:
        RequestError: a value is invalid; nothing is trained then. Or the first evaluation lacks the metric.
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
    from trainwright.reports.comparing import is_lower_better

    refuse_worker("ablate")
    source = source_of(recipe)
    choose = {"one at a time": one_at_a_time, "grid": grid, "sample": lambda keys: sample(keys, number, seed)}
    # Read every recipe before the first of them is trained.
    recipes = {each: load_recipe(source, [*overrides, *each.overrides]) for each in choose[combine](over)}
    if any(not each.validates for each in recipes.values()):
        raise RequestError("data.validation: not set, so there is nothing to compare the runs by; set it")
    if metric is None and all(each.spec.keeps_best for each in recipes.values()):
        metric = "loss"
    if highest is None:
        highest = metric is not None and not is_lower_better(metric)
    if metric is None and halving is not None:
        raise RequestError("--halving: the loss does not show which runs to continue; name a metric with --metric")
    runs = runs_of(recipes)
    directory = user_path(out or Path("runs") / f"{_stem(source)}-sweep")
    distinct = {variant: recipes[variant] for variant in dict.fromkeys(runs.values())}
    rungs = None if halving is None or metric is None else Halving.of(halving, distinct, metric, highest)
    if progress:
        for variant, run in runs.items():
            if variant != run:
                say(f"{variant.name} is trained once, as {run.name}", file=sys.stderr)
    asked = [*overrides, *([] if rungs is None else rungs.overrides)]
    VariantRuns(recipe, asked, directory, distinct, metric, jobs, progress).train(rungs)
    rows = tuple(_row(variant, run, directory) for variant, run in runs.items())
    found = Ablation(directory, rows, metric, highest)
    write_file(directory / TABLE, json.dumps(rows, indent=2) + "\n")
    _write_page(found)
    return found


def _stem(source: Path | Tree) -> str:
    file = source if isinstance(source, Path) else source.file
    return "recipe" if file is None else Path(file).stem


def _row(variant: Variant, run: Variant, directory: Path) -> dict[str, Any]:
    step, metrics = metrics_at(directory / run.name)
    if not metrics:
        raise TrainingError(f"{directory / run.name}: no metrics to compare; set data.validation")
    changes = dict(variant.changes)
    return {"name": variant.name, "changes": changes, "run": run.name, "step": step, "metrics": metrics}


def _write_page(found: Ablation) -> None:
    """Write the page of an ablation, where the package with the script of charts is installed."""
    from trainwright.reports.ablation import ablation_page

    if found.metric is None:
        return
    with suppress(RequestError):
        write_file(found.directory / PAGE, ablation_page(found.directory, found.rows, found.metric, found.best["name"]))
