"""``trainwright eval``: how good a model is on rows of data, with intervals; or two models side by side."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.errors import RequestError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.evaluation.asked import Asked
    from trainwright.machine.detect import Machine
    from trainwright.parallel.world import World


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's directory, one of its checkpoints, an adapter, a model directory or a hub id.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Rows as for training. Default: the run's own validation rows.")
    ] = None,
    format: Annotated[str, typer.Option(help="How a row is laid out, as data.format of a recipe.")] = "auto",
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model, to be compared on the same rows.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@PLACE]",
            help="A benchmark of unlearning, and not rows: tofu:forget10, muse:news, wmdp:bio or files@forget=FILE,…; "
            "@DIRECTORY where it is on this machine. Default for its metrics: what the run was to forget.",
        ),
    ] = None,
    reference_log: Annotated[
        Path | None,
        typer.Option(
            "--reference-log",
            metavar="FILE",
            help="What was measured of a model that never saw the forget set: log.json.",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For mia_reference: a model that never saw the forget set.")
    ] = None,
    relearning_steps: Annotated[
        int | None, typer.Option(min=1, help="For relearning: steps of training again. Default: 20.")
    ] = None,
    relearning_rate: Annotated[
        float | None, typer.Option(help="For relearning: the learning rate. Default: 1e-5.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to put on MODEL.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="Of a run: final, best, newest or a step. Default: the first there is."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="What to measure. Default: the usual.")
    ] = None,
    answer_pattern: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="The short answer in a text: gsm8k, number or a regular expression."),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON Schema that answers should follow.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many rows, all of them answered.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="50 rows, drawn from all.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Answer all rows, and not 200 drawn from them.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer, in tokens. Default: 256.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Cut rows to so many tokens. Default: as the run, or the model's positions."),
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASK,TASK…", help="Tasks of lm-evaluation-harness.")
    ] = None,
    lm_eval_include: Annotated[
        Path | None, typer.Option("--lm-eval-include", metavar="DIRECTORY", help="Where more tasks are defined.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that have it.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows that are answered at once.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Default: one a GPU, or one.")] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Of an agent: episodes in one context. Default: as its recipe.")
    ] = None,
    copies: Annotated[
        int | None, typer.Option(min=1, help="Of an agent: how many try each task. Default: as its recipe.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of an agent: that its actions are drawn at. Default: as its recipe.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Where metrics.json and samples.jsonl go; must be new.")
    ] = None,
) -> None:
    """Measure a model: likelihoods, and what it answers, each with its 95 % interval.

    Ends with 0: done, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    from trainwright.api.workers import dtype_name, in_processes, process_count, work_directory
    from trainwright.cli.evaluate_agent import evaluate_agent, may_be_agent
    from trainwright.evaluation.asked import Asked
    from trainwright.launch.environment import refuse_worker
    from trainwright.machine.detect import detect

    refuse_worker("eval")
    trial = {"episodes": episodes, "copies": copies, "temperature": temperature}
    of_texts = {
        "--data": data,
        "--format": format != "auto",
        "--against": against,
        "--adapter": adapter,
        "--metrics": metrics,
        "--benchmark": benchmark,
        "--reference-log": reference_log,
        "--reference-model": reference_model,
        "--answer-pattern": answer_pattern,
        "--json-schema": json_schema,
        "--limit": limit,
        "--quick": quick,
        "--full": full,
        "--max-new-tokens": max_new_tokens,
        "--max-length": max_length,
        "--relearning-steps": relearning_steps,
        "--relearning-rate": relearning_rate,
        "--lm-eval": lm_eval,
        "--lm-eval-include": lm_eval_include,
        "--dtype": dtype != "auto",
        "--batch-size": batch_size,
    }
    if may_be_agent(model) and evaluate_agent(
        model, checkpoint, trial, of_texts, num_processes, _new_directory(out, model)
    ):
        return
    if given := [name for name, value in trial.items() if value is not None]:
        raise RequestError(f"--{given[0]}: has no effect, as {model} is no agent that acts in an environment")
    on_benchmark = benchmark is not None or _of_benchmarks(metrics)
    if on_benchmark:
        others: dict[str, object] = {"data": data, "against": against, "lm-eval": lm_eval}
        others |= {"answer-pattern": answer_pattern, "json-schema": json_schema}
        others |= {"quick": quick or None, "full": full or None}
        names = _benchmark_metrics(metrics, others)
    else:
        names = _metrics(metrics, answer_pattern, json_schema)
        _refuse_idle(of_texts, names)
    if quick and (full or limit is not None):
        raise RequestError("--quick is 50 rows: it cannot be had with --full or --limit")
    if full and limit is not None:
        raise RequestError("--limit: so many rows are answered anyway; leave --full out")
    _check_format(format)
    if data is not None:
        from trainwright.data.sources import check_source

        check_source(data, "--data", format == "documents")
    machine = detect()
    directory = _new_directory(out, model)
    asked = Asked(
        model=model,
        metrics=names,
        explicit=metrics is not None,
        against=against,
        adapter=None if adapter is None else str(adapter),
        checkpoint=checkpoint,
        data=data,
        format=format,
        limit=limit,
        quick=quick,
        full=full,
        answer_pattern=answer_pattern,
        json_schema=None if json_schema is None else str(json_schema),
        max_new_tokens=max_new_tokens or Asked.max_new_tokens,
        max_length=max_length,
        dtype=dtype_name(dtype, machine),
        batch_size=batch_size,
        tasks=_tasks(lm_eval, lm_eval_include),
        task_directory=None if lm_eval_include is None else str(lm_eval_include),
        on_benchmark=on_benchmark,
        benchmark=benchmark,
        reference_log=None if reference_log is None else str(reference_log),
        reference_model=reference_model,
        relearning_steps=relearning_steps or Asked.relearning_steps,
        relearning_rate=Asked.relearning_rate if relearning_rate is None else relearning_rate,
    )
    processes = process_count(machine, num_processes)
    with work_directory("eval") as work:
        in_processes(
            functools.partial(_prepare, asked, machine, processes, work),
            functools.partial(_entry, asked, work),
            modules=[_module(asked)],
            machine=machine,
            processes=processes,
            work=work,
        )
        report = _report(asked, work)
        for line in report.lines():
            say(line)
        report.write(directory)
    say(f"\n{directory}/")


