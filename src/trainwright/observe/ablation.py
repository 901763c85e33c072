"""An ablation: a recipe trained with other values of its keys, each variant once, to its end or to a rung of halving.

The runs train one after another or side by side.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal

from trainwright.api.recipe import Recipe, choose_stem, extract_source
from trainwright.api.run import stop
from trainwright.api.training import resume, train
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, RequestError, Stopped, TrainingError, build_error
from trainwright.machine.detect import detect
from trainwright.recipe.extensions import build_child_environment
from trainwright.run.group.environment import refuse_worker
from trainwright.run.program import pass_on_signals, start_program
from trainwright.run.run_directory import format_directory_override
from trainwright.utils.activity import Activity
from trainwright.utils.paths import expand_user_path, write_file
from trainwright.utils.text import format_metric as shown
from trainwright.utils.text import format_metric_name, format_table, say

if TYPE_CHECKING:
    from trainwright.recipe import schema


_LONGEST_NAME = 120
_RANGE = re.compile(r"([-+.\deE]+)\.\.([-+.\deE]+)")
# A range is sampled by its logarithm if its ends differ by at least this factor.
_LOGARITHMIC = 10.0
_DRAWS = 100  # per variant, until one is new


@dataclass(frozen=True)
class Variant:
    """A recipe with other values of some keys; without changes, the recipe as it is."""

    changes: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        if not self.changes:
            return "as-it-is"
        parts = []
        for key, value in self.changes:
            safe_value = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in value)
            parts.append(f"{key.rpartition('.')[2]}={safe_value}")
        name = ",".join(parts)
        if len(name) <= _LONGEST_NAME:
            return name
        return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    @property
    def overrides(self) -> list[str]:
        """Return the overrides that make this variant."""
        return [f"{key}={value}" for key, value in self.changes]


def vary_one_at_a_time(over: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return the recipe as it is, and each value of each key."""
    return [Variant(), *(Variant(((key, value),)) for key, values in _format_values(over).items() for value in values)]


