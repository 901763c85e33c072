"""``trainwright merge``, ``export`` and ``push``: a run's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.trust import TrustCode
from trainwright.text import plural, say

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
    from trainwright.api.merging import merged

    result = merged(model, str(out), adapter, dtype)
    say(f"{result.directory}: {plural(result.changed, 'matrix', 'matrices')} merged, all of them changed")
    say(f"logits differ from those of base model and adapter by {result.difference:.1e} of the largest")
    say(f"sample output: {result.sample!r}")
    _show_usage(result.directory)


def export(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="PATH", help="Output file or directory; must not exist.")],
    to: Annotated[str, typer.Option(metavar="safetensors|gguf|adapter", help="Output format.")] = "safetensors",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="gguf: f16 (default) or f32. safetensors: fp32, bf16 or fp16."),
    ] = None,
    checkpoint: Checkpoint = None,
    trust_code: TrustCode = False,
) -> None:
    """Write a run's model in another format; an adapter is merged into its base if the format needs a full model."""
    from trainwright.api.publishing import exported

    path = exported(model, out, to, dtype, checkpoint)
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
    from trainwright.api.publishing import pushed

    say(str(pushed(run, repository, private, dry_run, message, checkpoint)), wrap=False)


def _show_usage(directory: Path) -> None:
    from trainwright.models.usage import loading

    lines = loading(directory, str(directory))
    if lines is not None:
        say("use it:\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines.splitlines()), end="")