def _prepare(asked: Asked, machine: Machine, processes: int, work: Path) -> None:
    import_module(_module(asked)).prepare(asked, machine, processes, work)


def _entry(asked: Asked, work: Path, world: World) -> None:
    from trainwright.api.workers import counted

    import_module(_module(asked)).work_on(asked, work, world, functools.partial(counted, world))


def _report(asked: Asked, work: Path) -> Any:
    return import_module(_module(asked)).report_of(asked, work)


def _module(asked: Asked) -> str:
    """What does the work: of these two each has ``prepare``, ``work_on`` and ``report_of``."""
    return "trainwright.evaluation.unlearning.work" if asked.on_benchmark else "trainwright.evaluation.work"


def _of_benchmarks(named: str | None) -> bool:
    """Whether metrics are named that only a benchmark of unlearning has."""
    if named is None:
        return False
    from trainwright.evaluation.metrics.registry import LIKELIHOODS
    from trainwright.evaluation.unlearning.registry import METRICS
    from trainwright.registries import METRICS as OF_ANSWERS

    return bool({*_split(named)} & {*METRICS} - {*OF_ANSWERS.names(), *LIKELIHOODS})


def _benchmark_metrics(named: str | None, given: Mapping[str, object]) -> tuple[str, ...]:
    """The metrics by name; none: those that lack nothing. ``given``: options that a benchmark does not take."""
    from trainwright.evaluation.unlearning.registry import METRICS

    if used := next((option for option, value in given.items() if value is not None), None):
        raise RequestError(f"--{used}: is for rows of data, and --metrics or --benchmark ask for a benchmark's")
    names = () if named is None else _split(named)
    if unknown := [name for name in names if name not in METRICS]:
        raise RequestError(
            f"--metrics: {unknown[0]!r} is no metric of a benchmark of unlearning; there are {', '.join(METRICS)}"
        )
    return names


