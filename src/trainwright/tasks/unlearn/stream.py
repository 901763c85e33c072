"""Build the examples of unlearning: a forget row, its refusal if the objective trains one, and a retain row."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainwright.data.rows.formats import EXAMPLES, Example, Message, NoTarget, RowReader
from trainwright.data.rows.layouts import RowLayout, list_columns
from trainwright.data.sources.reading import iterate_source
from trainwright.data.sources.row_files import Row, describe_type
from trainwright.data.stream.dataset_cache import CANNOT_STORE
from trainwright.data.tokens.dataset import PairedSequences, TokenDataset, open_dataset, permute_indices
from trainwright.errors import RequestError
from trainwright.machine.cache import explain_cache_errors
from trainwright.machine.sharing import build_once
from trainwright.recipe.files import read_text
from trainwright.tasks.unlearn.section import UnlearnData, select_data
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


def join_datasets(forget: TokenDataset, retain: TokenDataset | None, cache: Path) -> TokenDataset:
    """Return the forget rows as examples each paired with a retain row, memory-mapped from the cache.

    Sequences of ``forget`` keep their indices.

    Raises:
        MachineError: the cache cannot be written.
    """
    if retain is None:
        return forget
    fingerprint = hashlib.sha256(f"{forget.fingerprint}+{retain.fingerprint}".encode()).hexdigest()[:32]
    directory = cache / "datasets" / fingerprint
    with explain_cache_errors(cache / "datasets", CANNOT_STORE):
        paired_dataset = build_once(
            directory, lambda: open_dataset(directory), lambda path: _join(forget, retain, fingerprint).save(path)
        )
    return replace(paired_dataset, paired=PairedSequences(forget.sequence_count, retain.sequence_count))


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


def select_role_examples(dataset: TokenDataset, roles: tuple[int, ...]) -> TokenDataset:
    """Return the same examples, restricted to sequences (except paired ones) with one of ``roles``."""
    if dataset.members is None or dataset.roles is None:
        return dataset
    columns = [index for index, sequence in enumerate(dataset.members[0]) if dataset.role(int(sequence)) in roles]
    return replace(dataset, members=np.ascontiguousarray(dataset.members[:, columns]))


def sample_examples(dataset: TokenDataset, size: float | int, seed: int) -> TokenDataset:
    """Return a fraction or a number of the examples, sampled with ``seed``; all if there are fewer."""
    count = max(1, round(size * len(dataset))) if isinstance(size, float) else min(size, len(dataset))
    indices = np.sort(permute_indices(len(dataset), f"{seed}/{dataset.fingerprint}/validation")[:count])
    members = np.arange(len(dataset), dtype=np.int64)[:, None] if dataset.members is None else dataset.members
    pairing = dataset.paired
    digest = hashlib.sha256(f"{dataset.fingerprint}/{seed}/{count}".encode()).hexdigest()[:32]
    return replace(dataset, members=members[indices], paired=pairing, fingerprint=digest)


def refuse_overlap(data: UnlearnData) -> None:
    """Raise RequestError if a row is both in the forget and in the retain data.

    Raises:
        RequestError: the message has the number of such rows, and where the first one is in both.
    """
    if data.forget is None or data.retain is None:
        return
    forget = {key: location for location, key in _iterate_contents(data, "forget")}
    both = [(location, forget[key]) for location, key in _iterate_contents(data, "retain") if key in forget]
    if both:
        retain, forgotten = both[0]
        raise RequestError(
            f"data.retain: {len(both):,} of its rows are also in data.forget, the first of them {retain} ({forgotten} "
            "of data.forget); remove them from one of the two"
        )


def _iterate_contents(data: UnlearnData, part: str) -> Iterator[tuple[str, bytes]]:
    """Yield ``(place, digest)`` of every row with targets; the digest ignores the layout and white space."""
    (source,), key = data.part(part).sources, f"data.{part}"
    rows = iterate_source(source.source, source.limit, key, source.is_documents)
    first = list(islice(rows, 8))
    first_rows = [row for _, row in first]
    layout = EXAMPLES.layout(list_columns(first_rows), first_rows, source.rows)
    for location, row in chain(first, rows):
        try:
            ((_, example),) = EXAMPLES.sequences(row, layout)
        except NoTarget:
            continue
        except RequestError as error:
            raise RequestError(f"{key}: {location}: {error}") from None
        text = example if isinstance(example, str) else "\n".join(f"{t['role']}: {t['content']}" for t in example)
        yield location, hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


# The role of a sequence in its example; an alternate has the role of a refusal.
FORGET, RETAIN, REFUSAL = 0, 1, 2


def _add_alternates(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with each of its alternates, a text or a list of them, as the answer.

    Raises:
        NoTarget: it has no alternate.
    """
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but alternates answer questions; {_CONVERSATIONS}")
    (field,) = layout.extra
    value = row.get(field)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"the field {field} should be a text or a list of texts, not {describe_type(value)}")
    if not (texts := [text for text in texts if text.strip()]):
        raise NoTarget(f"the field {field} is empty")
    return [(FORGET, example), *((REFUSAL, _replace_answer(example, text)) for text in texts)]