def list_combinations(over: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return all combinations of the values."""
    texts = _format_values(over)
    return [Variant(tuple(zip(texts, values, strict=True))) for values in itertools.product(*texts.values())]


def sample_variants(over: Mapping[str, Sequence[Any]], number: int, seed: int) -> list[Variant]:
    """Return different random combinations; all of them if there are no more than ``number``.

    A value ``LOW..HIGH`` is a range to draw from, by its logarithm if its ends differ by a factor of 10 or more.
    """
    texts, draw = _format_values(over, ranges=True), random.Random(seed)
    if not any(_RANGE.fullmatch(value) for values in texts.values() for value in values):
        every = list_combinations(over)
        return every if len(every) <= number else draw.sample(every, number)
    variants: dict[Variant, None] = {}
    for _ in range(number * _DRAWS):
        variants[Variant(tuple((key, _draw_value(draw.choice(values), draw)) for key, values in texts.items()))] = None
        if len(variants) == number:
            break
    return list(variants)


def _draw_value(value: str, draw: random.Random) -> str:
    if (ends := _RANGE.fullmatch(value)) is None:
        return value
    low, high = (float(end) for end in ends.groups())
    if low > 0 and high / low >= _LOGARITHMIC:
        number = math.exp(draw.uniform(math.log(low), math.log(high)))
    else:
        number = draw.uniform(low, high)
    is_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in ends.groups())
    return str(round(number)) if is_whole else f"{number:.4g}"


def _format_values(over: Mapping[str, Sequence[Any]], *, ranges: bool = False) -> dict[str, list[str]]:
    """Return the values of every key in YAML; texts are YAML already. Raises RequestError for a wrong range."""
    texts = {key: [v if isinstance(v, str) else json.dumps(v) for v in values] for key, values in over.items()}
    for key, values in texts.items():
        for value in values:
            if (ends := _RANGE.fullmatch(value)) is None:
                continue
            if not ranges:
                raise RequestError(f"--over {key}={value}: a range is for a random sample; pass --sample NUMBER")
            try:
                ordered = float(ends[1]) < float(ends[2])
            except ValueError:
                ordered = False
            if not ordered:
                raise RequestError(f"--over {key}={value}: expected LOW..HIGH, such as 1e-5..1e-3")
    return texts


def find_shared_runs(recipes: Mapping[Variant, schema.RecipeSchema]) -> dict[Variant, Variant]:
    """Return for each variant the one whose run it shares: the first with the same values, however they are written.

    Raises:
        RequestError: two different ones would be trained in one directory.
    """
    runs: dict[Variant, Variant] = {}
    for variant, recipe in recipes.items():
        distinct = dict.fromkeys(runs.values())
        same = next((run for run in distinct if recipes[run] == recipe), None)
        clash = next((run for run in distinct if run.name == variant.name), None)
        if same is None and clash is not None:
            names = f"{' '.join(clash.overrides)} and {' '.join(variant.overrides)}"
            raise RequestError(f"--over: {names} would both be {variant.name}/; vary them in two ablations")
        runs[variant] = same or variant
    return runs


_ASKED = "asked"  # directory of the recipes as they were asked for
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class SuccessiveHalving:
    """Successive halving.

    Attributes:
        rungs: the steps at which variants are compared, the last of them ``train.max_steps``.
        factor: of how many variants one continues.
    """

    rungs: tuple[int, ...]
    factor: int
    metric: str
    highest: bool

    @classmethod
    def of(
        cls, factor: int, recipes: Mapping[Variant, schema.RecipeSchema], metric: str, highest: bool
    ) -> SuccessiveHalving:
        """Return the rungs for these variants. Raises RequestError if they cannot be compared at the same steps."""
        steps = {recipe.train.max_steps for recipe in recipes.values()}
        (last,) = steps if len(steps) == 1 else (None,)
        if not isinstance(last, int):
            raise RequestError("--halving: needs the same train.max_steps in all variants")
        if any(recipe.data.validation is None for recipe in recipes.values()):
            raise RequestError("--halving: needs data.validation, to compare the variants by")
        first, remaining = last, len(recipes)
        while remaining > 1 and first >= 2 * factor:
            first, remaining = first // factor, -(-remaining // factor)
        rungs = [first]
        while rungs[-1] < last:
            rungs.append(last if rungs[-1] * factor * factor > last else rungs[-1] * factor)
        return cls(tuple(rungs), factor, metric, highest)

    @property
    def overrides(self) -> list[str]:
        """Return the overrides with which every run is evaluated at the rungs."""
        return [f"evaluate.every={self.rungs[0]}"]

    def best(self, values: Mapping[Variant, float]) -> list[Variant]:
        """Return the variants that continue, in their order. Values that are not finite are the worst."""
        count = -(-len(values) // self.factor)
        ranking = sorted(values, key=lambda v: _compute_sort_key(values[v], self.highest))
        return [variant for variant in values if variant in ranking[:count]]


def _compute_sort_key(value: float, highest: bool) -> float:
    if value - value != 0:
        return float("inf")
    return -value if highest else value


def read_metrics(run: Path, step: int | None = None) -> tuple[int, dict[str, float]]:
    """Return the last evaluation of a run, or that at a step, with its step; no metrics without one."""
    from trainwright.engine.event_reader import read_events

    try:
        events = [event for event in read_events(run / "events.jsonl") if event["event"] == "evaluate"]
    except OSError:
        return 0, {}
    evaluations = [event for event in events if step is None or event["step"] == step]
    return (int(evaluations[-1]["step"]), dict(evaluations[-1]["metrics"])) if evaluations else (0, {})


@dataclass
class VariantRuns:
    """Train variants of a recipe, each in a directory of its name.

    Args:
        overrides: of all variants.
        metric: what they are compared by; None: nothing.
        jobs: how many at once; None: as many as there are GPUs for, on a CPU one.
    """

    recipe: Recipe | str | PathLike[str]
    overrides: Sequence[str]
    directory: Path
    recipes: Mapping[Variant, schema.RecipeSchema]
    metric: str | None
    jobs: int | None
    progress: bool

    def train(self, halving: SuccessiveHalving | None) -> None:
        """Train all variants to their end; with ``halving`` only the best ones.

        Raises:
            RequestError: the directory has runs of another recipe, or the first evaluation lacks the metric.
            TrainwrightError: of the first run that does not finish.
        """
        self._check()
        slots = self._list_slots()
        variants = list(self.recipes)
        for rung in (None,) if halving is None else halving.rungs:
            last = halving is None or rung == halving.rungs[-1]
            self._all(variants, None if last else rung, slots)
            if halving is not None and rung is not None and not last:
                values = {variant: self._value(variant, rung, halving.metric) for variant in variants}
                variants = halving.best(values)
                self._say(f"step {rung}: continued with {', '.join(variant.name for variant in variants)}")

    def _check(self) -> None:
        """Remember every recipe as it was requested; a run of the same name has to be of the same one."""
        from trainwright.recipe.loading import dump_recipe

        for variant, recipe in self.recipes.items():
            file, text = self.directory / _ASKED / f"{variant.name}.yaml", dump_recipe(recipe)
            if file.is_file() and file.read_text(encoding="utf-8") != text:
                run = self.directory / variant.name
                raise RequestError(f"--out: {run} is of another recipe, {file}; pass another directory, or remove it")
        for variant, recipe in self.recipes.items():
            file = self.directory / _ASKED / f"{variant.name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, dump_recipe(recipe))

    def _list_slots(self) -> list[dict[str, str]]:
        """Return for each run at a time the environment variables with its share of the devices."""
        machine = detect()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(machine.gpus))))).split(",")
        needs = [recipe.parallel.num_processes for recipe in self.recipes.values()]
        if not machine.gpus or any(recipe.parallel.device == "cpu" for recipe in self.recipes.values()):
            count = self.jobs or 1
            threads = {"OMP_NUM_THREADS": str(max(1, machine.cpu_cores // count))} if count > 1 else {}
            return [threads] * count
        gpus_per_run = max((need for need in needs if isinstance(need, int)), default=0)
        if not all(isinstance(need, int) for need in needs):
            gpus_per_run = len(gpus) // (self.jobs or 1)
        count = min(self.jobs or len(gpus), len(gpus) // max(1, gpus_per_run))
        if not count:
            raise RequestError(f"--jobs: {self.jobs} runs at once need {gpus_per_run} GPUs each; there are {len(gpus)}")
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * gpus_per_run : (i + 1) * gpus_per_run])} for i in range(count)
        ]

    def _all(self, variants: Sequence[Variant], rung: int | None, slots: Sequence[dict[str, str]]) -> None:
        """Train variants up to a rung, or to their end."""
        remaining = [variant for variant in variants if not self._is_done(variant, rung)]
        if len(slots) == 1 or len(remaining) < 2:
            for variant in remaining:
                self._say(self._format_heading(variant, rung))
                self._train_here(variant, rung)
            return
        free: SimpleQueue[dict[str, str]] = SimpleQueue()
        for slot in slots:
            free.put(slot)
        with pass_on_signals() as (programs, stop_signals), ThreadPoolExecutor(len(slots)) as pool:

            def train_beside(variant: Variant) -> None:
                slot = free.get()
                try:
                    if not stop_signals:
                        self._train_beside(variant, rung, slot, programs)
                finally:
                    free.put(slot)

            for future in [pool.submit(train_beside, variant) for variant in remaining]:
                future.result()
            if stop_signals:
                raise Stopped("stopped; the same command continues")

    def _is_done(self, variant: Variant, rung: int | None) -> bool:
        from trainwright.engine.event_reader import read_status

        run = self.directory / variant.name
        if (run / "final").is_dir() and read_status(run) == "finished":
            self._say(f"{run} is already finished")
            return True
        return rung is not None and bool(read_metrics(run, rung)[1])

    def _train_here(self, variant: Variant, rung: int | None) -> None:
        run, until = self.directory / variant.name, _format_until(rung)
        try:
            with _stop_without_metric(self.metric, run), redirect_stdout(sys.stderr):
                if (run / "recipe.yaml").is_file():
                    resume(run, progress=self.progress, until=until)
                else:
                    words = [*self.overrides, *variant.overrides, format_directory_override(run)]
                    train(self.recipe, *words, progress=self.progress, until=until)
        except Stopped:
            if rung is None or not read_metrics(run, rung)[1]:  # a user has stopped it
                raise

    def _train_beside(
        self, variant: Variant, rung: int | None, slot: Mapping[str, str], programs: list[subprocess.Popen[Any]]
    ) -> None:
        """Train a variant in a process of its own, whose output goes to a file."""
        run, until = self.directory / variant.name, _format_until(rung)
        log = self.directory / _ASKED / f"{variant.name}.log"
        file = self.directory / _ASKED / f"{variant.name}.yaml"
        words = [str(file), *self.overrides, format_directory_override(run)]
        words = ["--resume", str(run)] if (run / "recipe.yaml").is_file() else words
        limit = [] if until is None else ["--until", until]
        command = [sys.executable, "-P", "-m", "trainwright", "train", *words, *limit]
        self._say(f"{self._format_heading(variant, rung)}: {log}")
        with log.open("ab") as output:
            process = start_program(command, stdout=output, stderr=output, env={**build_child_environment(), **slot})
            programs.append(process)
            with _stop_without_metric(self.metric, run):
                code = process.wait()
            programs.remove(process)
        if code == EXIT_FINISHED or (code == EXIT_STOPPED and rung is not None and read_metrics(run, rung)[1]):
            return
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        raise build_error(code if code > 0 else 128 - code, f"{variant.name} has failed: {lines[-1]}; see {log}")

    def _value(self, variant: Variant, rung: int, metric: str) -> float:
        metrics = read_metrics(self.directory / variant.name, rung)[1]
        check_measured(metric, metrics)
        return metrics[metric]

    def _format_heading(self, variant: Variant, rung: int | None) -> str:
        position = list(self.recipes).index(variant) + 1
        to = "" if rung is None else f" to step {rung}"
        return f"[{position}/{len(self.recipes)}] {' '.join(variant.overrides) or 'unchanged'}{to}"

    def _say(self, line: str) -> None:
        if self.progress:
            say(line, file=sys.stderr)


def check_measured(metric: str, names: Collection[str]) -> None:
    """Raise RequestError if metrics were measured, and this one is not among them."""
    if names and metric not in names:
        raise RequestError(f"--metric: {metric} is not measured; choose from {', '.join(names)}")


@contextmanager
def _stop_without_metric(metric: str | None, run: Path) -> Iterator[None]:
    """Stop a run after its first evaluation if that has no ``metric``, and raise RequestError then."""
    end_event, metric_names = Event(), list[str]()

    def watch() -> None:
        while not metric_names and not end_event.wait(_LOOK_SECONDS):
            metric_names.extend(read_metrics(run)[1])
        if metric_names and metric not in metric_names:
            with suppress(RequestError):  # it has ended
                stop(run)

    watcher = Thread(target=watch)
    if metric is not None:
        watcher.start()
    try:
        yield
    finally:
        end_event.set()
        if metric is not None:
            watcher.join()
            check_measured(metric, metric_names or read_metrics(run)[1])


def _format_until(rung: int | None) -> str | None:
    return None if rung is None else f"step {rung}"


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
        rows = [["", *(["step"] if steps else []), *(format_metric_name(name) for name in names)]]
        notes = [""]
        for row in self.rows:
            cells = [f"{row['metrics'][name]:.4f}" if name in row["metrics"] else "-" for name in names]
            rows.append([row["name"], *([str(row["step"])] if steps else []), *cells])
            notes.append("" if row["run"] == row["name"] else f"  the run {row['run']}")
        texts = [line + note for line, note in zip(format_table(rows, numbers=True), notes, strict=True)]
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
    from trainwright.observe.reports.comparing import is_lower_better
    from trainwright.recipe.loading import load_recipe

    refuse_worker("ablate")
    source = extract_source(recipe)
    choose = {
        "one at a time": vary_one_at_a_time,
        "grid": list_combinations,
        "sample": lambda keys: sample_variants(keys, number, seed),
    }
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
    runs = find_shared_runs(recipes)
    directory = expand_user_path(out or Path("runs") / f"{choose_stem(source)}-sweep")
    distinct = {variant: recipes[variant] for variant in dict.fromkeys(runs.values())}
    rungs = None if halving is None or metric is None else SuccessiveHalving.of(halving, distinct, metric, highest)
    if progress:
        for variant, run in runs.items():
            if variant != run:
                say(f"{variant.name} is trained once, as {run.name}", file=sys.stderr)
    all_overrides = [*overrides, *([] if rungs is None else rungs.overrides)]
    VariantRuns(recipe, all_overrides, directory, distinct, metric, jobs, progress).train(rungs)
    with Activity(sys.stderr if progress else None, "comparing the runs"):
        rows = tuple(_build_row(variant, run, directory) for variant, run in runs.items())
        ablation = Ablation(directory, rows, metric, highest)
        write_file(directory / TABLE, json.dumps(rows, indent=2) + "\n")
        _write_page(ablation)
    return ablation


def _build_row(variant: Variant, run: Variant, directory: Path) -> dict[str, Any]:
    step, metrics = read_metrics(directory / run.name)
    if not metrics:
        raise TrainingError(f"{directory / run.name}: no metrics to compare; set data.validation")
    changes = dict(variant.changes)
    return {"name": variant.name, "changes": changes, "run": run.name, "step": step, "metrics": metrics}


def _write_page(ablation: Ablation) -> None:
    """Write the page of an ablation, where the package with the script of charts is installed."""
    if ablation.metric is None:
        return
    with suppress(RequestError):
        page = _build_page(ablation.directory, ablation.rows, ablation.metric, ablation.best["name"])
        write_file(ablation.directory / PAGE, page)


def _build_page(directory: Path, rows: Sequence[Mapping[str, Any]], metric: str, best: str) -> str:
    """Return the runs of an ablation in a table, a chart of the metric for each key, and all curves.

    Raises RequestError if the script of charts is missing.
    """
    from trainwright.observe.reports.charts import build_curve_charts, build_point_chart
    from trainwright.observe.reports.figures import RunFigures
    from trainwright.observe.reports.page import CURVE_MENU, Page, format_html_table, format_section, to_html

    page = Page("Ablation - Trainwright")
    page.add(f"<header><h1>Ablation</h1><p>Best by {to_html(metric)}: <b>{to_html(best)}</b></p></header>")
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    heads = ["", "Run", "Step", *(format_metric_name(name) for name in names)]
    cells = [
        [row["name"], row["run"], row["step"], *(shown(row["metrics"].get(name, "")) for name in names)] for row in rows
    ]
    page.add(format_section("Runs", format_html_table(heads, cells)))
    keys = dict.fromkeys(key for row in rows for key in row["changes"])
    charts = [build_point_chart(key, metric, _build_points(rows, key, metric)) for key in keys]
    page.add(format_section(f"{metric} by key", page.add_charts(charts)))
    runs = [RunFigures.read(directory / name) for name in dict.fromkeys(row["run"] for row in rows)]
    page.add(format_section("Curves", CURVE_MENU, page.add_charts(build_curve_charts(runs))))
    return page.render()


def _build_points(rows: Sequence[Mapping[str, Any]], key: str, metric: str) -> list[dict[str, Any]]:
    """Return a point for each row that changes the key, as a number where all values are numbers."""
    measured_rows = [row for row in rows if key in row["changes"] and metric in row["metrics"]]
    numbers = [_parse_number(row["changes"][key]) for row in measured_rows]
    values = numbers if None not in numbers else [row["changes"][key] for row in measured_rows]
    return [
        {"place": value, "value": row["metrics"][metric], "run": row["name"], "steps": f"step {row['step']}"}
        for value, row in zip(values, measured_rows, strict=True)
    ]


def _parse_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
