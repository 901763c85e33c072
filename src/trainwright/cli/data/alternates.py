"""``trainwright data alternates``: other answers to the rows to forget, written by the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.text import say


def alternates(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file, as JSON lines.")],
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="Alternates for each row.")] = 5,
    temperature: Annotated[float, typer.Option(min=1e-3, help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an alternate, in tokens.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Answers to generate per batch.")] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: one per GPU, or one.")
    ] = None,
) -> None:
    """Let an unlearning recipe's model write other plausible answers to its rows to forget.

    Every row of data.forget is written with its answers as alternate, for unlearn.objective=altpo. If stopped, the same
    command continues. Ends with 0: done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a
    signal.
    """
    import trainwright as tw

    file = tw.alternates(
        recipe,
        *(overrides or []),
        out=out,
        count=count,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        num_processes=num_processes,
        progress=True,
    )
    say(f"{file}; train with unlearn.objective=altpo data.forget={file}")
