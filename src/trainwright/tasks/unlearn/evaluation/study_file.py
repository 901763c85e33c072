"""A study of unlearning: one file that describes a full model, a retrained one and several unlearned ones.

The file holds sections of recipes, shared by several runs; each run's recipe is built and checked here before training,
with messages that name the line in the study's file. The rows of a study are a part of a benchmark, as a directory of
the same layout, with the training rows of two models:

    forget05.jsonl, forget05_perturbed.jsonl, …   as in TOFU, the first rows of each
    retain95.jsonl                                for the retain-only model: the retain rows and general knowledge
    full.jsonl                                    for the full model: these and the forget rows

The results of a study: one row per model, as a table, as Markdown and as JSON, and the plot of how well each has
forgotten against how much it has kept.

    results.json   all metrics of all models, and the fraction of the full model's utility that each keeps
    results.md     the table
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from trainwright.data.sources.reading import read_rows
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.inference.evaluation.report import format_number, write_text
from trainwright.recipe.loading import check_tree, dump_recipe, read_merged
from trainwright.recipe.problems import describe_mismatch, find_origin
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import Count, Section, Text
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, format_key_path
from trainwright.tasks.unlearn.benchmarks import TOFU_SPLITS, Benchmark, find_benchmark, is_missing_here
from trainwright.tasks.unlearn.evaluation.report import METRICS_FILE
from trainwright.utils.drawing import build_figure

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


FULL, RETAIN = "full", "retain"
_TASK = "unlearn"  # and its section
_KNOWN = ("real_authors", "world_facts")


def _check_not_reserved(name: str) -> str:
    if name in (FULL, RETAIN):
        raise ValueError(f"{name} is the name of another model of a study")
    return name


def _wrap_in_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


ModelName = Annotated[str, StringConstraints(pattern=r"^[\w-]+$"), AfterValidator(_check_not_reserved)]


# Sources of rows to forget, or a number of equal parts of the benchmark's.
Requests = Annotated[int, Field(ge=2)] | Annotated[list[Text], Field(min_length=2)]


class StudyEvaluation(Section):
    """How every model is evaluated."""

    metrics: list[Text] = Field(
        [], description="Metrics, as for eval --metrics. Default: all that the benchmark supports."
    )
    max_new_tokens: Count = Field(200, description="Maximum length of an answer, in tokens.")


class Study(Section):
    """The content of a study's file."""

    benchmark: Annotated[list[Text], Field(min_length=1), BeforeValidator(_wrap_in_list)] = Field(
        description="A benchmark, as for eval --benchmark; of a list, the first whose directory exists."
    )
    subset: Annotated[dict[Text, Count], BeforeValidator(lambda value: {} if value is None else value)] = Field(
        {}, description="Number of first rows to use, by set; other sets are used in full. null: all sets in full."
    )
    known: list[Text] = Field(
        [],
        description="Sets (real_authors, world_facts) that both models also train on and that unlearning retains; "
        "for a randomly initialized model without world knowledge.",
    )
    tokenizer_vocabulary: Count | None = Field(
        None, description="Train a byte-level BPE tokenizer of this size on the rows. null: the model's tokenizer."
    )
    directory: Text = Field(description="Output directory; finished parts in it are reused.")
    model: dict[str, Any] = Field(
        default_factory=dict, description="Section model of the two fine-tuning recipes, or further keys of full."
    )
    full: Text | None = Field(None, description="A model that was trained on all rows, in place of fine-tuning one.")
    retain: Text | None = Field(
        None, description="A model that was trained on the rows to retain, in place of fine-tuning one."
    )
    sequential: Requests | None = Field(
        None,
        description="Rows to forget one request after another: each starts from the result of the one before. A list "
        "of sources, or a number of parts of the benchmark's.",
    )
    growing: Requests | None = Field(
        None,
        description="Rows to forget of growing number, each from the full model: a list of sources, or a number of "
        "equal parts of the benchmark's, of which the first 1, 2, … are used.",
    )
    splits: dict[ModelName, dict[str, Any]] = Field(
        {}, description="Several studies by name, each with the keys that differ, such as its benchmark."
    )
    parallel: dict[str, Any] = Field({}, description="Section parallel of all recipes.")
    finetune: dict[str, Any] = Field({}, description="Further sections of the two fine-tuning recipes.")
    unlearn: dict[str, Any] = Field({}, description="Further sections of all unlearning recipes.")
    objectives: dict[ModelName, dict[str, Any] | None] = Field(
        min_length=1, description="The unlearned models by name, each with its own sections."
    )
    evaluate: StudyEvaluation = Field(default_factory=StudyEvaluation, description="Evaluation of all models.")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.sequential is not None and self.growing is not None:
            raise ValueError("sequential and growing: set one of the two")
        return self

    @property
    def requests(self) -> int | list[str] | None:
        """Return the requests, of either kind."""
        return self.growing if self.sequential is None else self.sequential

    @field_validator("known")
    @classmethod
    def _of_the_two(cls, value: list[str]) -> list[str]:
        if odd := [name for name in value if name not in _KNOWN]:
            raise ValueError(f"{odd[0]} is unknown; choose from {', '.join(_KNOWN)}")
        return value


