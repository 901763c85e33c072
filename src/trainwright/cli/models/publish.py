"""``trainwright merge`` and ``trainwright export``: convert a run's model for use elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.activity import Activity
from trainwright.errors import RequestError
from trainwright.paths import user_path
from trainwright.text import plural, say

if TYPE_CHECKING:
    from trainwright.inference.finding import Found

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a run, an adapter or (for export) a model.")]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="WHICH", help="For a run: final, best, newest or a step.", show_default=False)
]

_PRECISIONS = {"gguf": ("f16", "f32"), "safetensors": ("fp32", "bf16", "fp16")}


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
) -> None:
    """Write a run's model in another format; an adapter is merged into its base if the format needs a full model."""
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import for_users

    if to not in ("safetensors", "gguf", "adapter"):
        raise RequestError(f"--to: unknown format {to!r}; choose from safetensors, gguf, adapter")
    if dtype is not None and dtype not in _PRECISIONS.get(to, ()):
        known = " or ".join(_PRECISIONS.get(to, ())) or "none, because adapters are written unchanged"
        raise RequestError(f"--dtype: {dtype} is not supported for {to}; choose from {known}")
    with for_users(), Activity(sys.stderr, "reading the model"):
        found, out = find_model(model, None, checkpoint), user_path(out)
        if to == "adapter":
            _export_adapter(found, out)
        elif to == "safetensors":
            _export_whole(found, out, dtype)
        else:
            _export_gguf(found, out, dtype or "f16")


def _export_gguf(found: Found, out: Path, precision: str) -> None:
    from tempfile import TemporaryDirectory

    from trainwright.models.gguf.export import export_gguf

    if out.suffix != ".gguf":
        raise RequestError(f"--out: {out} should end in .gguf")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=".export-") as place:
        directory = _plain_directory(found)
        if directory is None:
            directory = Path(place) / "model"
            _write_whole(found, directory, None)
        size = export_gguf(directory, out, precision)  # type: ignore[arg-type]
    say(f"{out}: {size / 1e6:,.0f} MB in {precision}, read back by transformers with the same tokens and logits")


def _export_whole(found: Found, out: Path, dtype: str | None) -> None:
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")
    _write_whole(found, out, dtype)
    say(f"{out}: the full model")
    _show_usage(out)


def _export_adapter(found: Found, out: Path) -> None:
    from shutil import copytree

    from trainwright.models.files.save import replacing

    source = found.section.adapter.start_from
    if source is None or found.checkpoint is not None:
        raise RequestError(
            f"{found.origin} is not an exported adapter; pass a run trained with an adapter, or its final/"
        )
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")
    with replacing(out) as temporary:
        copytree(source, temporary, dirs_exist_ok=True)
    say(f"{out}: the adapter")
    _show_usage(out)


def _show_usage(directory: Path) -> None:
    from trainwright.models.usage import loading

    lines = loading(directory, str(directory))
    if lines is not None:
        say("use it:\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines.splitlines()), end="")


def _plain_directory(found: Found) -> Path | None:
    """Return where the full model already exists; None if it has to be merged or loaded."""
    from trainwright.models.source import resolve

    if found.checkpoint is not None or found.section.adapter.type != "none":
        return None
    return resolve(found.section).directory


def _write_whole(found: Found, out: Path, dtype: str | None) -> None:
    """Write the full model as a directory: merged, or loaded with a checkpoint's tensors and saved."""
    import torch

    from trainwright.api.merging import check_finished, dtype_of
    from trainwright.inference.loading import load
    from trainwright.models.files.save import save_model
    from trainwright.models.merging import merge as merged

    if found.checkpoint is None and found.section.adapter.type != "none":
        merged(found.section, found.seed, out, dtype_of(dtype))
        return
    check_finished(found)
    loaded = load(found, torch.float32, torch.device("cpu"))
    model = loaded.lm.model
    save_model(out, model.config, model.state_dict(), loaded.tokenizer, model.generation_config, dtype_of(dtype))
