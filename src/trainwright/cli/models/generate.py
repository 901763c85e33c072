"""``trainwright generate``: a model's answers to one prompt, interactively, or to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.trust import TrustCode
from trainwright.errors import RequestError
from trainwright.text import say


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run directory, a checkpoint, an adapter, a model directory or a Hugging Face id.",
        ),
    ],
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
    adapter: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to apply to MODEL.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH", help="For a run: final, best, newest or a step. Default: the first of these that exists."
        ),
    ] = None,
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
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that support it.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows to answer per batch.")] = None,
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
    from trainwright.api.processes.separate import as_options

    if prompt is not None and file is not None:
        raise RequestError("--prompt and --file: pass only one of them")
    asked = GenerationRequest(**as_options(options))
    if file is None:
        answer(asked, prompt)
    else:
        answer_file(asked)
        say(str(out))
