"""A complete study of unlearning, as a series of ordinary runs and evaluations."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api.evaluation import evaluate
from trainwright.api.generation import generate
from trainwright.api.recipe import Recipe, extract_source
from trainwright.api.training import resume, train
from trainwright.errors import RequestError, Stopped, TrainwrightError
from trainwright.machine.detect import detect
from trainwright.recipe.arguments import check_argument
from trainwright.recipe.sections.fields import Count
from trainwright.run.group.environment import refuse_worker
from trainwright.run.run_directory import format_directory_override
from trainwright.utils.installation import require
from trainwright.utils.paths import expand_user_path, write_file
from trainwright.utils.text import format_plural, say

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.benchmarks import Benchmark
    from trainwright.tasks.unlearn.evaluation.study_file import Results, StudyFile


_RUNS, _EVALUATIONS, _ASKED = "runs", "evaluations", "asked"
# Metrics that compare with the retain-only model, and the metrics of that model that they need.
_OF_REFERENCE = {"forget_quality": "truth_ratio", "privleak": "mia_min_k", "mia_reference": "mia_loss"}


def unlearn_study(study: str | PathLike[str], *overrides: str, progress: bool = False) -> Results:
    """Fine-tune on all rows and on the retain rows only, unlearn with each objective, and measure all models.

    What ``trainwright unlearn-study`` does. Every part is an ordinary run or evaluation in its own directory; if it is
    stopped, the same call continues, and finished parts are not repeated.

    Args:
        study: the study's YAML file.
        overrides: ``key=value``, the value in YAML.
        progress: show the parts, with their runs and evaluations.

    Returns:
        The metrics of every model, which are also in the study's directory as ``results.json`` and ``results.md``; of a
        study with splits, all of them, each model named after its split too.

    Raises:
        RequestError: the study is invalid, or its directory has parts made with other settings.
        MachineError, TrainingError, Stopped: of the first part that does not finish.

    Examples:
        >>> import trainwright as tw
        >>> tw.unlearn_study("nowhere.yaml")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: nowhere.yaml: ...
    """
    from trainwright.tasks.unlearn.evaluation.study_file import load_study

    refuse_worker("unlearn-study")
    loaded_study = load_study(Path(study), overrides)
    require("matplotlib", "the plot of a study")
    require("scipy", "forget_quality")
    require("rouge_score", "rouge_l")
    results_by_split = {name: _StudySteps(split, progress).walk() for name, split in loaded_study.splits().items()}
    if not loaded_study.study.splits:
        return results_by_split[""]
    from trainwright.tasks.unlearn.evaluation.study_file import Results, draw

    directory, results = expand_user_path(loaded_study.study.directory).resolve(), Results.joined(results_by_split)
    results.write(directory)
    draw(list(results_by_split.values()), directory)
    return results


class _StudySteps:
    """The parts of a study, in order."""

    def __init__(self, study: StudyFile, progress: bool) -> None:
        self._study = study
        self._progress = progress
        self._directory = expand_user_path(study.study.directory).resolve()
        self._began = time.monotonic()

    def walk(self) -> Results:
        """Run the parts that are not finished, and return the results of all."""
        from trainwright.tasks.unlearn.evaluation.study_file import FULL, RETAIN, Results, draw

        (self._directory / _ASKED).mkdir(parents=True, exist_ok=True)
        benchmark = self._rows()
        metrics = self._metrics(benchmark)
        recipes = self._recipes(benchmark)
        names = [name for name in recipes if name not in (FULL, RETAIN)]
        for name, file in recipes.items():
            self._train(name, file)
        for name in (RETAIN, FULL, *names):
            self._evaluate(name, benchmark, metrics)
        name, subset = benchmark.name.partition("@")[0], self._study.study.subset
        results = Results.read(name, subset, self._directory / _EVALUATIONS, names)
        plot = draw([results], self._directory)
        if plot is None:
            self._tell("no plot: needs a metric of the forget set and one of the retained knowledge")
        files = [*results.write(self._directory), *([] if plot is None else [plot])]
        self._tell(f"{', '.join(files)} are in {self._directory}/")
        return results

    def _rows(self) -> Benchmark:
        """Return the training and evaluation rows, in the study's directory."""
        from trainwright.tasks.unlearn.evaluation.study_file import load_rows, write_rows

        study, directory = self._study.study, self._directory / "benchmark"
        settings = study.model_dump(include={"benchmark", "subset", "known"})
        if study.requests is not None:
            settings |= study.model_dump(include={"sequential", "growing"}, exclude_none=True)
        self._ask("benchmark", str(settings), done=directory.exists())
        benchmark = self._study.benchmark
        return load_rows(benchmark, directory) if directory.exists() else write_rows(study, benchmark, directory)

    def _metrics(self, benchmark: Benchmark) -> list[str]:
        """Return the metrics asked for, or all that lack nothing. Raises the errors that would otherwise come later."""
        from trainwright.tasks.unlearn.evaluation.items import read_sets
        from trainwright.tasks.unlearn.evaluation.registry import METRICS, describe_missing, select_usual

        key = f"{self._study.origin('evaluate', 'metrics')}: evaluate.metrics"
        sets = read_sets(benchmark, benchmark.sets, None, "benchmark")
        references = {"--reference-log": True, "--reference-model": True}
        names = self._study.study.evaluate.metrics or select_usual(sets, references)
        for name in names:
            if name not in METRICS:
                raise RequestError(f"{key}: unknown benchmark metric {name!r}; choose from {', '.join(METRICS)}")
            if (why := describe_missing(name, sets, references)) is not None:
                raise RequestError(f"{key}: {name}: {why}")
        return names

    def _recipes(self, benchmark: Benchmark) -> dict[str, Path]:
        """Return the recipes of all runs; each is checked before the first starts, and rows to forget for overlaps."""
        from trainwright.recipe.loading import load_recipe
        from trainwright.tasks.unlearn.evaluation.study_file import FULL, list_requests
        from trainwright.tasks.unlearn.section import select_data
        from trainwright.tasks.unlearn.stream import refuse_overlap

        study, training = self._study, benchmark.training
        finetuned_names = [name for name, model in self._list_given_models().items() if model is None]
        texts = {name: study.build_finetuning_recipe(training[name], training["full"]) for name in finetuned_names}
        rows = {name: training[name] for name in ("forget", "retain", "holdout", "idk") if name in training}
        runs = self._directory / _RUNS
        full = Path(self._list_given_models()[FULL] or runs / FULL / "final")
        requests = list_requests(study.study, self._directory / "benchmark")
        for name in study.study.objectives:
            if not requests:
                texts[name] = study.build_unlearning_recipe(name, full, rows)
            start = full
            for number, forget in enumerate(requests, 1):
                texts[f"{name}.{number}"] = study.build_unlearning_recipe(name, start, {**rows, "forget": forget})
                if study.study.sequential is not None:
                    start = runs / f"{name}.{number}" / "final"
        files = {name: self._ask(f"{name}.yaml", text, done=(runs / name).exists()) for name, text in texts.items()}
        for name in texts:
            if name not in finetuned_names and not (runs / name).exists():
                refuse_overlap(select_data(load_recipe(files[name])))
        return files

    def _list_given_models(self) -> dict[str, str | None]:
        """Return the full and the retain-only model that are named, in place of fine-tuning them."""
        from trainwright.tasks.unlearn.evaluation.study_file import FULL, RETAIN

        return {FULL: self._study.study.full, RETAIN: self._study.study.retain}

    def _train(self, name: str, file: Path) -> None:
        run = self._directory / _RUNS / name
        if (run / "final").is_dir():
            return
        has_checkpoints = (run / "checkpoints").is_dir() and any((run / "checkpoints").iterdir())
        if run.exists() and not has_checkpoints:
            import shutil

            shutil.rmtree(run)  # stopped before there was anything to resume from
        if has_checkpoints:
            self._run_part(f"continuing with {name}", lambda: resume(run, progress=self._progress))
        else:
            self._run_part(
                f"trains {name}", lambda: train(file, format_directory_override(run), progress=self._progress)
            )

    def _evaluate(self, name: str, benchmark: Benchmark, metrics: Sequence[str]) -> None:
        from trainwright.tasks.unlearn.evaluation.study_file import RETAIN

        out, reference = self._directory / _EVALUATIONS / name, self._directory / _EVALUATIONS / RETAIN
        existing = self._list_given_models()
        model = existing.get(name) or str(self._directory / _RUNS / name)
        options: dict[str, Any] = {"benchmark": benchmark.name, "out": str(out)}
        options["max_new_tokens"] = self._study.study.evaluate.max_new_tokens
        if existing.get(name) is not None and (tokenizer := self._study.study.model.get("tokenizer")) is not None:
            options["tokenizer"] = str(tokenizer)
        if name == RETAIN:
            metrics = list(dict.fromkeys(_OF_REFERENCE.get(metric, metric) for metric in metrics))
        else:
            options |= _find_references(metrics, reference, existing[RETAIN] or self._directory / _RUNS / RETAIN)
        options |= {"metrics": ",".join(metrics), **self._processes()}
        words = (f"--{option.replace('_', '-')} {value}" for option, value in options.items())
        self._ask(f"evaluate-{name}", " ".join([model, *words]) + "\n", done=out.exists())
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            self._run_part(f"measures {name}", lambda: self._measure(model, options))

    def _measure(self, model: str, options: dict[str, Any]) -> None:
        evaluation = evaluate(model, **options, progress=self._progress)
        if self._progress:
            say(f"{evaluation}\n\n{evaluation.directory}/")

    def _processes(self) -> dict[str, int]:
        num_processes = self._study.study.parallel.get("num_processes", "auto")
        machine = detect()
        limit = len(machine.gpus) or machine.cpu_cores
        return {"num_processes": min(num_processes, limit)} if isinstance(num_processes, int) else {}

    def _ask(self, name: str, text: str, *, done: bool) -> Path:
        """Record the request of a part; raise if the part exists and its request was different."""
        file = self._directory / _ASKED / name
        if done and file.is_file() and file.read_text(encoding="utf-8") != text:
            raise RequestError(
                f"{self._directory}: {name} was made with the settings in {file}, which differ from the study; choose "
                "another directory=…, or remove what should be made again"
            )
        file.write_text(text, encoding="utf-8")
        return file

    def _run_part(self, what: str, part: Callable[[], object]) -> None:
        """Run one part. If it does not finish, the study ends in the same way."""
        self._tell(what)
        try:
            part()
        except Stopped as stopped:
            stopped.add_note(f"stopped; the study {what} at that point: run the same command again to continue")
            raise
        except TrainwrightError as error:
            error.add_note(f"the study failed: it {what} at that point; run the same command again to continue")
            raise

    def _tell(self, what: str) -> None:
        if not self._progress:
            return
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        say(f"[{minutes:02d}:{seconds:02d}] {what}")