@dataclass(frozen=True)
class StudyFile:
    """A study, and where its values were written."""

    study: Study
    tree: Tree
    file: Origin

    @property
    def benchmark(self) -> Benchmark:
        """Return the first benchmark that is on this machine or on the Hub. Raises RequestError if there is none."""
        *candidates, last = self.study.benchmark
        name = next((candidate for candidate in candidates if not is_missing_here(candidate)), last)
        return find_benchmark(name, f"{self.origin('benchmark')}: benchmark")

    def splits(self) -> dict[str, StudyFile]:
        """Return the study of each split, in a directory of its own; the study itself if it has none.

        Raises:
            RequestError: a split is invalid.
        """
        return {name: self._split(name) for name in self.study.splits} or {"": self}

    def _split(self, name: str) -> StudyFile:
        values = {key: value for key, value in self.tree.values.items() if key != "splits"}
        split_values = self.study.splits[name]
        for key, value in split_values.items():
            before = values.get(key)
            values[key] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
        values["directory"] = str(Path(self.study.directory) / name)
        tree = Tree(values, dict(self.tree.origins))
        for path, origin in self.tree.origins.items():
            if path[:2] == ("splits", name) and path[2:]:
                tree.origins[path[2:]] = origin
        return StudyFile(_parse_study(tree, self.file), tree, self.file)

    def build_finetuning_recipe(self, source: str, everything: str) -> str:
        """Return the recipe that fine-tunes a model on ``source``, in YAML. ``everything``: the texts for a new
        tokenizer.

        Raises:
            RequestError: it is invalid, or trains an adapter.
        """
        size = self.study.tokenizer_vocabulary
        model = {**self.study.model, **({} if size is None else {"tokenizer": f"bpe:{size}:{everything}"})}
        recipe_values = {"task": "sft", "model": model, "data": {"train": source, "validation": None}}
        recipe = self._recipe(recipe_values, ("finetune",))
        if recipe.model.adapter.type != "none":
            raise RequestError(
                f"{self.origin('model', 'adapter')}: model.adapter: unlearning starts from the full model; remove it "
                "here, and set unlearn.model.adapter to unlearn with an adapter"
            )
        return dump_recipe(recipe)

    def build_unlearning_recipe(self, name: str, start: Path, rows: Mapping[str, str]) -> str:
        """Return the recipe of the objective called ``name``, in YAML.

        Args:
            start: the full model, or the result of the request before.
            rows: keys of the section data: what to forget and what to keep.

        Raises:
            RequestError: it is invalid, or sequential requests would train an adapter.
        """
        data = {**rows, "validation": None}
        model = {**({} if self.study.full is None else self.study.model), "name": str(start)}
        recipe_values = {"task": _TASK, "model": model, "data": data, _TASK: {"objective": name}}
        recipe = self._recipe(recipe_values, ("unlearn",), ("objectives", name))
        if self.study.sequential is not None and recipe.model.adapter.type != "none":
            raise RequestError(
                f"{self.origin('sequential')}: sequential: each request starts from the full weights of the result "
                f"before; remove model.adapter from {name}"
            )
        return dump_recipe(recipe)

    def _recipe(self, own: dict[str, Any], *paths: tuple[str, ...]) -> RecipeSchema:
        """Return the recipe of ``own`` sections, with the study's sections at ``paths`` over them."""
        tree = Tree({**own, "parallel": dict(self.study.parallel)})
        self._note(tree, ("model",), ("model",))
        self._note(tree, ("parallel",), ("parallel",))
        for path in paths:
            values: Any = self.study.model_dump()
            for part in path:
                values = values[part]
            for section, keys in (values or {}).items():
                before = tree.values.get(section)
                tree.values[section] = before | keys if isinstance(before, dict) and isinstance(keys, dict) else keys
            self._note(tree, path, ())
        return check_tree(tree, self.file).recipe

    def _note(self, tree: Tree, source: tuple[str, ...], to: tuple[str, ...]) -> None:
        """Make messages about the value at ``source`` of the study name its line there."""
        for path, origin in self.tree.origins.items():
            if path[: len(source)] == source and (key := (*to, *path[len(source) :])):
                tree.origins[key] = origin

    def origin(self, *path: str) -> Origin:
        """Return where a key was written."""
        return find_origin(path, self.tree, self.file)


