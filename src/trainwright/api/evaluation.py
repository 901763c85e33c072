"""Evaluation of a model, with confidence intervals, or comparison of two models on the same rows.

Measured are rows of data, an unlearning benchmark, or an agent.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api import separate_process
from trainwright.errors import RequestError
from trainwright.inference.evaluation.metrics import (
    LIKELIHOODS,
    USUAL,
    EvaluationOptions,
    EvaluationRequest,
    build_extractor,
)
from trainwright.machine.detect import detect
from trainwright.recipe.arguments import to_request
from trainwright.recipe.sections.fields import Count, NotNegative
from trainwright.utils.activity import Activity
from trainwright.utils.installation import require
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine
    from trainwright.parallel.world import World


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation; ``str()`` gives the table that ``trainwright eval`` prints.

    Attributes:
        directory: contains ``metrics.json`` and ``samples.jsonl``.
    """

    directory: Path
    table: tuple[str, ...]

    @cached_property
    def details(self) -> dict[str, Any]:
        """Return the content of ``metrics.json``: every metric with its 95 % interval, the settings, notes."""
        details: dict[str, Any] = json.loads((self.directory / "metrics.json").read_text(encoding="utf-8"))
        return details

    @property
    def metrics(self) -> dict[str, float]:
        """Return the value of every metric by name; for agents and benchmarks see `details`."""
        metrics = self.details.get("metrics", {})
        return {name: entry["value"] for name, entry in metrics.items() if isinstance(entry, dict) and "value" in entry}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return prompt, reference, answer and scores of every row; empty if nothing was answered."""
        file = self.directory / "samples.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]

    def __str__(self) -> str:
        return "\n".join(self.table)


def evaluate(
    model: str | PathLike[str],
    *,
    data: str | PathLike[str] | None = None,
    format: str = "auto",
    against: str | PathLike[str] | None = None,
    benchmark: str | None = None,
    reference_log: str | PathLike[str] | None = None,
    reference_model: str | PathLike[str] | None = None,
    tokenizer: str | PathLike[str] | None = None,
    relearning_steps: int | None = None,
    relearning_rate: float | None = None,
    adapter: str | PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    metrics: str | Sequence[str] | None = None,
    answer_pattern: str | None = None,
    json_schema: str | PathLike[str] | None = None,
    limit: int | None = None,
    quick: bool = False,
    full: bool = False,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    lm_eval: str | Sequence[str] | None = None,
    lm_eval_include: str | PathLike[str] | None = None,
    dtype: str = "auto",
    batch_size: int | None = None,
    num_processes: int | None = None,
    episodes: int | None = None,
    copies: int | None = None,
    temperature: float | None = None,
    greedy_after: int | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Evaluation:
    """Measure a model: likelihoods and its answers, each with its 95 % interval; what ``trainwright eval`` does.

    Args:
        model: a `Run`, one of its checkpoints, an adapter, a model directory or a Hub id.
        data: rows as for training. Default: the run's own validation rows.
        format: the layout of the rows, as ``data.format`` of a recipe.
        against: another model, compared on the same rows.
        benchmark: an unlearning benchmark instead of rows, such as ``tofu:forget10``.
        reference_log: results of a model that was not trained on the forget set: its ``log.json``.
        reference_model: for ``mia_reference``: a model that was not trained on the forget set.
        tokenizer: with ``benchmark``: of models that have none of their own, such as MUSE's.
        relearning_steps: for ``relearning``: steps of training again. Default: 20.
        relearning_rate: for ``relearning``: the learning rate. Default: 1e-5.
        adapter: an adapter to apply to the model.
        checkpoint: of a run: ``"final"``, ``"best"``, ``"newest"`` or a step. Default: the first that exists.
        metrics: what to measure. Default: the usual.
        answer_pattern: the short answer in a text: ``"gsm8k"``, ``"number"`` or a regular expression.
        json_schema: a file with the JSON Schema that answers should follow.
        limit: use this number of first rows, and answer all of them.
        quick: use a sample of 50 rows.
        full: answer all rows instead of a sample of 200.
        max_new_tokens: the maximum length of an answer, in tokens. Default: 256.
        max_length: truncate rows to this number of tokens. Default: as in the run, or the model's positions.
        lm_eval: tasks of lm-evaluation-harness.
        lm_eval_include: a directory with definitions of additional tasks.
        dtype: ``fp32``, ``bf16`` or ``fp16``. auto: bf16 on GPUs that support it.
        batch_size: the number of rows answered at once.
        num_processes: default: one per GPU, or one.
        episodes: of an agent: episodes in one context. Default: as in its recipe.
        copies: of an agent: how many try each task. Default: as in its recipe.
        temperature: of an agent: the sampling temperature of its actions. Default: as in its recipe.
        greedy_after: of an agent: episodes before it takes the most likely actions. Default: as in its recipe.
        out: a new directory for the results. Default: ``evaluations/<model>-<date>-<time>``.
        progress: show how many rows are done.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Raises:
        RequestError: the model, the rows or the arguments are invalid; messages name the command's options.
        MachineError: the model does not fit this machine.
        Stopped: it was stopped by a signal; nothing was written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.evaluate("runs/tiny", metrics=["loss", "token_accuracy"], out="evaluations/tiny")
        >>> sorted(found.metrics)
        ['loss', 'token_accuracy']
    """
    request = to_request(MeasureRequest, locals())
    directory, table = separate_process.run_in_process(measure, request, progress=progress, trust_code=trust_code)
    return Evaluation(directory, tuple(table))


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(EvaluationOptions):
    """All options of ``trainwright eval``; None: not given."""

    relearning_steps: Count | None = None
    relearning_rate: float | None = None
    metrics: str | None = None
    max_new_tokens: Count | None = None
    lm_eval: str | None = None
    lm_eval_include: str | None = None
    dtype: str = "auto"
    num_processes: Count | None = None
    episodes: Count | None = None
    copies: Count | None = None
    temperature: NotNegative | None = None
    greedy_after: Count | None = None
    out: str | None = None

    def trial(self) -> dict[str, Any]:
        """Return the options for agents."""
        return {name: getattr(self, name) for name in ("episodes", "copies", "temperature", "greedy_after")}

    def list_text_options(self) -> dict[str, Any]:
        """Return the options that do not apply to agents, by name; false if not given."""
        of_all = {"model", "checkpoint", "num_processes", "out", *self.trial()}
        values = {name: value for name, value in asdict(self).items() if name not in of_all}
        values |= {name: values[name] != "auto" for name in ("format", "dtype")}
        return {f"--{name.replace('_', '-')}": value for name, value in values.items()}


def measure(options: MeasureRequest) -> tuple[Path, list[str]]:
    """Measure; return the directory of the results, and the table. Changes this process."""
    from trainwright.api.agents import may_be_agent, measure_agent
    from trainwright.models.resolve_model import check_exists
    from trainwright.run.group.environment import refuse_worker

    refuse_worker("eval")
    model, trial = options.model, options.trial()
    directory = _choose_directory(options.out, model)
    if may_be_agent(model):
        agent = measure_agent(model, options.checkpoint, trial, options.list_text_options(), options.num_processes)
        if agent is not None:
            return directory, write_results(agent, directory)
    if excess := [name for name, value in trial.items() if value is not None]:
        raise RequestError(f"--{excess[0]}: has no effect, because {model} is not an agent that acts in an environment")
    for name in (model, *([] if options.against is None else [options.against])):
        check_exists(name, "MODEL" if name == model else "--against")
    machine = detect()
    request = _check_options(options, machine)
    processes = separate_process.choose_process_count(machine, options.num_processes)
    with separate_process.create_work_directory("eval") as work:
        separate_process.run_in_processes(
            functools.partial(_prepare, request, machine, processes, work),
            functools.partial(_run_rank, request, work),
            modules=[_choose_module(request)],
            machine=machine,
            processes=processes,
            work=work,
        )
        with Activity(sys.stderr, "computing the metrics and their intervals"):
            report = import_module(_choose_module(request)).report_of(request, work)
            lines = write_results(report, directory)
    return directory, lines


def write_results(report: Any, directory: Path) -> list[str]:
    """Write the results to ``directory``; return the table, which is added to the error if writing fails."""
    lines = list(report.lines())
    try:
        report.write(directory)
    except RequestError as error:
        for line in lines:
            error.add_note(line)
        raise
    return lines


def _check_options(options: MeasureRequest, machine: Machine) -> EvaluationRequest:
    """Return the request, after checking that its options are consistent. Raises RequestError."""
    on_benchmark = options.benchmark is not None or _needs_benchmark(options.metrics)
    if on_benchmark:
        names = _select_benchmark_metrics(options)
    else:
        names = _select_metrics(options.metrics, options.answer_pattern, options.json_schema)
        _refuse_idle(options.list_text_options(), names)
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
    checked_values = {
        "metrics": names,
        "explicit": options.metrics is not None,
        "dtype": separate_process.choose_dtype(options.dtype, machine),
        "tasks": _select_tasks(options.lm_eval, options.lm_eval_include),
        "task_directory": options.lm_eval_include,
        "on_benchmark": on_benchmark,
    }
    return EvaluationRequest(**{**values, **checked_values})


def _prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    import_module(_choose_module(request)).prepare(request, machine, processes, work)


def _run_rank(request: EvaluationRequest, work: Path, world: World) -> None:
    import_module(_choose_module(request)).work_on(
        request, work, world, functools.partial(separate_process.show_progress, world)
    )


def _choose_module(request: EvaluationRequest) -> str:
    """Return the module that does the work; both have ``prepare``, ``work_on`` and ``report_of``."""
    if request.on_benchmark:
        return "trainwright.tasks.unlearn.evaluation.measure"
    return "trainwright.inference.evaluation.work"


def _needs_benchmark(metric_names: str | None) -> bool:
    """Return whether a named metric exists only for unlearning benchmarks."""
    if metric_names is None:
        return False
    from trainwright.recipe.registries import METRICS as OF_ANSWERS
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    return bool({*_split(metric_names)} & {*METRICS} - {*OF_ANSWERS.names(), *LIKELIHOODS})


def _select_benchmark_metrics(options: MeasureRequest) -> tuple[str, ...]:
    """Return the metrics by name; empty: those that lack nothing. Raises RequestError."""
    from trainwright.tasks.unlearn.evaluation.registry import METRICS

    row_options: dict[str, object] = {"data": options.data, "against": options.against, "lm-eval": options.lm_eval}
    row_options |= {"answer-pattern": options.answer_pattern, "json-schema": options.json_schema}
    row_options |= {"quick": options.quick or None, "full": options.full or None}
    if row_option := next((option for option, value in row_options.items() if value is not None), None):
        raise RequestError(f"--{row_option}: is for rows of data, and --metrics or --benchmark ask for a benchmark's")
    names = () if options.metrics is None else _split(options.metrics)
    if unknown := [name for name in names if name not in METRICS]:
        raise RequestError(f"--metrics: unknown unlearning metric {unknown[0]!r}; choose from {', '.join(METRICS)}")
    return names


def _split(words: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in words.split(","))


def _select_metrics(metric_names: str | None, answer_pattern: str | None, json_schema: str | None) -> tuple[str, ...]:
    """Return the metrics by name, after checking their requirements."""
    from trainwright.recipe.registries import METRICS

    settings = {"answer": ("--answer-pattern", answer_pattern), "json_schema": ("--json-schema", json_schema)}
    names = _split(metric_names) if metric_names is not None else USUAL
    if metric_names is None:
        names += tuple(name for name, (_, value) in settings.items() if value is not None)
    choices = (*LIKELIHOODS, *METRICS.names())
    if unknown := [name for name in names if name not in choices and METRICS.find(name) is None]:
        raise RequestError(
            f"--metrics: unknown metric {unknown[0]!r}; choose from {', '.join(choices)}, and those of --benchmark"
        )
    for name, (option, value) in settings.items():
        if name in names and value is None:
            raise RequestError(f"--metrics {name}: needs {option}")
        if name not in names and value is not None:
            raise RequestError(f"{option}: has no effect, because --metrics does not include {name}")
    if answer_pattern is not None:
        build_extractor(answer_pattern)
    require("scipy", "a confidence interval")
    if any(name.startswith("rouge") for name in names):
        require("rouge_score", "rouge_l")
    return names


def _refuse_idle(options_by_name: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise RequestError for an option that has no effect on the metrics ``names`` of rows."""
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
        if applies and (
            idle_option := next((name for name in options if options_by_name[name] not in (None, False)), None)
        ):
            raise RequestError(f"{idle_option}: has no effect {why}")


def _check_format(layout: str) -> None:
    from trainwright.data.rows.layouts import SINGLE

    formats = ("auto", "documents", *SINGLE)
    if layout not in formats:
        raise RequestError(f"--format: unknown format {layout!r}; choose from {', '.join(formats)}")


def _select_tasks(task_names: str | None, directory: str | None) -> tuple[str, ...]:
    if task_names is None:
        if directory is not None:
            raise RequestError("--lm-eval-include: has no effect without --lm-eval")
        return ()
    require("lm_eval", "--lm-eval")
    return _split(task_names)


def _choose_directory(path: str | None, model: str) -> Path:
    """Return the directory of the results: ``path``, or evaluations/<model>-<date>-<time>."""
    if path is None:
        name = model.rstrip("/").rpartition("/")[2] or "model"
        path = f"evaluations/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = expand_user_path(path)
    if directory.exists():
        raise RequestError(f"--out: {directory} already exists; choose another directory")
    return directory