def _find_references(metrics: Sequence[str], log: Path, model: Path | str) -> dict[str, str]:
    """Return the references to the retain-only model, if a metric needs them."""
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    metric_options = {METRICS[name].option for name in metrics}
    options = {"reference_log": log, "reference_model": model}
    return {name: str(value) for name, value in options.items() if f"--{name.replace('_', '-')}" in metric_options}


FIELD = "alternate"
# A part is answered and written at once; where parts begin, with the seed, determines the answers.
_PART = 100  # rows
# The idea of the prompts of AltPO (arXiv 2409.13474): the model sees the answer, and makes up another one.
_PROMPT = """\
Question: {question}
Answer: {answer}

Invent a different answer to this question. It must be plausible, must contradict every fact that is stated only in \
the answer above, and must keep what the question says. Reply with the new answer only.

New answer:"""
_NEXT_QUESTION = re.compile(r"\b(?:Question|Q):")  # a model that continues texts goes on with another one


def alternates(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    out: str | PathLike[str],
    count: int = 5,
    temperature: float = 1.0,
    max_new_tokens: int = 200,
    seed: int = 0,
    batch_size: int | None = None,
    num_processes: int | None = None,
    progress: bool = False,
) -> Path:
    """Let a recipe's model write other answers to its rows to forget; what ``trainwright data alternates`` does.

    Writes every row of ``data.forget`` with the list of its answers as ``alternate``, to use as ``data.forget`` with
    ``unlearn.objective: altpo``. If it is stopped, the same call continues after the rows that are written.

    Args:
        recipe: a `Recipe`, or the path of a recipe file, with task ``unlearn``.
        overrides: ``section.key=value``, the value in YAML.
        out: the file to write, JSON lines.
        count: alternates for each row.
        temperature: of the sampling.
        max_new_tokens: the maximum length of an alternate, in tokens.
        seed: of the sampling.
        batch_size: answers generated at once.
        num_processes: default: one per GPU, or one.
        progress: show how many are written.

    Returns:
        The path of the file.

    Raises:
        RequestError: the recipe or a row is invalid, or the file has other rows.
        MachineError: the model does not fit this machine.
        Stopped: it was stopped by a signal.

    Examples:
        >>> import trainwright as tw
        >>> tw.alternates("sft.yaml", out="alternates.jsonl")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: sft.yaml: ...
    """
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.unlearn.section import select_data

    check_argument("count", Count, count)
    source = extract_source(recipe)
    loaded_recipe = load_recipe(source, overrides)
    data = select_data(loaded_recipe)
    if data.forget is None or loaded_recipe.model.name is None:
        raise RequestError(f"{source}: alternates need a recipe with data.forget and the model.name that writes them")
    rows = list(_iterate_rows(data.forget, data.limit, data.format))
    file = expand_user_path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    written_rows = _read_written(file, [row for row, _ in rows], count)
    for start in range(len(written_rows), len(rows), _PART):
        part = rows[start : start + _PART]
        prompts = [[{"role": "user", "content": prompt}] for _, prompt in part for _ in range(count)]
        texts = generate(
            loaded_recipe.model.name,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + start,
            batch_size=batch_size,
            num_processes=num_processes,
            progress=progress,
        )
        answers = [_NEXT_QUESTION.split(text)[0].strip() for text in texts]
        for at, (row, _) in enumerate(part):
            written_rows.append({**row, FIELD: answers[at * count : (at + 1) * count]})
        write_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written_rows))
        if progress:
            say(f"{file}: {len(written_rows):,} of {format_plural(len(rows), 'row')}")
    return file