def load_study(path: Path, overrides: Sequence[str] = ()) -> StudyFile:
    """Read the study at ``path`` with ``overrides`` (``key=value`` in YAML) over it.

    Raises:
        RequestError: the problems, one per line, with file and line.
    """
    tree, file = read_merged(path, overrides), Origin(str(path))
    study = StudyFile(_parse_study(tree, file), tree, file)
    study.splits()
    return study


def _parse_study(tree: Tree, file: Origin) -> Study:
    problems = [str(problem) for problem in tree.problems]
    study = None
    try:
        study = Study.model_validate(tree.values)
    except ValidationError as error:
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for item in error.errors(include_url=False):
            path = item["loc"] if item["type"] == "missing" else _find_written_path(item["loc"], tree.values)
            by_path.setdefault(path, []).append(item)
        problems += [_describe_problem(path, items, tree, file) for path, items in by_path.items()]
    if problems or study is None:
        raise RequestError("\n".join(dict.fromkeys(problems)))
    return study


def _find_written_path(loc: KeyPath, value: Any) -> KeyPath:
    """Return the path in the file of a pydantic error, without the types of unions that pydantic adds."""
    path: KeyPath = ()
    for part in loc:
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, dict) and part in inside:
            path, value = (*path, part), inside[part]
    return path


def _describe_problem(path: KeyPath, items: Sequence[ErrorDetails], tree: Tree, file: Origin) -> str:
    """Return the message about a value that matches none of its types; each of ``items`` is the error of one."""
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        problem = f"unknown key; choose from {', '.join(Study.model_fields)}"
    elif kind == "missing":
        problem = f"is missing. {Study.model_fields[str(path[0])].description}"
    elif kind == "value_error":
        problem = items[0]["msg"].removeprefix("Value error, ")
    else:
        problem = describe_mismatch(*items, key=format_key_path(path))
    return ": ".join(filter(None, (str(find_origin(path, tree, file)), format_key_path(path), problem)))


_REQUEST = "request-{}.jsonl"
_PERTURBED = ("forget", "retain", "real_authors", "world_facts")


