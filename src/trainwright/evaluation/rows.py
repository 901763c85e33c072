"""The rows a model is measured on: read once, then turned into each model's own tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainwright.data.dataset import TokenDataset
from trainwright.data.formats import SINGLE, Message, NoTarget, layout_of, to_example
from trainwright.data.sources import place_of, read_rows
from trainwright.data.templates import ChatEncoder, Encoded, TurnsError, encode_texts
from trainwright.errors import RequestError
from trainwright.inference.asking import last_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # rows rendered and tokenised at a time
_SEED = 0


@dataclass(frozen=True)
class Rows:
    """Rows of a source in its order. A text has no messages, and a conversation no text."""

    source: str
    layout: str
    numbers: list[int]  # where each stands in the source, from 0
    conversations: list[list[Message]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def examples(self) -> Sequence[Any]:
        return self.texts if self.layout == "text" else self.conversations

    def chosen(self, places: Sequence[int]) -> Rows:
        """Some of the rows."""
        return replace(
            self,
            numbers=[self.numbers[place] for place in places],
            conversations=[self.conversations[place] for place in places if self.conversations],
            texts=[self.texts[place] for place in places if self.texts],
        )

    def place(self, index: int) -> str:
        """File and line of a row, for messages."""
        return place_of(self.source, self.numbers[index])

    def question(self, index: int) -> list[Message]:
        """A conversation up to where its last answer begins."""
        return self.conversations[index][: last_answer(self.conversations[index])]

    def reference(self, index: int) -> str:
        """The last answer of a conversation."""
        conversation = self.conversations[index]
        return str(conversation[last_answer(conversation)]["content"])


def read(source: str, layout: str = "auto", limit: int | None = None, *, key: str, lenient: bool = False) -> Rows:
    """Read ``source``, at most its first ``limit`` rows.

    Args:
        key: what names the source in messages.
        lenient: leave out rows in which nothing is answered, as training does.

    Raises:
        RequestError: the source, its layout or a row is wrong, with the row's file and line.
    """
    table = read_rows(source, limit, key)
    columns = table.column_names
    first = table[:8]
    rows_of_first = [dict(zip(first, values, strict=True)) for values in zip(*first.values(), strict=True)]
    try:
        layout = layout_of(columns, rows_of_first, layout, SINGLE)
    except RequestError as error:
        raise RequestError(f"{key}: {source}: {error}") from None
    rows = Rows(source, layout, [])
    for number, row in enumerate(table):
        try:
            example = to_example(row, layout)
        except NoTarget as error:
            if lenient:
                continue
            raise RequestError(
                f"{key}: {place_of(source, number)}: {error}, so there is no reference to compare with; fill it in or "
                "remove the row"
            ) from None
        except RequestError as error:
            raise RequestError(f"{key}: {place_of(source, number)}: {error}") from None
        rows.numbers.append(number)
        rows.texts.append(example) if isinstance(example, str) else rows.conversations.append(example)
    return rows


def drawn(total: int, count: int | None) -> list[int]:
    """``count`` of ``total`` places, in order, and the same each time; all of them where it is None."""
    if count is None or count >= total:
        return list(range(total))
    return sorted(np.random.default_rng(_SEED).choice(total, count, replace=False).tolist())


@dataclass(frozen=True)
class Prompts:
    """What a model is asked, with one entry for each question.

    Attributes:
        places: of the rows that are asked, among all.
        tokens: each ends where the answer is to begin.
        references: the answers of the rows.
    """

    places: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedRows:
    """Rows as the tokens of one model.

    Attributes:
        dataset: every row, and which of its tokens are targets.
        last_turn: of every row, how many of its targets belong to its last answer.
        cut: how many rows are longer than the model or the user allows.
        notes: what a user should know about the template.
    """

    dataset: TokenDataset
    last_turn: list[int]
    prompts: Prompts
    cut: int
    notes: list[str]

    def save(self, directory: Path) -> None:
        """Write everything to ``directory``, for other processes."""
        self.dataset.save(directory / "tokens")
        rest = {"last_turn": self.last_turn, "prompts": asdict(self.prompts), "cut": self.cut, "notes": self.notes}
        (directory / "rows.json").write_text(json.dumps(rest), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> EncodedRows:
        rest = json.loads((directory / "rows.json").read_text(encoding="utf-8"))
        prompts = Prompts(**rest.pop("prompts"))
        return cls(TokenDataset.open(directory / "tokens"), prompts=prompts, **rest)


def encode(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None, asked: Sequence[int], key: str
) -> EncodedRows:
    """The rows in the tokens of ``tokenizer``.

    Args:
        max_length: of a row; what is longer is cut, and its last targets with it.
        asked: places of the rows that are to be answered.

    Raises:
        RequestError: the template refuses a row, or nothing of an answer is left of it after the cut; with file and
            line.
    """
    encoder = None if rows.layout == "text" else ChatEncoder(tokenizer)
    pairs, last_turn, cut, called = [], [], 0, {}
    for place, (ids, flags) in enumerate(_encoded(rows, tokenizer, encoder, key)):
        kept = flags[:max_length]
        if not any(kept[1:]):
            raise RequestError(
                f"{key}: {rows.place(place)}: its {len(ids):,} tokens have no answer within the first {max_length:,}; "
                "raise --max-length, as far as the model goes, or remove the row"
            )
        begin = max(1, _last_run(flags))
        last_turn.append(sum(kept[begin:]))
        if encoder is not None and rows.conversations[place][last_answer(rows.conversations[place])].get("tool_calls"):
            called[place] = str(tokenizer.decode(ids[begin : begin + sum(flags[begin:])], skip_special_tokens=True))
        cut += len(ids) > len(kept)
        pairs.append((ids[:max_length], kept))
    dataset = TokenDataset.from_examples(pairs, fingerprint(pairs))
    prompts = Prompts() if encoder is None else _prompts(rows, encoder, asked, called, key)
    return EncodedRows(dataset, last_turn, prompts, cut, [] if encoder is None else encoder.notes)


def fingerprint(pairs: Sequence[Encoded]) -> str:
    """Of tokens and targets."""
    digest = hashlib.sha256()
    for ids, flags in pairs:
        digest.update(np.asarray(ids, dtype="<i4").tobytes() + np.asarray(flags, dtype=np.bool_).tobytes() + b"|")
    return digest.hexdigest()[:32]


def held_back(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, validation: TokenDataset, max_length: int, key: str
) -> Rows:
    """Those of the rows of a training's source that it held back: the ones with the tokens of a validation example."""
    held = {validation.document(index)[0].tobytes() for index in range(len(validation))}
    encoder = None if rows.layout == "text" else ChatEncoder(tokenizer)
    tokens = (
        np.asarray(ids[:max_length], dtype=np.int32).tobytes() for ids, _ in _encoded(rows, tokenizer, encoder, key)
    )
    return rows.chosen([place for place, bytes_ in enumerate(tokens) if bytes_ in held])


def _encoded(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder | None, key: str
) -> Iterator[Encoded]:
    for start in range(0, len(rows), _BATCH):
        batch = rows.examples[start : start + _BATCH]
        try:
            yield from encode_texts(tokenizer, batch) if encoder is None else encoder.encode(batch)
        except TurnsError as error:
            raise RequestError(f"{key}: {rows.place(start + error.index)}: {error}") from None


def _prompts(rows: Rows, encoder: ChatEncoder, asked: Sequence[int], called: Mapping[int, str], key: str) -> Prompts:
    """The questions of ``asked`` rows; ``called`` has the references of answers that call tools."""
    references = [called.get(place, rows.reference(place)).strip() for place in asked]
    try:
        return Prompts(list(asked), encoder.prompts([rows.question(place) for place in asked]), references)
    except TurnsError as error:
        raise RequestError(f"{key}: {rows.place(asked[error.index])}: {error}") from None


def _last_run(flags: Sequence[bool]) -> int:
    """Where the last unbroken run of targets begins."""
    end = max(place for place, flag in enumerate(flags) if flag)
    while end and flags[end - 1]:
        end -= 1
    return end