def _iterate_rows(
    source: str, limit: int | None, required: str | Sequence[str]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row with an answer, and its prompt. Raises RequestError if a row is no question with an answer."""
    from trainwright.data.rows.formats import EXAMPLES, NoTarget
    from trainwright.data.sources.reading import iterate_source
    from trainwright.recipe.sections.data import RowSettings

    key, layout = "data.forget", None
    for location, row in iterate_source(source, limit, key):
        try:
            layout = layout or EXAMPLES.layout(list(row), [row], RowSettings(required))
            ((_, example),) = EXAMPLES.sequences(row, layout)
            if isinstance(example, str):
                raise RequestError("is plain text, but alternates answer questions")
        except NoTarget:
            continue  # as in training
        except RequestError as error:
            raise RequestError(f"{key}: {location}: {error}") from None
        question = next(turn["content"] for turn in reversed(example) if turn["role"] == "user")
        yield row, _PROMPT.format(question=question, answer=example[-1]["content"])


def _read_written(file: Path, rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows that an earlier call has written. Raises RequestError if the file is not of these rows."""
    if not file.exists():
        return []
    try:
        records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        same = all(
            {**row, FIELD: None} == {**mine, FIELD: None} and len(row[FIELD]) == count
            for row, mine in zip(records, rows, strict=False)
        ) and len(records) <= len(rows)
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise RequestError(
            f"--out: {file} has other rows, or another number of alternates; choose another file, or remove it"
        )
    return records