def write_rows(study: Study, benchmark: Benchmark, directory: Path) -> Benchmark:
    """Write the rows of a study to the new ``directory``, and return them as a benchmark.

    Raises:
        RequestError: a set is named that the benchmark does not have, or has fewer rows than asked for, or its rows
            cannot be read.
    """
    kind, _, part = benchmark.name.partition("@")[0].partition(":")
    for key, names in (("subset", study.subset), ("known", study.known)):
        if unknown := [name for name in names if name not in benchmark.sets]:
            raise RequestError(f"{key}: {benchmark.name} has no set {unknown[0]}; it has {', '.join(benchmark.sets)}")
    if kind != "tofu" and (study.subset or study.known):
        raise RequestError("subset and known are for tofu only; use smaller files for other benchmarks")
    if not {"forget", "retain"} <= set(benchmark.training):
        raise RequestError(f"{benchmark.name} does not have both forget and retain rows to train on")
    scratch = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if kind == "tofu":
        _write_tofu(study, benchmark, part, scratch)
    else:
        forget, retain = (_read_benchmark_rows(benchmark.training[name], None) for name in ("forget", "retain"))
        _write(scratch / "full.jsonl", [*retain, *forget])
    if isinstance(count := study.requests, int):
        forget = _read_benchmark_rows(
            str(scratch / f"{part}.jsonl") if kind == "tofu" else benchmark.training["forget"], None
        )
        if count > len(forget):
            raise RequestError(f"{count:,} requests need as many rows to forget, but there are {len(forget):,}")
        ends = [len(forget) * number // count for number in range(count + 1)]
        for number, (begin, end) in enumerate(pairwise(ends), 1):
            _write(scratch / _REQUEST.format(number), forget[begin if study.sequential else 0 : end])
    scratch.rename(directory)
    return load_rows(benchmark, directory)


def list_requests(study: Study, directory: Path) -> list[str]:
    """Return the sources of the rows to forget, one for each request; those of numbered parts from ``directory``."""
    if isinstance(count := study.requests, int):
        return [str(directory / _REQUEST.format(number)) for number in range(1, count + 1)]
    return count or []


def load_rows(benchmark: Benchmark, directory: Path) -> Benchmark:
    """Return the benchmark that ``write_rows`` has written."""
    kind, _, part = benchmark.name.partition("@")[0].partition(":")
    if kind == "tofu":
        return find_benchmark(f"tofu:{part}@{directory}")
    return Benchmark(benchmark.name, {**benchmark.training, "full": str(directory / "full.jsonl")}, benchmark.sets)


def _write_tofu(study: Study, benchmark: Benchmark, part: str, directory: Path) -> None:
    rows_of_sets = {
        name: _read_benchmark_rows(row_set.source, study.subset.get(name)) for name, row_set in benchmark.sets.items()
    }
    for name, rows in rows_of_sets.items():
        stem = part if name == "forget" else part.replace("forget", "holdout") if name == "holdout" else name
        _write(directory / f"{stem}{'_perturbed' if name in _PERTURBED else ''}.jsonl", rows)
    forget = _read_benchmark_rows(benchmark.training["forget"], study.subset.get("forget"))
    retain_rows = _read_benchmark_rows(benchmark.training["retain"], study.subset.get("retain"))
    training_rows = {"forget": forget, "retain": retain_rows}
    for name, size in study.subset.items():
        if size > (available := max(len(rows_of_sets[name]), len(training_rows.get(name, ())))):
            raise RequestError(f"subset.{name}: {size:,} rows requested, but the set has {available:,}; lower it")
    known_rows = [row for name in study.known for row in rows_of_sets[name]]
    retain = [*retain_rows, *({key: row[key] for key in ("question", "answer")} for row in known_rows)]
    _write(directory / f"{part}.jsonl", forget)
    _write(directory / f"{TOFU_SPLITS[part]}.jsonl", retain)
    _write(directory / "full.jsonl", [*retain, *forget])
    if "idk" in benchmark.training:
        shutil.copyfile(benchmark.training["idk"], directory / "idk.jsonl")


def _read_benchmark_rows(source: str, limit: int | None) -> list[Row]:
    try:
        rows = read_rows(source, limit, "benchmark")
    except RequestError as error:
        if Path(source).exists():
            raise
        raise RequestError(
            f"{error}; set benchmark=NAME@DIRECTORY to use a directory with the benchmark's files"
        ) from None
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


KEPT = "utility_kept"
# Metric and set of the columns, if measured. Metrics not listed here have one column per set.
_COLUMNS = (
    ("answer_probability", "forget", "forget probability"),
    ("rouge_l_recall", "forget", "forget ROUGE-L"),
    ("verbatim_memorisation", "verbatim", "verbatim memorisation"),
    ("knowledge_memorisation", "forget", "forget knowledge"),
    ("truth_ratio", "forget", "forget truth ratio"),
    ("extraction_strength", "forget", "extraction strength"),
    ("forget_quality", "forget", "forget quality"),
    ("privleak", "forget", "PrivLeak, %"),
    ("answer_probability", "retain", "retain probability"),
    ("rouge_l_recall", "retain", "retain ROUGE-L"),
    ("knowledge_memorisation", "retain", "retain knowledge"),
    ("gibberish", "retain", "gibberish"),
    ("model_utility", "all", "model utility"),
    (KEPT, "all", "utility kept"),
)
_SMALLEST = 1e-300  # p-values that underflow to 0 are drawn here
_SIGNIFICANT = math.log10(0.05)
_GREY = "#555555"


@dataclass(frozen=True)
class Results:
    """The metrics of every model of a study, by model, metric and set; the full and the retain-only model first."""

    benchmark: str
    subset: Mapping[str, int]  # the number of first rows used of these sets
    models: Mapping[str, Mapping[str, Mapping[str, float]]]

    @classmethod
    def read(cls, benchmark: str, subset: Mapping[str, int], evaluations: Path, names: Sequence[str]) -> Results:
        """Read the results in ``evaluations``/<name>, for the full and the retain-only model and ``names``."""
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name in (FULL, RETAIN, *names):
            about = json.loads((evaluations / name / METRICS_FILE).read_text(encoding="utf-8"))
            results[name] = dict(about["metrics"])
        best = results[FULL].get("model_utility", {}).get("all")
        if best:
            for metrics in results.values():
                metrics[KEPT] = {"all": metrics["model_utility"]["all"] / best}
        return cls(benchmark, subset, results)

    @classmethod
    def joined(cls, splits: Mapping[str, Results]) -> Results:
        """Return the models of several splits in one table, each named after its split too."""
        models = {
            f"{split} {name}": metrics for split, results in splits.items() for name, metrics in results.models.items()
        }
        return cls(", ".join(results.benchmark for results in splits.values()), {}, models)

    def value(self, model: str, metric: str, of: str) -> float | None:
        """Return a metric of a model; None if it was not measured."""
        return self.models[model].get(metric, {}).get(of)

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """Return the columns that at least one model has."""
        pairs = dict.fromkeys(
            (metric, of) for metrics in self.models.values() for metric, values in metrics.items() for of in values
        )
        listed_metrics = {metric for metric, _, _ in _COLUMNS}
        other_columns = (
            (metric, of, _format_title(metric, of)) for metric, of in pairs if metric not in listed_metrics
        )
        return [*(column for column in _COLUMNS if column[:2] in pairs), *other_columns]

    @property
    def rows(self) -> list[list[str]]:
        """Return the table without its head."""
        return [
            [name, *(_format_cell(self.value(name, *column[:2])) for column in self.columns)] for name in self.models
        ]

    @property
    def about(self) -> str:
        """Return a description of the rows used."""
        return ", ".join(f"{name} {count}" for name, count in self.subset.items())

    def to_markdown(self) -> str:
        """Return the table."""
        head = ["model", *(title for _, _, title in self.columns)]
        lines = [head, ["---"] * len(head), *self.rows]
        about = f"{self.benchmark}{f' (rows: {self.about})' if self.subset else ''}\n\n"
        return about + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def as_json(self) -> dict[str, Any]:
        """Return the object as JSON values."""
        return {"benchmark": self.benchmark, "subset": self.subset, "models": self.models}

    def write(self, directory: Path) -> list[str]:
        """Write the table and all metrics to ``directory``; return the names of the files."""
        files = {"results.json": json.dumps(self.as_json(), indent=2) + "\n", "results.md": self.to_markdown()}
        for name, text in files.items():
            write_text(directory / name, text)
        return list(files)


def _format_title(metric: str, of: str) -> str:
    words = metric.replace("_", " ")
    return words if of == "forget" else f"{words}, {of.replace('_', ' ')}"


def _format_cell(value: float | None) -> str:
    return "" if value is None else format_number(value)


@dataclass(frozen=True)
class _Plot:
    """A plot; ``kept`` and ``forgotten``: metric, set and label of the x axis and of the y axis."""

    file: str
    kept: tuple[str, str, str]
    forgotten: tuple[str, str, str]

    @property
    def of_quality(self) -> bool:
        return self.forgotten[0] == "forget_quality"


# The first one whose metrics were measured is drawn.
_PLOTS = (
    _Plot(
        "forget-quality.png",
        ("model_utility", "all", "model utility"),
        ("forget_quality", "forget", "forget quality, log10 of p"),
    ),
    *(
        _Plot(
            "forget-against-retain.png", (metric, "retain", f"{words}, retain"), (metric, "forget", f"{words}, forget")
        )
        for metric, words in (
            ("knowledge_memorisation", "knowledge memorisation"),
            ("answer_probability", "probability of the answers"),
        )
    ),
)


def draw(splits: Sequence[Results], directory: Path) -> str | None:
    """Draw the plot of one or more splits, side by side, in ``directory``; return its file name, or None if there is
    nothing to plot. The results of several requests are joined by a line, in their order.

    Raises:
        MachineError: matplotlib is not installed.
    """
    for plot in _PLOTS:
        panels = [(results, points) for results in splits if (points := _list_points(plot, results))]
        if panels:
            break
    else:
        return None
    figure = build_figure(3.5 + 4.5 * len(panels), 4.5, "the plot of a study")
    names = dict.fromkeys(name.partition(".")[0] for _, points in panels for name in points)
    colors = {name: _GREY if name in (FULL, RETAIN) else f"C{number}" for number, name in enumerate(names)}
    for axes, (results, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, plot, results, points, colors)
    handles = dict(pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(directory / plot.file, dpi=120)
    return plot.file


def _draw_panel(
    axes: Any, plot: _Plot, results: Results, points: Mapping[str, tuple[float, float]], colors: Mapping[str, str]
) -> None:
    for series, color in colors.items():
        series_points = {name: point for name, point in points.items() if name.partition(".")[0] == series}
        if not series_points:
            continue
        marker = {FULL: "*", RETAIN: "P"}.get(series, "o")
        xs, ys = zip(*series_points.values(), strict=True)
        axes.plot(xs, ys, marker=marker, markersize=8, linewidth=1, linestyle="-", color=color, label=series)
        for name, point in series_points.items():
            axes.annotate(name.partition(".")[2], point, xytext=(5, 5), textcoords="offset points", fontsize="small")
    if plot.of_quality:
        axes.axhline(_SIGNIFICANT, color="#a33", linestyle="--", linewidth=1, label="p = 0.05")
    axes.set_xlim(-0.02, max(1.0, *(utility for utility, _ in points.values())) + 0.05)
    axes.set_xlabel(plot.kept[2])
    axes.set_ylabel(plot.forgotten[2])
    axes.set_title(results.benchmark + (f"\nrows: {results.about}" if results.subset else ""), fontsize="medium")
    axes.grid(alpha=0.3)


def _list_points(plot: _Plot, results: Results) -> dict[str, tuple[float, float]]:
    """Return the coordinates (kept, forgotten) of every model that has both; empty if no unlearned one has."""
    points = {}
    for name in results.models:
        utility, forgotten = (results.value(name, *column[:2]) for column in (plot.kept, plot.forgotten))
        if plot.of_quality and name == RETAIN:
            forgotten = 1.0  # it is its own reference
        if utility is None or forgotten is None or not math.isfinite(utility + forgotten):
            continue
        points[name] = utility, math.log10(max(forgotten, _SMALLEST)) if plot.of_quality else forgotten
    return points if set(points) - {FULL, RETAIN} else {}
