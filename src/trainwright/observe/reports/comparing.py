"""Runs beside one another: what their recipes differ in, their curves, and their evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.observe.reports.charts import build_curve_charts
from trainwright.observe.reports.figures import RunFigures, is_run, to_mapping
from trainwright.observe.reports.page import CURVE_MENU, Page, format_html_table, format_section, to_html
from trainwright.recipe.yaml_text import iterate_values
from trainwright.utils import text
from trainwright.utils.paths import expand_user_path, write_file

# The same in no two runs.
_OWN = ("logging.run_directory",)
_MISSING = "-"
_LONGEST_VALUE = 1000
# What rows and tokens follow from, beside the section data; and keys of that section that say how they are used.
_TOKENIZER = ("model.name", "model.tokenizer", "model.chat_template")
_NOT_ROWS = ("data.pack_length",)
_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per", "divergence", "error", "forget_probability")


@dataclass(frozen=True)
class RunsCompared:
    """Runs beside one another; ``str()`` gives what ``trainwright compare`` prints.

    Attributes:
        recipes: the keys whose values differ, with the value of every run.
        evaluations: validation metrics beside those of the first run, best and last, after the same numbers of steps.
        notes: what cannot be compared, because the data are different, and what is wrong with the files of a run.
        page: the file that was written; None if none was asked for.
    """

    runs: Sequence[RunFigures]
    recipes: dict[str, list[str]]
    evaluations: Sequence[Difference]
    notes: Sequence[str] = ()
    page: Path | None = None

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield the comparison as text, see `text.format_table`."""
        yield from text.format_table([list(SUMMARY_HEAD), *iterate_summary_rows(self.runs)], width)
        yield ""
        yield from (f"{run.name} {run.parent}" for run in self.runs if run.parent)
        yield from (f"warning: {note}".replace("\n", " ") for note in self.notes)
        if self.evaluations:
            yield from text.format_table([list(DIFFERENCE_HEAD), *map(format_difference, self.evaluations)], width)
            yield ""
        if self.recipes:
            names = [run.name for run in self.runs]
            rows = ([key, *values] for key, values in self.recipes.items())
            yield from text.format_table([["Key", *names], *rows], width)
        else:
            yield "the recipes are the same"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def compare(
    *runs: str | PathLike[str] | Iterable[str | PathLike[str]], out: str | PathLike[str] | None = None
) -> RunsCompared:
    """Compare runs: recipes, curves and evaluations; what ``trainwright compare`` does.

    Args:
        runs: at least two run directories, one by one or as a list; the others are compared with the first. A directory
            that is not a run stands for the runs in it, by name.
        out: an HTML page to write.

    Raises:
        RequestError: fewer than two runs, a directory is not a run's, or the page cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.compare(["runs/tiny", "runs/tiny"])
        >>> found.recipes, [each.last[1] - each.last[0] for each in found.evaluations][:1]
        ({}, [0.0])
    """
    paths = [Path(path) for run in runs for path in ([run] if isinstance(run, (str, PathLike)) else run)]
    directories = [directory for path in paths for directory in _list_runs(path)]
    figures = [RunFigures.read(directory) for directory in directories]
    if len(figures) < 2:
        only = f", and {directories[0]} is one" if directories else ""
        raise RequestError(
            f"compare needs at least two runs{only}; name another one, or a directory with several: "
            "trainwright compare runs/a runs/b"
        )
    file = None if out is None else expand_user_path(out)
    if file is not None:
        try:
            write_file(file, build_comparison_page(figures))
        except OSError as error:
            raise RequestError(f"{file}: {error.strerror}") from None
    return RunsCompared(
        figures, find_recipe_differences(figures), compute_paired_differences(figures), list_notes(figures), file
    )


def _list_runs(directory: Path) -> list[Path]:
    """Return the directory if it is a run, else the runs in it; if there is none the directory, to be refused."""
    folder = expand_user_path(directory)
    if is_run(folder) or not folder.is_dir():
        return [directory]
    return sorted(filter(is_run, folder.iterdir())) or [directory]


