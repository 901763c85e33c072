"""``trainwright generate``: a model's answers to one prompt, interactively, or to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import RequestError
from trainwright.text import say


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's directory, one of its checkpoints, an adapter, a model directory or a hub id.",
        ),
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this, and end.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer every line of a .txt file, or every row of .jsonl, .json or .csv, with or without its answer.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the rows go, each with its answer as 'generated': .jsonl, .json or .csv; must be new.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system turn of every conversation.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue texts, as a model without a chat template does anyway.")
    ] = False,
    adapter: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to put on MODEL.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="Of a run: final, best, newest or a step. Default: the first there is."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Draw from the likeliest so much.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many of the likeliest.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With a row's number it decides what is drawn for it. Default: 0.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that have it.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows that are answered at once.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="For --file. Default: one a GPU, or one.")] = None,
) -> None:
    """Generate answers: to --prompt, to the rows of --file, or without either interactively.

    Ends with 0: done, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    from trainwright.api.generation import GenerateAsked, answer, answer_file

    if prompt is not None and file is not None:
        raise RequestError("--prompt and --file: give one of the two")
    asked = GenerateAsked(
        model=model,
        file=file,
        out=out,
        system=system,
        plain=plain,
        adapter=None if adapter is None else str(adapter),
        checkpoint=checkpoint,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        dtype=dtype,
        batch_size=batch_size,
        num_processes=num_processes,
    )
    if file is None:
        answer(asked, prompt)
    else:
        answer_file(asked)
        say(str(out))
