"""Measure a model: on rows of data, on an unlearning benchmark, or as an agent; alone or against another one."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.utils.activity import Activity
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.inference.evaluation.request import EvaluationRequest
    from trainwright.machine.machine import Machine
    from trainwright.parallel.world import World


@dataclass(frozen=True)
class MeasureRequest:
    """The options of ``trainwright eval``; None: not given."""

    model: str
    data: str | None = None
    format: str = "auto"
    against: str | None = None
    benchmark: str | None = None
    reference_log: str | None = None
    reference_model: str | None = None
    tokenizer: str | None = None
    relearning_steps: int | None = None
    relearning_rate: float | None = None
    adapter: str | None = None
    checkpoint: str | None = None
    metrics: str | None = None
    answer_pattern: str | None = None
    json_schema: str | None = None
    limit: int | None = None
    quick: bool = False
    full: bool = False
    max_new_tokens: int | None = None
    max_length: int | None = None
    lm_eval: str | None = None
    lm_eval_include: str | None = None
    dtype: str = "auto"
    batch_size: int | None = None
    num_processes: int | None = None
    episodes: int | None = None
    copies: int | None = None
    temperature: float | None = None
    greedy_after: int | None = None
    out: str | None = None

    def trial(self) -> dict[str, Any]:
        """Return the options for agents."""
        return {name: getattr(self, name) for name in ("episodes", "copies", "temperature", "greedy_after")}

    def of_texts(self) -> dict[str, Any]:
        """Return the options that do not apply to agents, by name; false if not given."""
        of_all = {"model", "checkpoint", "num_processes", "out", *self.trial()}
        values = {name: value for name, value in asdict(self).items() if name not in of_all}
        values |= {name: values[name] != "auto" for name in ("format", "dtype")}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


def measure(options: MeasureRequest) -> tuple[Path, list[str]]:
    """Measure; return the directory of the results, and the table. Changes this process."""
    from trainwright.api.agents import may_be_agent, measure_agent
    from trainwright.api.separate_process import in_processes, process_count, work_directory
    from trainwright.machine.detect import detect
    from trainwright.models.resolve_model import check_exists
    from trainwright.run.group.environment import refuse_worker

    refuse_worker("eval")
    model, trial = options.model, options.trial()
    directory = _new_directory(options.out, model)
    if may_be_agent(model):
        agent = measure_agent(model, options.checkpoint, trial, options.of_texts(), options.num_processes)
        if agent is not None:
            return directory, written(agent, directory)
    if excess := [name for name, value in trial.items() if value is not None]:
        raise RequestError(f"--{excess[0]}: has no effect, because {model} is not an agent that acts in an environment")
    for name in (model, *([] if options.against is None else [options.against])):
        check_exists(name, "MODEL" if name == model else "--against")
    machine = detect()
    request = _checked(options, machine)
    processes = process_count(machine, options.num_processes)
    with work_directory("eval") as work:
        in_processes(
            functools.partial(_prepare, request, machine, processes, work),
            functools.partial(_entry, request, work),
            modules=[_module(request)],
            machine=machine,
            processes=processes,
            work=work,
        )
        with Activity(sys.stderr, "computing the metrics and their intervals"):
            report = import_module(_module(request)).report_of(request, work)
            lines = written(report, directory)
    return directory, lines


def written(report: Any, directory: Path) -> list[str]:
    """Write the results to ``directory``; return the table, which is added to the error if writing fails."""
    lines = list(report.lines())
    try:
        report.write(directory)
    except RequestError as error:
        for line in lines:
            error.add_note(line)
        raise
    return lines


def _checked(options: MeasureRequest, machine: Machine) -> EvaluationRequest:
    """Return the request, after checking that its options are consistent. Raises RequestError."""
    from trainwright.api.separate_process import dtype_name
    from trainwright.inference.evaluation.request import EvaluationRequest

    on_benchmark = options.benchmark is not None or _of_benchmarks(options.metrics)
    if on_benchmark:
        names = _benchmark_metrics(options)
    else:
        names = _metrics(options.metrics, options.answer_pattern, options.json_schema)
        _refuse_idle(options.of_texts(), names)
    if options.quick and (options.full or options.limit is not None):
        raise RequestError("--quick (50 rows) cannot be combined with --full or --limit")
    if options.full and options.limit is not None:
        raise RequestError("--limit: these rows are all answered; remove --full")
    _check_format(options.format)
    if options.data is not None:
        from trainwright.data.sources.reading import check_source

        check_source(options.data, "--data", options.format == "documents")
    shared = {field.name for field in fields(EvaluationRequest)}
    values = {name: value for name, value in asdict(options).items() if name in shared and value is not None}
    checked = {
        "metrics": names,
        "explicit": options.metrics is not None,
        "dtype": dtype_name(options.dtype, machine),
        "tasks": _tasks(options.lm_eval, options.lm_eval_include),
        "task_directory": options.lm_eval_include,
        "on_benchmark": on_benchmark,
    }
    return EvaluationRequest(**{**values, **checked})


def _prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    import_module(_module(request)).prepare(request, machine, processes, work)


def _entry(request: EvaluationRequest, work: Path, world: World) -> None:
    from trainwright.api.separate_process import counted

    import_module(_module(request)).work_on(request, work, world, functools.partial(counted, world))


def _module(request: EvaluationRequest) -> str:
    """Return the module that does the work; both have ``prepare``, ``work_on`` and ``report_of``."""
    return (
        "trainwright.tasks.unlearn.evaluation.work" if request.on_benchmark else "trainwright.inference.evaluation.work"
    )


def _of_benchmarks(metric_names: str | None) -> bool:
    """Return whether a named metric exists only for unlearning benchmarks."""
    if metric_names is None:
        return False
    from trainwright.inference.evaluation.metrics import LIKELIHOODS
    from trainwright.recipe.registries import METRICS as OF_ANSWERS
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    return bool({*_split(metric_names)} & {*METRICS} - {*OF_ANSWERS.names(), *LIKELIHOODS})


def _benchmark_metrics(options: MeasureRequest) -> tuple[str, ...]:
    """Return the metrics by name; empty: those that lack nothing. Raises RequestError."""
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    others: dict[str, object] = {"data": options.data, "against": options.against, "lm-eval": options.lm_eval}
    others |= {"answer-pattern": options.answer_pattern, "json-schema": options.json_schema}
    others |= {"quick": options.quick or None, "full": options.full or None}
    if used := next((option for option, value in others.items() if value is not None), None):
        raise RequestError(f"--{used}: is for rows of data, and --metrics or --benchmark ask for a benchmark's")
    names = () if options.metrics is None else _split(options.metrics)
    if unknown := [name for name in names if name not in METRICS]:
        raise RequestError(f"--metrics: unknown unlearning metric {unknown[0]!r}; choose from {', '.join(METRICS)}")
    return names


def _split(words: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in words.split(","))


def _metrics(metric_names: str | None, answer_pattern: str | None, json_schema: str | None) -> tuple[str, ...]:
    """Return the metrics by name, after checking their requirements."""
    from trainwright.inference.evaluation.metrics import LIKELIHOODS, USUAL, extractor
    from trainwright.recipe.registries import METRICS
    from trainwright.utils.installation import require

    settings = {"answer": ("--answer-pattern", answer_pattern), "json_schema": ("--json-schema", json_schema)}
    names = _split(metric_names) if metric_names is not None else USUAL
    if metric_names is None:
        names += tuple(name for name, (_, value) in settings.items() if value is not None)
    supported = (*LIKELIHOODS, *METRICS.names())
    if unknown := [name for name in names if name not in supported and METRICS.find(name) is None]:
        raise RequestError(
            f"--metrics: unknown metric {unknown[0]!r}; choose from {', '.join(supported)}, and those of --benchmark"
        )
    for name, (option, value) in settings.items():
        if name in names and value is None:
            raise RequestError(f"--metrics {name}: needs {option}")
        if name not in names and value is not None:
            raise RequestError(f"{option}: has no effect, because --metrics does not include {name}")
    if answer_pattern is not None:
        extractor(answer_pattern)
    require("scipy", "a confidence interval")
    if any(name.startswith("rouge") for name in names):
        require("rouge_score", "rouge_l")
    return names


def _refuse_idle(options_by_name: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise RequestError for an option that has no effect on the metrics ``names`` of rows."""
    from trainwright.inference.evaluation.metrics import LIKELIHOODS

    of_answers = ("--full", "--max-new-tokens", "--batch-size")
    of_rows = ("--metrics", "--answer-pattern", "--json-schema", "--max-length", *of_answers)
    benchmark = ("--reference-log", "--reference-model", "--tokenizer", "--relearning-steps", "--relearning-rate")
    idle: list[tuple[bool, Sequence[str], str]] = [
        (True, benchmark, "without --benchmark"),
        (not options_by_name["--data"], ("--format",), "without --data"),
        (
            bool(options_by_name["--lm-eval"] and not options_by_name["--data"]),
            of_rows,
            "because only tasks of --lm-eval are measured; pass rows with --data",
        ),
        (all(name in LIKELIHOODS for name in names), of_answers, "because no metric in --metrics uses answers"),
    ]
    for applies, options, why in idle:
        if applies and (used := next((name for name in options if options_by_name[name] not in (None, False)), None)):
            raise RequestError(f"{used}: has no effect {why}")


def _check_format(layout: str) -> None:
    from trainwright.data.rows.layouts import SINGLE

    formats = ("auto", "documents", *SINGLE)
    if layout not in formats:
        raise RequestError(f"--format: unknown format {layout!r}; choose from {', '.join(formats)}")


def _tasks(task_names: str | None, directory: str | None) -> tuple[str, ...]:
    if task_names is None:
        if directory is not None:
            raise RequestError("--lm-eval-include: has no effect without --lm-eval")
        return ()
    from trainwright.utils.installation import require

    require("lm_eval", "--lm-eval")
    return _split(task_names)


def _new_directory(path: str | None, model: str) -> Path:
    """Return the directory of the results: ``path``, or evaluations/<model>-<date>-<time>."""
    if path is None:
        name = model.rstrip("/").rpartition("/")[2] or "model"
        path = f"evaluations/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = user_path(path)
    if directory.exists():
        raise RequestError(f"--out: {directory} already exists; choose another directory")
    return directory