@dataclass(frozen=True)
class Difference:
    """A validation metric of a run beside that of the first run, after the same numbers of steps.

    The untrained model, step 0, does not count.

    Attributes:
        step: the last one after which both were evaluated.
        last: the values there, of the first run and of this one.
        best: the best values, of those after which both were evaluated.
        interval: 95 % interval of this run's last value, if the metric is a proportion of answers.
        evaluations: how many both have.
    """

    metric: str
    run: str
    step: int
    last: tuple[float, float]
    best: tuple[float, float]
    interval: tuple[float, float] | None
    evaluations: int


def find_recipe_differences(runs: Sequence[RunFigures]) -> dict[str, list[str]]:
    """Return the keys whose values differ, with the value of every run."""
    flat = [dict(iterate_values(run.recipe)) for run in runs]
    keys = sorted({key for values in flat for key in values} - set(_OWN))
    rows = {key: [_format_value(values.get(key, _MISSING)) for values in flat] for key in keys}
    return {key: [_shorten_value(value) for value in values] for key, values in rows.items() if len(set(values)) > 1}


def compute_paired_differences(runs: Sequence[RunFigures]) -> list[Difference]:
    """Return the validation metrics of each run beside those of the first one, if both have the same data."""
    first, differences = runs[0], []
    of_first = _collect_evaluations(first)
    for run in runs[1:]:
        if _describe_other_data(first, run, "validation"):
            continue
        for metric, values in _collect_evaluations(run).items():
            steps = sorted(of_first.get(metric, {}).keys() & values.keys())
            if steps:
                best = min if is_lower_better(metric) else max
                pairs = [(of_first[metric][step], values[step]) for step in steps]
                best_pair = best(pair[0] for pair in pairs), best(pair[1] for pair in pairs)
                interval = _find_interval(run, metric, steps[-1])
                differences.append(Difference(metric, run.name, steps[-1], pairs[-1], best_pair, interval, len(steps)))
    return differences


def list_notes(runs: Sequence[RunFigures]) -> list[str]:
    """Return what is wrong with the files of each run, and a sentence for each that was trained or validated on other
    data than the first one, with the keys.
    """
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    for run in runs[1:]:
        names = f"{run.name} and {runs[0].name}"
        if keys := _describe_other_data(runs[0], run, "validation"):
            notes.append(
                f"{names} were validated on different data ({keys}): their validation metrics are not comparable; "
                "evaluate both on the same rows, with trainwright eval RUN --data FILE --against RUN"
            )
        if keys := _describe_other_data(runs[0], run, "train"):
            notes.append(f"{names} were trained on different data ({keys}): their training losses are not comparable")
    return notes


def _describe_other_data(first: RunFigures, run: RunFigures, split: str) -> str:
    """Return what makes the data of a split different, as the keys of the recipes that differ; "" if it is the same."""
    sections = [to_mapping(figures.recipe.get("data")) for figures in (first, run)]
    held_out = not any(isinstance(section.get("validation"), (str, list, dict)) for section in sections)
    keys = [key for key in find_recipe_differences([first, run]) if _decides_tokens(key, split, held_out=held_out)]
    left, right = (figures.start.get("fingerprints", {}).get(split) for figures in (first, run))
    if left is not None and right is not None:
        return "" if left == right else ", ".join(keys) or "their rows have changed"
    # Recorded by an earlier version, or before the first launch. The key that names other validation data is decisive.
    return ", ".join(key for key in keys if key.startswith("data."))


def _decides_tokens(key: str, split: str, *, held_out: bool) -> bool:
    """Return whether a key decides what the tokens of a split are.

    Args:
        held_out: the validation rows are some of the training rows.
    """
    if key in _NOT_ROWS:
        return False
    other_keys = () if held_out else (("data.validation",) if split == "train" else ("data.train",))
    return key.startswith(("data.", *_TOKENIZER)) and not key.startswith(other_keys)


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    name = metric.rpartition("/")[2]  # without the validation set
    return any(word in name for word in _LOWER_IS_BETTER)


