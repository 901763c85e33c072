"""``trainwright eval``: evaluate a model on rows of data, with intervals, or compare two models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.text import say


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
    """Measure a model: likelihoods and its answers, each with its 95 % interval.

    Ends with 0: done, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    given = locals()
    from trainwright.api.measuring import MeasureAsked, measure

    directory, lines = measure(MeasureAsked.of(given))
    for line in lines:
        say(line)
    say(f"\n{directory}/")
