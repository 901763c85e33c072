"""Build the training and validation datasets from the sources of a recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.kinds import RowReader
from trainwright.data.tokens.dataset import write_dataset
from trainwright.data.tokens.mixture import MixturePart, parts_of, shares
from trainwright.data.tokens.token_rows import TokenRows, tokenize_source
from trainwright.errors import RequestError
from trainwright.text import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.data import DataSection, SourceSection

Indices = npt.NDArray[np.int64]
HELD_OUT = "held_back.npy"  # the file with the source and the row number of every held-out example
Chosen = list[tuple[TokenRows, Indices]]  # for each source, the indices of the selected rows


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
        found = [tokenized(source, key) for source, key in zip(data.sources, keys, strict=True)]
        _check_alike(found, keys)
        names = [key.removeprefix("data.") for key in keys]
        lines = [line for rows, name in zip(found, names, strict=True) for line in rows.summary(name)]
        train: Chosen
        if data.validation_source is not None:
            separate = tokenized(data.validation_source, "data.validation")
            _check_alike([found[0], separate], (keys[0], "data.validation"))
            lines += separate.summary("validation")
            train = [(rows, _everything(rows)) for rows in found]
            held: Chosen = [(separate, _everything(separate))]
            how = f"of {separate.source}"
        else:
            sides = [split(rows.hashes, wanted, seed) for rows, wanted in zip(found, _wanted(data, found), strict=True)]
            train = [(rows, kept) for rows, (kept, _) in zip(found, sides, strict=True)]
            held = [(rows, aside) for rows, (_, aside) in zip(found, sides, strict=True)]
            held = held if any(len(aside) for _, aside in held) else []
            how = f"held out with seed {seed}, duplicates in the same part"
        mixture = None
        if len(found) > 1:
            mixture = _mixture(data, train)
            lines += _mixture_lines(data, mixture)
        if held and (len(found) > 1 or data.validation_source is not None) and (both := _in_both(train, held)):
            lines.append(f"validation: {both:,} of its examples are also trained on")
        report = found[0].report() if len(found) == 1 else _joined(found)
        counts = [_write(directory / "train", train, report, mixture)]
        if held:
            report = separate.report() if data.validation_source is not None else report
            counts.append(_write(directory / "validation", held, report, None))
            np.save(directory / HELD_OUT, _numbered(held))
    lines.append(_split_line(counts, how))
    # The layout determines whether a template is needed: for a mixture, a conversation layout if there is one.
    layout = next((rows.format for rows in found if rows.format != "text"), "text")
    return {"summary": lines, "format": layout, "validation": bool(held)}


def _numbered(held: Chosen) -> Indices:
    """Return the source and the row number in it, both from 0, of every row that is held out [rows, 2]."""
    numbers = [np.frombuffer(rows.numbers, dtype=np.int64)[aside] for rows, aside in held]
    sources = np.repeat(np.arange(len(held)), [len(each) for each in numbers])
    return np.stack([sources, np.concatenate(numbers)], axis=1)


def _everything(rows: TokenRows) -> Indices:
    return np.arange(len(rows.hashes), dtype=np.int64)


def _wanted(data: DataSection, found: Sequence[TokenRows]) -> list[float | int | None]:
    """Return how much of each source is held out: the same fraction, or a number split by the weights."""
    validation = data.validation
    assert not isinstance(validation, str)
    if len(found) > 1 and isinstance(validation, int):
        return list(shares(validation, [source.weight for source in data.sources]))
    return [validation] * len(found)


def _check_alike(found: Sequence[TokenRows], keys: Sequence[str]) -> None:
    first = found[0]
    for rows, key in zip(found[1:], keys[1:], strict=True):
        if rows.sequences_per_example != first.sequences_per_example:
            raise RequestError(
                f"{key}: {rows.source} has rows of {rows.format} and {keys[0]} has {first.format}: all examples of a "
                "run must have the same number of answers; convert them to one layout"
            )


def _mixture(data: DataSection, train: Chosen) -> tuple[MixturePart, ...]:
    sizes = [len(rows.sequences_of(kept)) // rows.sequences_per_example for rows, kept in train]
    parts = parts_of(sizes, [source.weight for source in data.sources])
    for part, key in zip(parts, data.source_keys, strict=True):
        if not part.drawn:
            raise RequestError(
                f"{key}.weight: is too small: an epoch of {sum(sizes):,} examples has none of the source; raise it or "
                "remove the source"
            )
    return parts


def _mixture_lines(data: DataSection, mixture: Sequence[MixturePart]) -> list[str]:
    total = sum(part.drawn for part in mixture)
    return [
        f"mixture: {part.drawn:,} of the {total:,} examples per epoch ({part.drawn / total:.1%}) are from the "
        f"{part.examples:,} of {source.source}, each used {part.drawn / part.examples:.3g} times per epoch"
        for part, source in zip(mixture, data.sources, strict=True)
    ]


def _in_both(train: Chosen, held: Chosen) -> int:
    """Return the number of held-out rows that are also in the training data."""
    trained = np.concatenate([rows.hashes.chosen(kept) for rows, kept in train])
    aside = np.concatenate([rows.hashes.chosen(kept) for rows, kept in held])
    return len(np.intersect1d(trained, aside))


def _joined(found: Sequence[TokenRows]) -> dict[str, Any]:
    """Combine the reports of several sources; ``parts`` holds the individual ones."""
    each = [rows.report() for rows in found]
    counts: dict[str, Any] = {
        key: sum(report[key] for report in each) for key, value in each[0].items() if isinstance(value, int)
    }
    formats = list(dict.fromkeys(report["format"] for report in each))
    return {
        **counts,
        "source": " + ".join(report["source"] for report in each),
        "format": next((name for name in formats if name != "text"), "text"),
        "longest": max(report["longest"] for report in each),
        "left_out": {why: count for report in each for why, count in report["left_out"].items()},
        "parts": each,
    }


def _write(
    directory: Path, chosen: Chosen, report: dict[str, Any], mixture: tuple[MixturePart, ...] | None
) -> tuple[int, int]:
    """Write a dataset; return its numbers of examples and tokens."""
    parts = [(rows.spool, rows.sequences_of(kept)) for rows, kept in chosen]
    each = chosen[0][0].sequences_per_example
    tokens = write_dataset(directory, parts, each, report, mixture)
    return sum(len(sequences) for _, sequences in parts) // each, tokens


def _split_line(counts: Sequence[tuple[int, int]], how: str) -> str:
    (examples, tokens), *rest = counts
    line = f"split: {plural(examples, 'example')} ({plural(tokens, 'token')}) to train on"
    if not rest:
        return f"{line}, none for validation"
    return f"{line}, {rest[0][0]:,} ({plural(rest[0][1], 'token')}) for validation, {how}"


def split(hashes: Sequence[bytes], validation: float | int | None, seed: int) -> tuple[Indices, Indices]:
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
    everything = np.arange(total, dtype=np.int64)
    if not validation:
        return everything, everything[:0]
    wanted = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if wanted >= total:
        raise RequestError(
            f"data.validation: {validation} of {total:,} examples leaves none for training; lower it, or set it to null"
        )
    prefix = f"{seed}/".encode()
    ranks = np.fromiter((_rank(prefix + content) for content in hashes), np.uint64, total)
    order = np.argsort(ranks, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(ranks[order])) + 1).tolist(), total]  # edges of equal groups
    held = np.zeros(total, dtype=np.bool_)
    count = 0
    for begin, end in pairwise(borders):
        if count + end - begin <= wanted:
            held[order[begin:end]] = True
            count += end - begin
        if count == wanted:
            break
    if not count:
        raise RequestError(
            f"data.validation: too many duplicates to hold out {wanted:,} examples; remove the duplicates, or set it "
            "to null"
        )
    return everything[~held], everything[held]


def _rank(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
