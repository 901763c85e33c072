"""Publishing a model: with its adapter merged, in another format, or on the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trainwright.api.separate_process import run_in_process
from trainwright.data.rows.chat_encoding import install_template
from trainwright.engine.event_reader import read_log
from trainwright.errors import RequestError
from trainwright.models.resolve_model import check_exists, resolve
from trainwright.models.tokenization import end_texts_at_turns
from trainwright.recipe.registries import WEIGHT_FORMATS
from trainwright.utils.activity import Activity
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural, quote_word, say

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig

    from trainwright.inference.finding import UnloadedModel


_DTYPES = {"safetensors": ("fp32", "bf16", "fp16"), "gguf": ("f16", "f32"), "adapter": ()}


def export(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    checkpoint: str | int | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Path:
    """Write a run's model in another format, and check what is written; what ``trainwright export`` does.

    An adapter is merged into its base if the format needs a full model.

    Args:
        model: a `Run` or its directory, an adapter or a model.
        out: a directory, or a file that ends in ``.gguf``; must be new.
        to: ``"safetensors"``, ``"gguf"`` or ``"adapter"``.
        dtype: for gguf ``"f16"`` (default) or ``"f32"``; for safetensors ``"fp32"``, ``"bf16"`` or ``"fp16"``. Default:
            that of the model's files or of an adapter's base; for a checkpoint, the run's ``model.save_dtype``.
        checkpoint: of a run: ``"final"``, ``"best"``, ``"newest"`` or a step. Default: the first that exists.
        progress: show operations that take long.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Returns:
        The directory or the file.

    Raises:
        RequestError: the model does not have this format, or ``out`` already exists.
        TrainingError: the result does not compute the same as the model; nothing is written.

    Examples:
        >>> import trainwright as tw
        >>> tw.export("runs/tiny", "tiny.gguf", to="gguf").name
        'tiny.gguf'
    """
    which = None if checkpoint is None else str(checkpoint)
    words = fspath(model), Path(out), to, dtype, which
    return run_in_process(export_in_process, *words, progress=progress, trust_code=trust_code)


def export_in_process(model: str, out: Path, to: str, dtype: str | None, checkpoint: str | None) -> Path:
    """Export in this process."""
    check_exists(model, "MODEL")  # before torch is imported
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import name_arguments_in_errors

    if to not in _DTYPES:
        raise RequestError(f"--to: unknown format {to!r}; choose from {', '.join(_DTYPES)}")
    if dtype is not None and dtype not in _DTYPES[to]:
        dtypes = " or ".join(_DTYPES[to]) or "none, because adapters are written unchanged"
        raise RequestError(f"--dtype: {dtype} is not supported for {to}; choose from {dtypes}")
    with name_arguments_in_errors(), Activity(sys.stderr, "reading the model"):
        source, out = find_model(model, None, checkpoint), expand_user_path(out)
        if to == "gguf":
            _write_gguf(source, out, dtype or "f16")
        elif to == "adapter":
            _write_adapter(source, out)
        else:
            _refuse_existing(out)
            _write_model(source, out, dtype)
    return out


def _write_gguf(source: UnloadedModel, out: Path, precision: str) -> None:
    export_gguf = WEIGHT_FORMATS.get("gguf").export
    if out.suffix != ".gguf":
        raise RequestError(f"--out: {out} should end in .gguf")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=".export-") as scratch:
        is_plain = source.checkpoint is None and source.section.adapter.type == "none"
        directory = resolve(source.section).directory if is_plain else None
        if directory is None:
            directory = Path(scratch) / "model"
            _write_model(source, directory, None if source.checkpoint is None else "fp32")
        export_gguf(directory, out, precision)


def _write_adapter(source_model: UnloadedModel, out: Path) -> None:
    from trainwright.models.files import replace_directory

    source = source_model.section.adapter.start_from
    if source is None or source_model.checkpoint is not None:
        raise RequestError(
            f"{source_model.origin} is not an exported adapter; pass a run trained with an adapter, or its final/"
        )
    _refuse_existing(out)
    with replace_directory(out) as temporary:
        copytree(source, temporary, dirs_exist_ok=True)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")


def _write_model(source: UnloadedModel, out: Path, dtype: str | None) -> None:
    """Write the full model as a directory: merged, or loaded with a checkpoint's tensors and saved."""
    import torch

    from trainwright.inference.loading import load, probe
    from trainwright.models.files import check_saved, compute_logits, save_model
    from trainwright.models.load import choose_dtype_to_save
    from trainwright.models.merging import merge

    if source.checkpoint is None and source.section.adapter.type != "none":
        merge(source.section, source.seed, out, parse_dtype(dtype))
        return
    check_finished(source)
    loaded_model = load(source, torch.float32, torch.device("cpu"))
    model, tokenizer = loaded_model.lm.model, loaded_model.tokenizer
    config: PretrainedConfig = model.config
    generation: GenerationConfig | None = model.generation_config
    if source.run is not None and _is_trained_on_chats(source.run):
        install_template(tokenizer)
        tokenizer, config, generation = end_texts_at_turns(tokenizer, config, generation)
    ids = probe(config.get_text_config().vocab_size).input_ids
    with loaded_model.lm.open_for_generation() as plain:
        expected_logits = compute_logits(plain, ids)

    def check(directory: Path, checksums: Mapping[str, int]) -> None:
        if (notice := check_saved(directory, checksums, ids, expected_logits)) is not None:
            say(notice, file=sys.stderr)

    dtype_out = parse_dtype(dtype) or choose_dtype_to_save(source.section)
    save_model(out, config, model.state_dict(), tokenizer, generation, dtype_out, check=check)