def _pair_with_alternates(sequences: list[tuple[int, Example]]) -> list[list[tuple[int, Example]]]:
    forget, *alternates = sequences
    return [[forget, alternate] for alternate in alternates]


def _replace_answer(conversation: list[Message], answer: str) -> list[Message]:
    return [*conversation[:-1], {"role": "assistant", "content": answer}]


_CONVERSATIONS = "use conversations, or another unlearn.objective"
ALTERNATES = RowReader("alternates", EXAMPLES.layouts, _add_alternates, "alternate", _pair_with_alternates)


def refused(recipe: RecipeSchema) -> RowReader:
    """Return the reader of conversations, each with a copy that ends in a refusal of data.idk as the answer to forget.

    The refusal of a row, such as "I do not know that.", is selected by the seed and the content of the row, so it is
    the same in every epoch, and the log-probabilities of the reference model are computed once.

    Raises:
        RequestError: the file cannot be read.
    """
    file = select_data(recipe).idk
    assert file is not None
    refusals, seed = read_refusals(file), recipe.train.seed
    digest = hashlib.sha256(json.dumps([seed, *refusals]).encode()).hexdigest()[:16]
    return RowReader(
        f"refused {digest}", EXAMPLES.layouts, functools.partial(_add_refusal, refusals=refusals, seed=seed)
    )


def _add_refusal(
    row: Row, layout: RowLayout, remarks: Counter[str] | None, *, refusals: tuple[str, ...], seed: int
) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with a refusal as the answer."""
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but refusals answer questions; {_CONVERSATIONS}")
    digest = hashlib.sha256(json.dumps([seed, example], sort_keys=True, default=str).encode()).digest()
    refusal = refusals[int.from_bytes(digest[:8], "big") % len(refusals)]
    return [(FORGET, example), (REFUSAL, _replace_answer(example, refusal))]


def read_refusals(file: str) -> tuple[str, ...]:
    """Return the refusals in a file, one per line: plain text, or a JSON object with one text.

    Raises:
        RequestError: the file cannot be read or holds no refusals, or a line has several texts.
    """
    path = expand_user_path(file)
    try:
        lines = read_text(path).splitlines()
    except RequestError as error:
        raise RequestError(f"data.idk: {error}") from None
    texts = [_parse_refusal(line.strip(), f"data.idk: {path}:{number}") for number, line in enumerate(lines, 1)]
    refusals = tuple(text for text in texts if text)
    if not refusals:
        raise RequestError(f"data.idk: {path} has no refusals; write one per line, such as I do not know that.")
    return refusals


def _parse_refusal(line: str, location: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = [text for text in value.values() if isinstance(text, str)] if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise RequestError(f"{location}: a refusal must be one text, not {len(texts)}")
    return texts[0].strip()
