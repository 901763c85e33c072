"""``trainwright ablate``: the effect of single keys of a recipe, each varied while the others are fixed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import RequestError, TrainingError
from trainwright.paths import user_path
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

TABLE = "ablation.json"


@dataclass(frozen=True)
class Variant:
    """One run: ``value`` replaces the recipe's value of ``key``; both are empty for the unchanged recipe."""

    key: str
    value: str

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


def ablate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE…", help="A key to vary and its values; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Directory of the runs. Default: ablations/<recipe>.")
    ] = None,
) -> None:
    """Train the unchanged recipe, and once for every distinct value of every key; compare the final metrics.

    If stopped, the same command continues: finished runs are kept, and an unfinished one is resumed. Ends like the
    first run that does not finish.
    """
    from trainwright.launch.group.environment import refuse_worker

    refuse_worker("ablate")
    variants = [Variant("", ""), *_variants(over or [])]
    fixed = overrides or []
    runs = _runs(recipe, fixed, variants)  # reads every recipe before the first of them is trained
    repeated = [f"{variant.name} is trained once, as {run.name}" for variant, run in runs.items() if variant != run]
    for line in repeated:
        say(line, file=sys.stderr)
    directory = user_path(out or Path("ablations") / recipe.stem)
    distinct = list(dict.fromkeys(runs.values()))
    for index, variant in enumerate(distinct):
        say(f"[{index + 1}/{len(distinct)}] {' '.join(variant.overrides) or 'as it is'}", file=sys.stderr)
        _train(recipe, fixed, variant, directory / variant.name)
    rows = [(variant, run, _last_metrics(directory / run.name)) for variant, run in runs.items()]
    table = [
        {"key": variant.key, "value": variant.value, "run": run.name, "metrics": metrics}
        for variant, run, metrics in rows
    ]
    (directory / TABLE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    for line in _lines(rows):
        say(line)
    say(f"\n{directory}/")


def _variants(over: Sequence[str]) -> list[Variant]:
    if not over:
        raise RequestError("--over: pass a key and its values, such as --over train.seed=0,1,2")
    found = []
    for given in over:
        key, equals, values = given.partition("=")
        if not equals or not key or not values:
            raise RequestError(f"--over {given}: expected KEY=VALUE,VALUE…")
        found += [Variant(key, value) for value in _split(values)]
    return found


def _runs(recipe: Path, fixed: Sequence[str], variants: Sequence[Variant]) -> dict[Variant, Variant]:
    """Return for each variant the one whose run it shares: the first with the same values, however they are written.

    Raises:
        RequestError: a recipe is invalid, or two different ones would be trained in one directory.
    """
    runs: dict[Variant, Variant] = {}
    values: dict[Variant, dict[str, Any]] = {}
    for variant in variants:
        loaded = _load(recipe, fixed, variant).model_dump()
        same = next((run for run, known in values.items() if known == loaded), None)
        if same is None:
            if clash := next((run for run in values if run.name == variant.name), None):
                names = f"{clash.overrides[0]} and {variant.overrides[0]}"
                raise RequestError(f"--over: {names} would both be {variant.name}/; vary them in two ablations")
            values[variant] = loaded
        runs[variant] = same or variant
    return runs


def _split(values: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _load(recipe: Path, fixed: Sequence[str], variant: Variant) -> Recipe:
    from trainwright.recipe.loading import load_recipe

    return load_recipe(recipe, [*fixed, *variant.overrides])


def _train(recipe: Path, fixed: Sequence[str], variant: Variant, run: Path) -> None:
    """Train one variant to its end, unless it is finished. Raises TrainwrightError if it ends early."""
    if (run / "final").is_dir():
        say(f"{run} is already finished", file=sys.stderr)
        return
    from trainwright import api

    run.parent.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):
        if (run / "recipe.yaml").is_file():
            api.resume(run, progress=True)
        else:
            api.train(recipe, *fixed, *variant.overrides, f"logging.run_directory={run}", progress=True)


def _last_metrics(run: Path) -> dict[str, Any]:
    from trainwright.observe.reader import read_events

    measured = [event for event in read_events(run / "events.jsonl") if event["event"] == "evaluate"]
    if not measured:
        raise TrainingError(f"{run}: no metrics to compare; set data.validation")
    metrics: dict[str, Any] = measured[-1]["metrics"]
    return metrics


def _lines(rows: Sequence[tuple[Variant, Variant, dict[str, Any]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, _, metrics in rows for name in metrics))
    label = max(len(variant.name) for variant, _, _ in rows) + 2
    widths = [max(len(name), 10) + 2 for name in names]
    heads = (f"{name.replace('_', ' '):>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [f"{'':<{label}}" + "".join(heads)]
    for variant, run, metrics in rows:
        cells = (f"{metrics[name]:.4f}" if name in metrics else "-" for name in names)
        same = "" if run == variant else f"  the run {run.name}"
        columns = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{variant.name:<{label}}{columns}{same}")
    return lines
