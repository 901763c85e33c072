"""Tokenize once, before a process group exists, into a fingerprinted directory that every worker memory-maps.

    <cache>/datasets/<fingerprint>/{train/, validation/, held_back.npy, about.json}
    <cache>/datasets/keys/<key>.json

The fingerprint covers everything that the tokens depend on, including the content of the rows; the key covers their
paths, sizes and times instead. A second run finds its directory by the key, without opening the source or importing
``datasets``. Datasets of the Hub are identified by name: the first downloaded version stays in use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.chat_templates import install_template
from trainwright.data.rows.formats import EXAMPLES, RowReader
from trainwright.data.rows.layouts import PLAIN
from trainwright.data.sources.key import build_source_key, digest_content, select_settings
from trainwright.data.tokens.dataset import (
    DAMAGED,
    MixturePart,
    TokenDataset,
    compute_shares,
    divide_epoch,
    write_dataset,
)
from trainwright.data.tokens.lengths import check_length
from trainwright.data.tokens.token_rows import TokenRows, tokenize_source
from trainwright.errors import RequestError
from trainwright.machine.cache import explain_cache_errors
from trainwright.machine.sharing import build_once, lock_file, remove_remnants
from trainwright.recipe.sections.data import SourceSection
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import retry_stale, write_file
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.data import DataSection

Indices = npt.NDArray[np.int64]
Chosen = list[tuple[TokenRows, Indices]]  # for each source, the indices of the selected rows

CANNOT_STORE = "the tokens cannot be stored in"
HELD_OUT = "held_back.npy"  # the file with the source and the row number of every held-out example


@dataclass(frozen=True)
class PreparedData:
    """Prepared datasets; ``summary`` is lines of text for the user."""

    train: TokenDataset
    validation: TokenDataset | None
    summary: list[str] = field(default_factory=list)
    directory: Path = Path()  # holds train/ and, if there is validation data, validation/
    sets: Mapping[str, int] = field(default_factory=dict)  # examples of each validation set, if they have names

    @property
    def datasets(self) -> list[TokenDataset]:
        """Return both datasets, or that to train on if there is no other."""
        return [self.train] if self.validation is None else [self.train, self.validation]

    def held_out(self) -> Indices:
        """Return the source and the row number in it, both from 0, of every validation row [rows, 2].

        Sources are those of ``list_validation_parts``.
        """
        indices: Indices = np.load(self.directory / HELD_OUT)
        return indices


def prepare(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    kind: RowReader = EXAMPLES,
    *,
    seed: int,
    cache: Path,
    model_max_length: int | None = None,
) -> PreparedData:
    """Read, tokenize, split and save the data of a recipe, or memory-map the result of an earlier run.

    Equal rows, tokenizer, ``data`` and ``seed`` give equal datasets. One process builds; others that need the same data
    wait for it. ``tokenizer`` gets a chat template if it has none and the rows are conversations.

    Args:
        kind: the kind of rows that the task needs.
        cache: the cache directory.
        model_max_length: the maximum number of positions of the model, if limited.

    Raises:
        RequestError: the source, a row or a setting is wrong.
        MachineError: the cache cannot be written.
    """
    check_length(data, model_max_length)
    root = cache / "datasets"
    identity = digest_tokenizer(tokenizer)
    key = root / "keys" / f"{digest_value([kind.name, build_source_key(data, seed, identity)])}.json"
    with explain_cache_errors(root, CANNOT_STORE):
        entry = retry_stale(lambda: _find(root, key))
        if entry is None:
            key.parent.mkdir(parents=True, exist_ok=True)
            waiting = "waiting for another process that prepares the same data"
            with lock_file(key.with_suffix(".lock"), waiting) as alone:
                if alone:
                    remove_remnants(key)
                os.listdir(key.parent)  # asks the server of a shared file system again
                entry = retry_stale(lambda: _find(root, key)) or _build(
                    root, key, data, tokenizer, kind, seed, identity
                )
    prepared_data, format_ = entry
    if format_ not in PLAIN:
        install_template(tokenizer)
    return prepared_data


def _find(root: Path, key: Path) -> tuple[PreparedData, str] | None:
    try:
        directory = root / json.loads(key.read_text(encoding="utf-8"))["fingerprint"]
    except DAMAGED:  # or not prepared yet
        return None
    return _open(directory, "reused")


def _open(directory: Path, how: str) -> tuple[PreparedData, str] | None:
    """Return the datasets in ``directory`` and the layout of their rows, or None if it is missing or damaged.

    Raises:
        OSError: it cannot be read now, so whether it is damaged is not known.
    """
    try:
        about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        train = TokenDataset.open(directory / "train")
        validation = TokenDataset.open(directory / "validation") if about["validation"] else None
        summary = [*about["summary"], f"tokens kept in {directory} ({how})"]
        return PreparedData(train, validation, summary, directory, about.get("sets", {})), about["format"]
    except DAMAGED:
        return None


def _build(
    root: Path,
    key: Path,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    kind: RowReader,
    seed: int,
    identity: str,
) -> tuple[PreparedData, str]:
    content = [digest_content(source, key) for source, key in data.keyed_sources]
    # The names appear in the saved summary, which must not name other files.
    names = [source.source for source, _ in data.keyed_sources]
    settings = {
        **select_settings(data, seed),
        "content": content,
        "names": names,
        "tokenizer": identity,
        "kind": kind.name,
    }
    fingerprint = digest_value(settings)[:32]
    directory, how = root / fingerprint, "reused"

    def make(scratch: Path) -> None:
        nonlocal how
        begin_activity("reading and tokenizing the rows")
        scratch.mkdir()
        about = tokenize_and_split(scratch, data, tokenizer, kind, seed)
        (scratch / "about.json").write_text(json.dumps(about), encoding="utf-8")
        how = "made now"

    # Other keys may have the same fingerprint, so it has a lock of its own.
    entry = build_once(directory, lambda: _open(directory, how), make)
    write_file(key, json.dumps({"fingerprint": fingerprint}))
    return entry


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the vocabulary, merges, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(f"the tokenizer {tokenizer.name_or_path} is not a fast tokenizer (tokenizer.json)")
    backend.no_truncation()  # remove the settings of earlier calls
    backend.no_padding()
    rest = {"template": tokenizer.chat_template, "special": tokenizer.special_tokens_map}
    if tokenizer.init_kwargs.get("characters"):
        rest["unknown"] = "refused"  # not dropped, as in older caches
    return hashlib.sha256(backend.to_str().encode() + digest_value(rest).encode()).hexdigest()


def digest_value(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenize_and_split(
    directory: Path, data: DataSection, tokenizer: PreTrainedTokenizerBase, kind: RowReader, seed: int
) -> dict[str, Any]:
    """Write ``directory``/train and, if there is validation data, /validation; return the description of both.

    Raises:
        RequestError: a source or a row is wrong, or nothing remains to train on or to validate on.
    """
    with ExitStack() as spools:

        def tokenized(source: SourceSection, key: str) -> TokenRows:
            rows = tokenize_source(source, tokenizer, data, kind, key=key, spool=directory)
            spools.callback(rows.spool.close)
            return rows

        keys = data.source_keys
        sources = [tokenized(source, key) for source, key in zip(data.sources, keys, strict=True)]
        _check_alike(sources, keys)
        names = [key.removeprefix("data.") for key in keys]
        used_indices = select_used_rows(sources)
        for key, indices in zip(keys, used_indices, strict=True):
            if not len(indices):
                raise RequestError(
                    f"{key}: all rows repeat those of earlier sources (data.deduplicate); remove the source"
                )
        lines = [line for rows, name in zip(sources, names, strict=True) for line in rows.summary(name)]
        shares_held_out = compute_validation_sizes(
            data, [_count_examples([pair]) for pair in zip(sources, used_indices, strict=True)]
        )
        train: Chosen = []
        held_out: Chosen = []
        for rows, indices, share in zip(sources, used_indices, shares_held_out, strict=True):
            train_indices, aside = split(rows.hashes[indices], share, seed)
            train.append((rows, indices[train_indices]))
            held_out.append((rows, indices[aside]))
        separate = {key: tokenized(source, key) for source, key in data.validation_sources}
        used_apart = {key: select_used_rows([rows])[0] for key, rows in separate.items()}  # each set by itself
        sets: dict[str, Chosen] = {}
        for name, rows_of_set in data.validation_sets.items():
            key = f"data.validation.{name}" if name else "data.validation"
            if isinstance(rows_of_set, SourceSection):
                _check_alike([sources[0], separate[key]], (keys[0], key))
                lines += separate[key].summary(key.removeprefix("data."))
                sets[name] = [(separate[key], used_apart[key])]
            else:
                sets[name] = held_out
        validation_rows = [part for parts in sets.values() for part in parts]
        hows = [f"of {rows.source}" for rows in separate.values()]
        if data.held_out is not None:
            hows.insert(0, f"held out with seed {seed}, duplicates in the same part")
        mixture = None
        if len(sources) > 1:
            mixture = build_mixture(
                data, [len(rows.list_sequences(selection)) // rows.sequences_per_example for rows, selection in train]
            )
            lines += describe_mixture(data, mixture)
        if validation_rows and (len(sources) > 1 or separate) and (both := _count_in_both(train, validation_rows)):
            lines.append(f"validation: {both:,} of its examples are also trained on")
        counts = [_write(directory / "train", train, _join_reports(sources), mixture)]
        if validation_rows:
            validation_sources = [*(sources if data.held_out is not None else []), *separate.values()]
            counts.append(_write(directory / "validation", validation_rows, _join_reports(validation_sources), None))
            np.save(directory / HELD_OUT, _number_rows(validation_rows))
    lines.append(_split_line(counts, ", ".join(hows)))
    set_sizes = {name: _count_examples(selection) for name, selection in sets.items() if name}
    if set_sizes:
        lines.append("validation sets: " + ", ".join(f"{count:,} of {name}" for name, count in set_sizes.items()))
    # The layout determines whether a template is needed: for a mixture, a conversation layout if there is one.
    layout = next((rows.format for rows in sources if rows.format not in PLAIN), sources[0].format)
    return {"summary": lines, "format": layout, "validation": bool(validation_rows), "sets": set_sizes}


def list_validation_parts(data: DataSection) -> list[tuple[SourceSection, str]]:
    """Return the sources of the validation rows, in the order in which the rows are stored, with their recipe keys."""
    train, separate = list(zip(data.sources, data.source_keys, strict=True)), iter(data.validation_sources)
    sets = data.validation_sets.values()
    return [part for rows in sets for part in ([next(separate)] if isinstance(rows, SourceSection) else train)]


def _count_examples(chosen: Chosen) -> int:
    return sum(len(rows.list_sequences(indices)) // rows.sequences_per_example for rows, indices in chosen)


def select_used_rows(sources: Sequence[TokenRows]) -> list[Indices]:
    """Return the indices of the rows of each source that are used: with ``data.deduplicate``, those that repeat none
    before them in any of the sources.
    """
    hashes = [rows.hashes for rows in sources]
    indices = [np.arange(len(source_hashes), dtype=np.int64) for source_hashes in hashes]
    if not any(rows.compares_targets for rows in sources):
        return indices
    first = np.zeros(sum(map(len, hashes)), dtype=np.bool_)
    first[np.unique(np.concatenate(hashes), return_index=True)[1]] = True
    indices = [np.flatnonzero(part) for part in np.split(first, np.cumsum([*map(len, hashes)])[:-1])]
    for rows, source_hashes, part in zip(sources, hashes, indices, strict=True):
        rows.repeats = len(source_hashes) - len(part)
    return indices


def _number_rows(chosen: Chosen) -> Indices:
    """Return the source and the row number in it, both from 0, of every row that is held out [rows, 2]."""
    numbers = [np.frombuffer(rows.numbers, dtype=np.int64)[aside] for rows, aside in chosen]
    sources = np.repeat(np.arange(len(chosen)), [len(part) for part in numbers])
    return np.stack([sources, np.concatenate(numbers)], axis=1)


def compute_validation_sizes(data: DataSection, sizes: Sequence[int]) -> list[float | int | None]:
    """Return how much of each source, with ``sizes`` examples, is held out: the same fraction, or a part of a number
    by its share of the mixture.
    """
    if len(data.sources) > 1 and isinstance(data.held_out, int):
        return list(compute_shares(data.held_out, data.weights(sizes)))
    return [data.held_out] * len(data.sources)


def _check_alike(sources: Sequence[TokenRows], keys: Sequence[str]) -> None:
    first = sources[0]
    for rows, key in zip(sources[1:], keys[1:], strict=True):
        if rows.sequences_per_example != first.sequences_per_example:
            raise RequestError(
                f"{key}: {rows.source} has rows of {rows.format} and {keys[0]} has {first.format}: all examples of a "
                "run must have the same number of answers; convert them to one layout"
            )


def build_mixture(data: DataSection, sizes: Sequence[int]) -> tuple[MixturePart, ...]:
    """Divide an epoch between sources with ``sizes`` examples; raise RequestError if one has no part of it."""
    parts = divide_epoch(sizes, data.weights(sizes))
    for part, key in zip(parts, data.source_keys, strict=True):
        if not part.drawn:
            raise RequestError(
                f"{key}.weight: is too small: an epoch of {sum(sizes):,} examples has none of the source; raise it or "
                "remove the source"
            )
    return parts


def describe_mixture(data: DataSection, mixture: Sequence[MixturePart]) -> list[str]:
    """Return a line about each source of a mixture; stages have lines of their own."""
    if data.stages is not None:
        return []
    total = sum(part.drawn for part in mixture)
    return [
        f"mixture: {part.drawn:,} of the {total:,} examples per epoch ({part.drawn / total:.1%}) are from the "
        f"{part.examples:,} of {source.source}, each used {part.drawn / part.examples:.3g} times per epoch"
        for part, source in zip(mixture, data.sources, strict=True)
    ]


def _count_in_both(train: Chosen, validation_rows: Chosen) -> int:
    """Return the number of held-out rows that are also in the training data."""
    train_hashes, aside = (
        np.concatenate([rows.hashes[indices] for rows, indices in selection]) for selection in (train, validation_rows)
    )
    return len(np.intersect1d(train_hashes, aside))


def _join_reports(sources: Sequence[TokenRows]) -> dict[str, Any]:
    """Combine the reports of several sources; ``parts`` holds the individual ones."""
    reports = [rows.report() for rows in sources]
    if len(reports) == 1:
        return reports[0]
    counts: dict[str, Any] = {
        key: sum(report[key] for report in reports) for key, value in reports[0].items() if isinstance(value, int)
    }
    return {
        **counts,
        "source": " + ".join(report["source"] for report in reports),
        "format": next((report["format"] for report in reports if report["format"] not in PLAIN), reports[0]["format"]),
        "longest": max(report["longest"] for report in reports),
        "left_out": {why: count for report in reports for why, count in report["left_out"].items()},
        "parts": reports,
    }


def _write(
    directory: Path, chosen: Chosen, report: dict[str, Any], mixture: tuple[MixturePart, ...] | None
) -> tuple[int, int]:
    """Write a dataset; return its numbers of examples and tokens."""
    parts = [(rows.spool, rows.list_sequences(chosen_rows)) for rows, chosen_rows in chosen]
    sequences_per_example = chosen[0][0].sequences_per_example
    tokens = write_dataset(directory, parts, sequences_per_example, report, mixture)
    return sum(len(sequences) for _, sequences in parts) // sequences_per_example, tokens


def _split_line(counts: Sequence[tuple[int, int]], how: str) -> str:
    (examples, tokens), *rest = counts
    line = f"split: {format_plural(examples, 'example')} ({format_plural(tokens, 'token')}) to train on"
    if not rest:
        return f"{line}, none for validation"
    return f"{line}, {rest[0][0]:,} ({format_plural(rest[0][1], 'token')}) for validation, {how}"


def split(
    hashes: Sequence[Any] | npt.NDArray[np.void], validation: float | int | None, seed: int
) -> tuple[Indices, Indices]:
    """Return ``(train, validation)`` indices, both sorted; every example is in exactly one.

    Whether an example is held out depends on the seed and its content, so equal examples are on the same side, and
    adding a row to the data moves few others.

    Args:
        hashes: digests of the examples' content.
        validation: a fraction below 1, a number of examples, or None.

    Raises:
        RequestError: no examples would remain for training or for validation.
    """
    total = len(hashes)
    all_indices = np.arange(total, dtype=np.int64)
    if not validation:
        return all_indices, all_indices[:0]
    size = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if size >= total:
        raise RequestError(
            f"data.validation: {validation} of {total:,} examples leaves none for training; lower it, or set it to null"
        )
    prefix = f"{seed}/".encode()
    ranks = np.fromiter((_hash_content(prefix + bytes(content)) for content in hashes), np.uint64, total)
    order = np.argsort(ranks, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(ranks[order])) + 1).tolist(), total]  # edges of equal groups
    in_validation = np.zeros(total, dtype=np.bool_)
    count = 0
    for begin, end in pairwise(borders):
        if count + end - begin <= size:
            in_validation[order[begin:end]] = True
            count += end - begin
        if count == size:
            break
    if not count:
        raise RequestError(
            f"data.validation: too many duplicates to hold out {size:,} examples; remove the duplicates, or set it "
            "to null"
        )
    return all_indices[~in_validation], all_indices[in_validation]


def _hash_content(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