def _is_trained_on_chats(run: Path) -> bool:
    """Return whether the rows of a run were conversations, not texts to continue."""
    starts = [event for event in read_log(run / "events.jsonl").history if event["event"] == "start"]
    return bool(starts) and bool(starts[-1].get("chats"))


@dataclass(frozen=True)
class Upload:
    """A model on the Hub, or what would be uploaded; ``str()`` gives what ``trainwright push`` prints.

    Attributes:
        repository: ``owner/name``.
        weights: the directory of the model.
        card: the README.md, with how the model was made.
        url: of the commit; None if nothing was uploaded.
    """

    repository: str
    weights: Path
    card: str
    url: str | None = None

    @property
    def files(self) -> dict[str, Path]:
        """Return the files by their path in the repository, without the card."""
        from trainwright.run.hub import list_model_files

        return list_model_files(self.weights)

    def __str__(self) -> str:
        return "\n".join(self._lines()) if self.url is None else f"sent: {self.url}"

    def _lines(self) -> Iterator[str]:
        sizes = {name: path.stat().st_size for name, path in self.files.items()}
        yield (
            f"would upload {format_plural(len(sizes) + 1, 'file')}, {sum(sizes.values()) / 1e6:,.1f} MB, to "
            f"https://huggingface.co/{self.repository}:"
        )
        for name, size in {**sizes, "README.md": len(self.card.encode())}.items():
            yield f"  {size / 1e6:>10,.1f} MB  {name}"
        yield f"\n{self.card.removesuffix(chr(10))}"


