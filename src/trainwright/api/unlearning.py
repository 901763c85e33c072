"""A complete study of unlearning, as a series of ordinary runs and evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api.evaluation import evaluate
from trainwright.api.training import resume, train
from trainwright.errors import RequestError, Stopped, TrainwrightError
from trainwright.run.run_directory import override_of
from trainwright.utils.paths import user_path
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.benchmarks import Benchmark
    from trainwright.tasks.unlearn.evaluation.study.file import StudyFile
    from trainwright.tasks.unlearn.evaluation.study.results import Results


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
    from trainwright.run.group.environment import refuse_worker
    from trainwright.tasks.unlearn.evaluation.study.file import load_study
    from trainwright.utils.installation import require

    refuse_worker("unlearn-study")
    loaded = load_study(Path(study), overrides)
    require("matplotlib", "the plot of a study")
    require("scipy", "forget_quality")
    require("rouge_score", "rouge_l")
    results_by_split = {name: _StudySteps(split, progress).walk() for name, split in loaded.splits().items()}
    if not loaded.study.splits:
        return results_by_split[""]
    from trainwright.tasks.unlearn.evaluation.study.results import Results, draw

    directory, results = user_path(loaded.study.directory).resolve(), Results.joined(results_by_split)
    results.write(directory)
    draw(list(results_by_split.values()), directory)
    return results


class _StudySteps:
    """The parts of a study, in order."""

    def __init__(self, study: StudyFile, progress: bool) -> None:
        self._study = study
        self._progress = progress
        self._directory = user_path(study.study.directory).resolve()
        self._began = time.monotonic()

    def walk(self) -> Results:
        """Run the parts that are not finished, and return the results of all."""
        from trainwright.tasks.unlearn.evaluation.study.file import FULL, RETAIN
        from trainwright.tasks.unlearn.evaluation.study.results import Results, draw

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
        from trainwright.tasks.unlearn.evaluation.study.file import rows_of, write_rows

        study, directory = self._study.study, self._directory / "benchmark"
        chosen = study.model_dump(include={"benchmark", "subset", "known"})
        if study.requests is not None:
            chosen |= study.model_dump(include={"sequential", "growing"}, exclude_none=True)
        self._ask("benchmark", str(chosen), done=directory.exists())
        benchmark = self._study.benchmark
        return rows_of(benchmark, directory) if directory.exists() else write_rows(study, benchmark, directory)

    def _metrics(self, benchmark: Benchmark) -> list[str]:
        """Return the metrics that are asked for, or all that lack nothing. Raises the errors that would otherwise come
        later.
        """
        from trainwright.tasks.unlearn.evaluation.items import read_sets
        from trainwright.tasks.unlearn.evaluation.registry import METRICS, missing, usual

        key = f"{self._study.origin('evaluate', 'metrics')}: evaluate.metrics"
        sets = read_sets(benchmark, benchmark.sets, None, "benchmark")
        references = {"--reference-log": True, "--reference-model": True}
        names = self._study.study.evaluate.metrics or usual(sets, references)
        for name in names:
            if name not in METRICS:
                raise RequestError(f"{key}: unknown benchmark metric {name!r}; choose from {', '.join(METRICS)}")
            if (why := missing(name, sets, references)) is not None:
                raise RequestError(f"{key}: {name}: {why}")
        return names

    def _recipes(self, benchmark: Benchmark) -> dict[str, Path]:
        """Return the recipes of all runs. Each is checked before the first starts, and the rows to forget for
        overlaps.
        """
        from trainwright.recipe.loading import load_recipe
        from trainwright.tasks.unlearn.evaluation.study.file import FULL, requests_of
        from trainwright.tasks.unlearn.section import data_of
        from trainwright.tasks.unlearn.stream import refuse_overlap

        study, training = self._study, benchmark.training
        finetuned = [name for name, given in self._given().items() if given is None]
        texts = {name: study.finetuning(training[name], training["full"]) for name in finetuned}
        rows = {name: training[name] for name in ("forget", "retain", "holdout", "idk") if name in training}
        runs = self._directory / _RUNS
        full = Path(self._given()[FULL] or runs / FULL / "final")
        requests = requests_of(study.study, self._directory / "benchmark")
        for name in study.study.objectives:
            if not requests:
                texts[name] = study.unlearning(name, full, rows)
            start = full
            for number, forget in enumerate(requests, 1):
                texts[f"{name}.{number}"] = study.unlearning(name, start, {**rows, "forget": forget})
                if study.study.sequential is not None:
                    start = runs / f"{name}.{number}" / "final"
        files = {name: self._ask(f"{name}.yaml", text, done=(runs / name).exists()) for name, text in texts.items()}
        for name in texts:
            if name not in finetuned and not (runs / name).exists():
                refuse_overlap(data_of(load_recipe(files[name])))
        return files

    def _given(self) -> dict[str, str | None]:
        """Return the full and the retain-only model that are named, in place of fine-tuning them."""
        from trainwright.tasks.unlearn.evaluation.study.file import FULL, RETAIN

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
            self._do(f"continuing with {name}", lambda: resume(run, progress=self._progress))
        else:
            self._do(f"trains {name}", lambda: train(file, override_of(run), progress=self._progress))

    def _evaluate(self, name: str, benchmark: Benchmark, metrics: Sequence[str]) -> None:
        from trainwright.tasks.unlearn.evaluation.study.file import RETAIN

        out, reference = self._directory / _EVALUATIONS / name, self._directory / _EVALUATIONS / RETAIN
        existing = self._given()
        model = existing.get(name) or str(self._directory / _RUNS / name)
        options: dict[str, Any] = {"benchmark": benchmark.name, "out": str(out)}
        options["max_new_tokens"] = self._study.study.evaluate.max_new_tokens
        if existing.get(name) is not None and (tokenizer := self._study.study.model.get("tokenizer")) is not None:
            options["tokenizer"] = str(tokenizer)
        if name == RETAIN:
            metrics = list(dict.fromkeys(_OF_REFERENCE.get(metric, metric) for metric in metrics))
        else:
            options |= _references(metrics, reference, existing[RETAIN] or self._directory / _RUNS / RETAIN)
        options |= {"metrics": ",".join(metrics), **self._processes()}
        words = (f"--{option.replace('_', '-')} {value}" for option, value in options.items())
        self._ask(f"evaluate-{name}", " ".join([model, *words]) + "\n", done=out.exists())
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            self._do(f"measures {name}", lambda: self._measure(model, options))

    def _measure(self, model: str, options: dict[str, Any]) -> None:
        evaluation = evaluate(model, **options, progress=self._progress)
        if self._progress:
            say(f"{evaluation}\n\n{evaluation.directory}/")

    def _processes(self) -> dict[str, int]:
        from trainwright.machine.detect import detect

        written = self._study.study.parallel.get("num_processes", "auto")
        machine = detect()
        limit = len(machine.gpus) or machine.cpu_cores
        return {"num_processes": min(written, limit)} if isinstance(written, int) else {}

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

    def _do(self, what: str, part: Callable[[], object]) -> None:
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


def _references(metrics: Sequence[str], log: Path, model: Path | str) -> dict[str, str]:
    """Return the references to the retain-only model, if a metric needs them."""
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    taken = {METRICS[name].option for name in metrics}
    options = {"reference_log": log, "reference_model": model}
    return {name: str(where) for name, where in options.items() if f"--{name.replace('_', '-')}" in taken}