def _split(named: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in named.split(","))


def _metrics(named: str | None, answer_pattern: str | None, json_schema: Path | None) -> tuple[str, ...]:
    """The metrics by name, checked with what they need."""
    from trainwright.evaluation.libraries import require
    from trainwright.evaluation.metrics.extraction import extractor
    from trainwright.evaluation.metrics.registry import LIKELIHOODS, USUAL
    from trainwright.registries import METRICS

    settings = {"answer": ("--answer-pattern", answer_pattern), "json_schema": ("--json-schema", json_schema)}
    names = _split(named) if named is not None else USUAL
    if named is None:
        names += tuple(name for name, (_, value) in settings.items() if value is not None)
    known = (*LIKELIHOODS, *METRICS.names())
    if unknown := [name for name in names if name not in known and METRICS.find(name) is None]:
        raise RequestError(
            f"--metrics: {unknown[0]!r} is no metric; there are {', '.join(known)}, and those of --benchmark"
        )
    for name, (option, value) in settings.items():
        if name in names and value is None:
            raise RequestError(f"--metrics {name}: needs {option}")
        if name not in names and value is not None:
            raise RequestError(f"{option}: has no effect, as --metrics leaves {name} out")
    if answer_pattern is not None:
        extractor(answer_pattern)
    require("scipy", "a confidence interval")
    if any(name.startswith("rouge") for name in names):
        require("rouge_score", "rouge_l")
    return names


def _refuse_idle(given: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise RequestError for an option that has no effect where the metrics ``names`` are measured on rows."""
    from trainwright.evaluation.metrics.registry import LIKELIHOODS

    of_answers = ("--full", "--max-new-tokens", "--batch-size")
    of_rows = ("--metrics", "--answer-pattern", "--json-schema", "--max-length", *of_answers)
    benchmark = ("--reference-log", "--reference-model", "--relearning-steps", "--relearning-rate")
    idle: list[tuple[bool, Sequence[str], str]] = [
        (True, benchmark, "without --benchmark"),
        (not given["--data"], ("--format",), "without --data"),
        (
            bool(given["--lm-eval"] and not given["--data"]),
            of_rows,
            "as only tasks of --lm-eval are measured; name rows with --data",
        ),
        (all(name in LIKELIHOODS for name in names), of_answers, "as no metric of --metrics is of answers"),
    ]
    for applies, options, why in idle:
        if applies and (used := next((name for name in options if given[name] not in (None, False)), None)):
            raise RequestError(f"{used}: has no effect {why}")


def _check_format(layout: str) -> None:
    from trainwright.data.layouts import SINGLE

    known = ("auto", "documents", *SINGLE)
    if layout not in known:
        raise RequestError(f"--format: {layout!r} is no layout of rows to measure on; there are {', '.join(known)}")


def _tasks(named: str | None, directory: Path | None) -> tuple[str, ...]:
    if named is None:
        if directory is not None:
            raise RequestError("--lm-eval-include: has no effect without --lm-eval")
        return ()
    from trainwright.evaluation.libraries import require

    require("lm_eval", "--lm-eval")
    return _split(named)


def _new_directory(wanted: Path | None, model: str) -> Path:
    """Where the result goes: ``wanted``, or evaluations/<model>-<date>-<time>."""
    if wanted is None:
        name = model.rstrip("/").rpartition("/")[2] or "model"
        wanted = Path("evaluations") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = wanted.expanduser()
    if directory.exists():
        raise RequestError(f"--out: {directory} exists; choose another directory")
    return directory
