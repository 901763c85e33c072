"""Build the examples of unlearning: a forget row, its refusal if the objective trains one, and a retain row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainwright.data.rows.formats import EXAMPLES, NoTarget
from trainwright.data.rows.layouts import columns_of
from trainwright.data.sources.reading import iterate_source
from trainwright.data.stream.dataset_cache import CANNOT_STORE
from trainwright.data.tokens.dataset import PairedSequences, TokenDataset, opened, permuted
from trainwright.errors import RequestError
from trainwright.machine.cache import cache_in_words
from trainwright.machine.sharing import build_once
from trainwright.tasks.unlearn.rows import FORGET, RETAIN

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.section import UnlearnData


def joined(forget: TokenDataset, retain: TokenDataset | None, cache: Path) -> TokenDataset:
    """Return the forget rows as examples each paired with a retain row, memory-mapped from the cache.

    Sequences of ``forget`` keep their indices.

    Raises:
        MachineError: the cache cannot be written.
    """
    if retain is None:
        return forget
    fingerprint = hashlib.sha256(f"{forget.fingerprint}+{retain.fingerprint}".encode()).hexdigest()[:32]
    directory = cache / "datasets" / fingerprint
    with cache_in_words(cache / "datasets", CANNOT_STORE):
        paired = build_once(
            directory, lambda: opened(directory), lambda path: _join(forget, retain, fingerprint).save(path)
        )
    return replace(paired, paired=PairedSequences(forget.sequence_count, retain.sequence_count))


def _join(forget: TokenDataset, retain: TokenDataset, fingerprint: str) -> TokenDataset:
    members, roles = forget.members, forget.roles
    if members is None:
        members = np.arange(forget.sequence_count, dtype=np.int64)[:, None]
    if roles is None:
        roles = np.full(forget.sequence_count, FORGET, dtype=np.int8)
    return TokenDataset(
        tokens=np.concatenate([forget.tokens, retain.tokens]),
        targets=np.concatenate([forget.targets, retain.targets]),
        offsets=np.concatenate([forget.offsets, forget.offsets[-1] + retain.offsets[1:]]),
        fingerprint=fingerprint,
        report=forget.report,
        members=members,
        roles=np.concatenate([roles, np.full(retain.sequence_count, RETAIN, dtype=np.int8)]),
    )


def with_roles(dataset: TokenDataset, roles: tuple[int, ...]) -> TokenDataset:
    """Return the same examples, restricted to sequences (except paired ones) with one of ``roles``."""
    if dataset.members is None or dataset.roles is None:
        return dataset
    selected = [index for index, sequence in enumerate(dataset.members[0]) if dataset.role(int(sequence)) in roles]
    return replace(dataset, members=np.ascontiguousarray(dataset.members[:, selected]))


def some_of(dataset: TokenDataset, size: float | int, seed: int) -> TokenDataset:
    """Return a fraction or a number of the examples, sampled with ``seed``; all if there are fewer."""
    count = max(1, round(size * len(dataset))) if isinstance(size, float) else min(size, len(dataset))
    chosen = np.sort(permuted(len(dataset), f"{seed}/{dataset.fingerprint}/validation")[:count])
    members = np.arange(len(dataset), dtype=np.int64)[:, None] if dataset.members is None else dataset.members
    paired = dataset.paired
    digest = hashlib.sha256(f"{dataset.fingerprint}/{seed}/{count}".encode()).hexdigest()[:32]
    return replace(dataset, members=members[chosen], paired=paired, fingerprint=digest)


def refuse_overlap(data: UnlearnData) -> None:
    """Raise RequestError if a row is both in the forget and in the retain data.

    Raises:
        RequestError: the message has the number of such rows, and where the first one is in both.
    """
    if data.forget is None or data.retain is None:
        return
    forget = {key: location for location, key in _contents(data, "forget")}
    both = [(location, forget[key]) for location, key in _contents(data, "retain") if key in forget]
    if both:
        retain, forgotten = both[0]
        raise RequestError(
            f"data.retain: {len(both):,} of its rows are also in data.forget, the first of them {retain} ({forgotten} "
            "of data.forget); remove them from one of the two"
        )


def _contents(data: UnlearnData, part: str) -> Iterator[tuple[str, bytes]]:
    """Yield ``(place, digest)`` of every row with targets; the digest ignores the layout and white space."""
    (source,), key = data.part(part).sources, f"data.{part}"
    rows = iterate_source(source.source, source.limit, key, source.is_documents)
    first = list(islice(rows, 8))
    first_rows = [row for _, row in first]
    layout = EXAMPLES.layout(columns_of(first_rows), first_rows, source.rows)
    for location, row in chain(first, rows):
        try:
            ((_, example),) = EXAMPLES.sequences(row, layout)
        except NoTarget:
            continue
        except RequestError as error:
            raise RequestError(f"{key}: {location}: {error}") from None
        text = example if isinstance(example, str) else "\n".join(f"{t['role']}: {t['content']}" for t in example)
        yield location, hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
