"""``trainwright eval``, ``generate``, ``merge``, ``export`` and ``push``: what is done with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.command import TrustCode
from trainwright.errors import RequestError
from trainwright.utils.text import choose_table_width, format_plural, format_table, say

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.evaluation.study_file import Results


AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run directory, a checkpoint, an adapter, a model directory or a Hugging Face id."
    ),
]
Adapter = Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to apply to MODEL.")]
OneCheckpoint = Annotated[
    str | None,
    typer.Option(
        metavar="WHICH", help="For a run: final, best, newest or a step. Default: the first of these that exists."
    ),
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that support it.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows to answer per batch.")]


def evaluate(
    model: AnyModel,
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
        typer.Option("--reference-log", metavar="FILE", help="log.json of a model that never saw the forget set."),
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
    adapter: Adapter = None,
    checkpoint: OneCheckpoint = None,
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
    dtype: Dtype = "auto",
    batch_size: BatchSize = None,
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
    options = locals()
    from trainwright.api.evaluation import MeasureRequest, measure
    from trainwright.recipe.arguments import to_request

    directory, lines = measure(to_request(MeasureRequest, options))
    for line in lines:
        say(line)
    say(f"\n{directory}/")


def generate(
    model: AnyModel,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this prompt and exit.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer every line of a .txt file, or every row of a .jsonl, .json or .csv file, with or without "
            "answers.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Output file (.jsonl, .json or .csv) for the rows, with the answer as 'generated'; must not exist.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt of every conversation.")] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Continue texts without a chat template; the default for models that have none."),
    ] = False,
    adapter: Adapter = None,
    checkpoint: OneCheckpoint = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature. 0: always take the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many most likely tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling, combined with the row's number. Default: 0.")
    ] = None,
    dtype: Dtype = "auto",
    batch_size: BatchSize = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="For --file: number of processes. Default: one per GPU, or one.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Generate answers: to --prompt, to the rows of --file, or without either interactively.

    Ends with 0: done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a signal.
    """
    options = {**locals()}
    del options["prompt"]
    from trainwright.api.generation import GenerationRequest, answer, answer_file
    from trainwright.recipe.arguments import to_request

    if prompt is not None and file is not None:
        raise RequestError("--prompt and --file: pass only one of them")
    request = to_request(GenerationRequest, options)
    if file is None:
        answer(request, prompt)
    else:
        answer_file(request)
        say(str(out))


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a run, an adapter or (for export) a model.")]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="WHICH", help="For a run: final, best, newest or a step.", show_default=False)
]


def merge(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory of the merged model; must not exist.")],
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="The adapter, if MODEL is its base model.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="fp32|bf16|fp16", help="Data type of the saved weights. Default: as the base model."),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Merge an adapter into its base model, and check the result by its logits."""
    from trainwright.api.publishing import merge_in_process

    result = merge_in_process(model, str(out), adapter, dtype)
    say(f"{result.directory}: {format_plural(result.changed, 'matrix', 'matrices')} merged, all of them changed")
    say(f"logits differ from those of base model and adapter by {result.difference:.1e} of the largest")
    say(f"sample output: {result.sample!r}")
    _show_usage(result.directory)


def export(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="PATH", help="Output file or directory; must not exist.")],
    to: Annotated[str, typer.Option(metavar="safetensors|gguf|adapter", help="Output format.")] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="gguf: f16 (default) or f32. safetensors: fp32, bf16 or fp16.")
    ] = None,
    checkpoint: Checkpoint = None,
    trust_code: TrustCode = False,
) -> None:
    """Write a run's model in another format; an adapter is merged into its base if the format needs a full model."""
    from trainwright.api.publishing import export_in_process

    path = export_in_process(model, out, to, dtype, checkpoint)
    if to == "gguf":
        size = f"{path.stat().st_size / 1e6:,.0f} MB in {dtype or 'f16'}"
        say(f"{path}: {size}, read back by transformers with the same tokens and logits")
        return
    say(f"{path}: the {'adapter' if to == 'adapter' else 'full model'}")
    _show_usage(path)


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository to push to: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded, without uploading.")] = False,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Commit message.")] = "Trained with Trainwright",
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            help="Upload the checkpoint of this step, to checkpoints/ in the repository, instead of the model.",
            show_default=False,
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Publish a run's model with a card that says how it was made.

    The token comes from HF_TOKEN or `hf auth login`, and is never stored.
    """
    from trainwright.api.publishing import push_in_process

    say(str(push_in_process(run, repository, private, dry_run, message, checkpoint)), wrap=False)


def _show_usage(directory: Path) -> None:
    from trainwright.models.usage import format_loading_code

    lines = format_loading_code(directory, str(directory))
    if lines is not None:
        say("use it:\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines.splitlines()), end="")


def unlearn_study(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY [KEY=VALUE]...", help="The study's YAML file, and overrides.", show_default=False
        ),
    ],
) -> None:
    """Fine-tune on all rows and on the retain rows only, unlearn with each objective, and measure all models.

    Every part is an ordinary run or evaluation in its own directory; finished parts are not repeated. Ends with 0:
    done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a signal.
    """
    import trainwright as tw
    from trainwright.recipe.loading import is_override

    files = [word for word in arguments if not is_override(word)]
    if len(files) != 1:
        raise RequestError("expected one study file; pass overrides as key=value")
    show(tw.unlearn_study(files[0], *filter(is_override, arguments), progress=True))


def show(results: Results) -> None:
    """Print the metrics of all models."""
    say(f"\n{results.benchmark}{f' (rows: {results.about})' if results.subset else ''}")
    # Metrics in rows and models in columns: there are more metrics, and a terminal is narrow.
    names, *columns = zip(*results.rows, strict=True)
    titles = [title for _, _, title in results.columns]
    rows = [["", *names], *([title, *values] for title, values in zip(titles, columns, strict=True))]
    for line in format_table(rows, choose_table_width(sys.stdout), numbers=True):
        say(line, wrap=False)