def iterate_summary_rows(runs: Sequence[RunFigures]) -> Iterator[list[str]]:
    """Yield a row of figures for each run."""
    for run in runs:
        last = text.format_metric(float(run.steps[-1]["loss"])) if run.steps else _MISSING
        best = text.format_metric(run.best[1]) if run.best else _MISSING
        speed = f"{text.format_count(run.tokens_per_second)} tokens/s" if run.tokens_per_second else _MISSING
        training_time = text.format_duration(sum(float(event["step_time"]) for event in run.steps))
        yield [run.name, run.status, f"{run.step:,}", last, best, speed, training_time]


SUMMARY_HEAD = ("Run", "Status", "Step", "Loss", "Best validation", "Speed", "Time in steps")
_OF_FIRST = ("First run's", "Difference")
DIFFERENCE_HEAD = ("Metric", "Run", "Best", *_OF_FIRST, "Last", *_OF_FIRST, "At step", "Evaluations")


def format_difference(difference: Difference) -> list[str]:
    """Return a difference as text."""
    (best, own_best), (last, own_last) = difference.best, difference.last
    interval = "" if difference.interval is None else " ({:.4g} to {:.4g})".format(*difference.interval)
    at_best = [f"{own_best:.4g}", f"{best:.4g}", f"{own_best - best:+.4g}"]
    at_last = [f"{own_last:.4g}{interval}", f"{last:.4g}", f"{own_last - last:+.4g}"]
    return [difference.metric, difference.run, *at_best, *at_last, f"{difference.step:,}", str(difference.evaluations)]


def build_comparison_page(runs: Sequence[RunFigures]) -> str:
    """Return runs beside one another as a page. Raises RequestError if the script of charts is missing."""
    names = [run.name for run in runs]
    page = Page(f"{' and '.join(names[:3])} - Trainwright")
    page.add("<header><h1>Comparison of runs</h1></header>")
    page.add(format_section("Runs", format_html_table(SUMMARY_HEAD, iterate_summary_rows(runs))))
    page.add("".join(f"<p>{to_html(f'{run.name} {run.parent}')}</p>" for run in runs if run.parent))
    page.add("".join(f'<p class="warn">{to_html(note)}</p>' for note in list_notes(runs)))
    page.add(format_section("Curves", CURVE_MENU, page.add_charts(build_curve_charts(runs))))
    if rows := [format_difference(difference) for difference in compute_paired_differences(runs)]:
        note = (
            "<p>At the steps after which both were evaluated, without the untrained model. Lower is better for losses. "
            "The interval is that of the rows (Wilson).</p>"
        )
        page.add(format_section("Evaluations, paired by step", note, format_html_table(DIFFERENCE_HEAD, rows)))
    differences = [[key, *values] for key, values in find_recipe_differences(runs).items()]
    same = "<p>The recipes are the same.</p>"
    page.add(format_section("Recipes", format_html_table(["Key", *names], differences) if differences else same))
    return page.render()


def _collect_evaluations(run: RunFigures) -> dict[str, dict[int, float]]:
    values_by_metric: dict[str, dict[int, float]] = {}
    for event in run.evaluations:
        if event["step"] == 0:
            continue
        for metric, value in event["metrics"].items():
            if math.isfinite(value):
                values_by_metric.setdefault(metric, {})[int(event["step"])] = float(value)
    return values_by_metric


def _find_interval(run: RunFigures, metric: str, step: int) -> tuple[float, float] | None:
    event = next(event for event in reversed(run.evaluations) if event["step"] == step)
    interval = event.get("intervals", {}).get(metric)
    return (float(interval[0]), float(interval[1])) if interval else None


def _format_value(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _shorten_value(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
