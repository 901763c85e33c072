"""``trainwright eval``: evaluate a model on rows of data, with intervals, or compare two models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.trust import TrustCode
from trainwright.text import say


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run directory, a checkpoint, an adapter, a model directory or a Hugging Face id.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="Rows to measure on, as in data.train. Default: the run's validation rows."
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Format of the rows, as data.format of a recipe.")] = "auto",
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model to compare on the same rows.")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@PLACE]",
            help="An unlearning benchmark instead of rows: tofu:forget10, muse:news, wmdp:bio or "
            "files@forget=FILE,…; add @DIRECTORY for a local copy. Default for its metrics: the run's forget set.",
        ),
    ] = None,
    reference_log: Annotated[
        Path | None,
        typer.Option(
            "--reference-log",
            metavar="FILE",
            help="log.json of a model that never saw the forget set.",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For mia_reference: a model that never saw the forget set.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --benchmark: of models that have no tokenizer of their own."),
    ] = None,
    relearning_steps: Annotated[
        int | None, typer.Option(min=1, help="For relearning: number of training steps. Default: 20.")
    ] = None,
    relearning_rate: Annotated[
        float | None, typer.Option(help="For relearning: the learning rate. Default: 1e-5.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to apply to MODEL.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH", help="For a run: final, best, newest or a step. Default: the first of these that exists."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="Metrics to compute. Default: those of the task.")
    ] = None,
    answer_pattern: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="How to find the short answer: gsm8k, number or a regular expression."),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the JSON Schema of valid answers.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N rows, and answer all of them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use 50 sampled rows.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Answer all rows instead of 200 sampled ones.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of an answer, in tokens. Default: 256.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Truncate rows to this many tokens. Default: as in the run, or the model's context length."
        ),
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASK,TASK…", help="Tasks of lm-evaluation-harness.")
    ] = None,
    lm_eval_include: Annotated[
        Path | None,
        typer.Option("--lm-eval-include", metavar="DIRECTORY", help="Directory with further task definitions."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that support it.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows to answer per batch.")] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: one per GPU, or one.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="For an agent: episodes in one context. Default: as in its recipe.")
    ] = None,
    copies: Annotated[
        int | None, typer.Option(min=1, help="For an agent: copies per task. Default: as in its recipe.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="For an agent: sampling temperature of actions. Default: as in its recipe."),
    ] = None,
    greedy_after: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For an agent: episodes with sampled actions, after which the most likely are taken. Default: as in "
            "its recipe.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Output directory for metrics.json and samples.jsonl; must not exist."),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Measure a model: likelihoods and its answers, each with its 95 % interval.

    Ends with 0: done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a signal.
    """
    given = locals()
    from trainwright.api.measuring import MeasureRequest, measure
    from trainwright.api.processes.separate import as_options

    directory, lines = measure(MeasureRequest(**as_options(given)))
    for line in lines:
        say(line)
    say(f"\n{directory}/")