def push(
    run: str | PathLike[str],
    repository: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    message: str = "Trained with Trainwright",
    checkpoint: int | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Upload:
    """Publish a run's model on the Hugging Face Hub, with a card that says how it was made.

    What ``trainwright push`` does. The token comes from HF_TOKEN or ``hf auth login``, and is never stored.

    Args:
        run: a finished `Run`, or its directory.
        repository: ``owner/name``; it is created if it does not exist.
        private: create the repository as private.
        dry_run: upload nothing; the result shows the files and the card.
        message: the commit message.
        checkpoint: step of a checkpoint to upload, to ``checkpoints/`` in the repository, instead of the model.
        progress: show the upload.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Raises:
        RequestError: the run is not finished, or there is no token.
        MachineError: the Hub is not reachable or refuses.

    Examples:
        >>> import trainwright as tw
        >>> upload = tw.push("runs/tiny", "me/tiny", dry_run=True)
        >>> "config.json" in upload.files, upload.url
        (True, None)
    """
    words = Path(run), repository, private, dry_run, message, checkpoint
    return run_in_process(push_in_process, *words, progress=progress, trust_code=trust_code)


def push_in_process(
    run: Path, repository: str, private: bool, dry_run: bool, message: str, checkpoint: int | None = None
) -> Upload:
    """Push in this process."""
    run = expand_user_path(run)
    if "/" not in repository.strip("/") or repository.count("/") != 1:
        raise RequestError(f"REPO: {repository} is invalid; expected owner/name")
    if checkpoint is not None:
        return _push_checkpoint(run, checkpoint, repository, private, dry_run)
    weights = _find_weights(run)
    from trainwright.run.hub import format_model_card, send_model

    upload = Upload(repository, weights, format_model_card(run, repository, weights))
    if dry_run:
        return upload
    return replace(upload, url=send_model(weights, upload.card, repository, private, message))


def _push_checkpoint(run: Path, step: int, repository: str, private: bool, dry_run: bool) -> Upload:
    from trainwright.inference.finding import find_model
    from trainwright.run.hub import send_checkpoint

    checkpoint = find_model(str(run), None, str(step), of_texts=False).checkpoint
    assert checkpoint is not None, "a step is a checkpoint"
    upload = Upload(repository, checkpoint, "")
    return upload if dry_run else replace(upload, url=send_checkpoint(checkpoint, repository, private))


def _find_weights(run: Path) -> Path:
    if not (run / "recipe.yaml").is_file():
        raise RequestError(f"RUN: {run} is not a run directory: it has no recipe.yaml")
    if not (run / "final").is_dir():
        raise RequestError(
            f"RUN: {run} has no final/: the run is not finished; continue it with "
            f"trainwright train --resume {quote_word(run)}"
        )
    return run / "final"


@dataclass(frozen=True)
class Merged:
    """A model with a merged adapter.

    Attributes:
        directory: the directory of the model.
        changed: number of weights that differ from the base.
        difference: largest difference of logits to base and adapter, relative to the largest logit.
        sample: text that it generated.
    """

    directory: Path
    changed: int
    difference: float
    sample: str


def merge(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    adapter: str | PathLike[str] | None = None,
    dtype: str | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Merged:
    """Merge an adapter into its base model, and check the result by its logits; what ``trainwright merge`` does.

    Args:
        model: a `Run` or its directory, an adapter's directory, or the base of ``adapter``.
        out: the directory of the merged model; must be new.
        adapter: the adapter, if ``model`` is its base.
        dtype: store it in ``fp32``, ``bf16`` or ``fp16``. Default: the data type of the base.
        progress: show operations that take long.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Raises:
        RequestError: there is no adapter, or ``out`` already exists.
        TrainingError: the result does not compute the same as base and adapter; nothing is written.

    Examples:
        >>> import trainwright as tw
        >>> tw.merge("runs/tiny", "merged")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: no adapter to merge: ...
    """
    words = fspath(model), fspath(out), None if adapter is None else fspath(adapter), dtype
    return run_in_process(merge_in_process, *words, progress=progress, trust_code=trust_code)


def merge_in_process(model: str, out: str, adapter: str | None, dtype: str | None) -> Merged:
    """Merge in this process."""
    check_exists(model, "MODEL")  # before torch is imported
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import name_arguments_in_errors
    from trainwright.models.merging import merge as work_in

    with name_arguments_in_errors(), Activity(sys.stderr, "reading the model"):
        source = find_model(model, adapter)
        check_finished(source)
        _refuse_full(source)
        directory = expand_user_path(out)
        return Merged(directory, *work_in(source.section, source.seed, directory, parse_dtype(dtype)))


def check_finished(source: UnloadedModel) -> None:
    """Raise RequestError for an adapter that exists only in a checkpoint."""
    if source.checkpoint is not None and source.section.adapter.type != "none":
        raise RequestError(
            f"{source.origin} is a checkpoint of an adapter, which cannot be merged before its run is finished: "
            f"continue with trainwright train --resume {quote_word(source.run or 'RUN')}, then pass the run or its "
            "final/"
        )


def _refuse_full(source: UnloadedModel) -> None:
    """Raise RequestError for a run that trained the full model."""
    if source.run is not None and source.section.adapter.type == "none":
        use = "which `trainwright export` writes as a model" if source.checkpoint else "which can be used as it is"
        raise RequestError(
            f"no adapter to merge: {source.run} was trained without one; its full model is in {source.origin}, {use}"
        )


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the data type of ``--dtype``. Raises RequestError."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name is not None and name not in dtypes:
        raise RequestError(f"--dtype: unknown type {name!r}; choose from {', '.join(dtypes)}")
    return None if name is None else dtypes[name]
