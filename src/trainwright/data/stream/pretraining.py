"""Prepare the data of a pretraining run: windows of token shards, which are given or built in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.check import unknown_in_shards
from trainwright.data.rows.texts import VERSION
from trainwright.data.sources.shards import Shards, is_shards, tokenizer_fingerprint
from trainwright.data.stream.dataset_cache import CANNOT_STORE, mixture_lines, mixture_of, validation_sizes
from trainwright.data.stream.windows import Spans, WindowDataset, divided, everything
from trainwright.errors import RequestError
from trainwright.machine.cache import cache_in_words
from trainwright.machine.detect import detect
from trainwright.machine.sharing import build_once
from trainwright.recipe.sections.data import SourceSection
from trainwright.utils.activity import doing
from trainwright.utils.paths import user_path
from trainwright.utils.text import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.schema import Recipe


def prepare_windows(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    embeddings: int | None = None,
    *,
    contiguous: bool,
) -> tuple[WindowDataset, WindowDataset | None, list[str], dict[str, int]]:
    """Return the training dataset, the validation dataset or None, lines of text about them, and the number of windows
    of each validation set, if they have names.

    Args:
        embeddings: of the model.
        contiguous: windows span concatenated documents; otherwise each is within one document.

    Raises:
        RequestError: a source is wrong, shards are of another tokenizer or have tokens that the model has no embedding
            for, or one side would be empty.
        MachineError: the cache cannot be written.
    """
    data = recipe.data
    opened = [_shards(source, key, tokenizer, cache) for source, key in data.keyed_sources]
    corpora = opened[: len(data.sources)]
    spans = [everything(corpus, data.max_length, contiguous=contiguous) for corpus in opened]
    train, separate = spans[: len(corpora)], iter(spans[len(corpora) :])
    held_out: list[Spans] = []
    if data.held_out is not None:
        train, sizes = [], validation_sizes(data, [corpus.token_count for corpus in corpora])
        for corpus, share, key in zip(corpora, sizes, data.source_keys, strict=True):
            size = share if isinstance(share, float) else max(1, share or 0)
            training, aside = divided(corpus, data.max_length, size, recipe.train.seed, contiguous=contiguous, key=key)
            train.append(training)
            held_out.append(aside)
    sets = {
        name: [next(separate)] if isinstance(rows, SourceSection) else held_out
        for name, rows in data.validation_sets.items()
    }
    validation_spans = [part for parts in sets.values() for part in parts]
    for shards in opened:
        if wrong := unknown_in_shards(shards, tokenizer, embeddings):
            raise RequestError(wrong)
    mixture = None
    lines = [line for corpus in corpora for line in (_line(corpus), *corpus.about.get("notes", ()))]
    if len(train) > 1:
        windows = [int(part.counts().sum()) for part in train]
        if not all(windows):
            raise RequestError(f"{data.source_keys[windows.index(0)]}: no tokens to predict")
        mixture = mixture_of(data, windows)
        lines += mixture_lines(data, mixture)
    datasets = (
        WindowDataset.of(train, mixture),
        (WindowDataset.of(validation_spans, None) if validation_spans else None),
    )
    for dataset, key in zip(datasets, ("data.train", "data.validation"), strict=True):
        if dataset is not None and not len(dataset):
            raise RequestError(f"{key}: no tokens to predict; it has no document of at least two tokens")
    named = {name: sum(int(part.counts().sum()) for part in parts) for name, parts in sets.items() if name}
    for name, count in named.items():
        if not count:
            raise RequestError(f"data.validation.{name}: no tokens to predict")
    if named:
        lines.append("validation sets: " + ", ".join(f"{count:,} of {name}" for name, count in named.items()))
    return *datasets, [*lines, _split_line(*datasets, contiguous)], named


def _shards(source: SourceSection, key: str, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Shards:
    """Open the shards of a source, or build them in the cache if they are not there yet."""
    if is_shards(source.source):
        if source.limit is not None:
            raise RequestError(
                f"{key}.limit: is not supported for token shards; remove it, or tokenize fewer documents"
            )
        shards = Shards.open(user_path(source.source), key)
        shards.check_tokenizer(tokenizer, key)
        return shards
    identity = identity_of([(source, key)])
    task = hashlib.sha256(json.dumps([identity, tokenizer_fingerprint(tokenizer)], default=str).encode()).hexdigest()
    directory = cache / "shards" / task[:32]

    def find() -> Shards | None:
        try:
            return Shards.open(directory, key) if (directory / "shards.json").is_file() else None
        except RequestError as damaged:
            if isinstance(damaged.__cause__, OSError):  # it cannot be read now
                raise damaged.__cause__ from None
            return None

    def make(path: Path) -> None:
        from trainwright.data.tokens.shard_writer import tokenize

        doing(f"tokenizing {source.source}")
        processes = max(1, detect().cpu_cores - 1)
        tokenize([(source, key)], tokenizer, path, identity=identity, processes=processes)

    with cache_in_words(directory, CANNOT_STORE):
        return build_once(directory, find, make, goes_on=True)


def identity_of(sources: Sequence[tuple[SourceSection, str]]) -> list[Any]:
    """Return a value that changes whenever the sources or their content change, without reading them."""
    from trainwright.data.sources.key import file_states, row_changes

    settings = ([source.format, source.limit, *row_changes(source)] for source, _ in sources)
    return [VERSION, *([file_states(*one), *values] for one, values in zip(sources, settings, strict=True))]


def _line(corpus: Shards) -> str:
    about = corpus.about
    documents = plural(about["documents"], "document")
    return (
        f"{about['source']}: {about['tokens']:,} tokens ({about['dtype']}) in {documents}, "
        f"{about['characters'] / max(1, about['tokens']):.2f} characters per token, in {corpus.directory}"
    )


def _split_line(train: WindowDataset, validation: WindowDataset | None, contiguous: bool) -> str:
    what = "contiguous windows" if contiguous else "windows of documents"
    line = f"{len(train):,} {what} ({plural(train.token_count, 'token')}) to train on"
    if validation is None:
        return f"{line}, none for validation"
    return f"{line}, {len(validation):,} ({plural(validation.token_count, 'token')}) for validation"
