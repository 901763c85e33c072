"""Examples of sources that are tokenized while a run trains, in shards ahead of it (``data.streaming``).

    <cache>/streams/<host>-<process>-<token>/
        0000000012/   a shard: buffer_size examples as in tokens/dataset.py, and begin.json

One process of each machine starts a producer, which reads the rows in order, epoch after epoch, and writes shards as
long as there is room; shards that every rank has passed are removed. The example at position p of the stream is in
shard p // buffer_size, whose examples are shuffled, so a step follows from the seed, the sources and its number alone.
A checkpoint says where in the sources the shard of its step begins, and a resumed run begins to tokenize there, in a
directory of its own: it never reads what another launch has left.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.chat_templates import Remarks
from trainwright.data.rows.formats import look_up_reader
from trainwright.data.rows.layouts import list_columns
from trainwright.data.rows.tokenizer_calls import check_token
from trainwright.data.sources.key import digest_content, select_settings
from trainwright.data.sources.reading import iterate_source
from trainwright.data.stream.dataset_cache import CANNOT_STORE, PreparedData, digest_tokenizer, digest_value
from trainwright.data.stream.stages import count_source_examples
from trainwright.data.tokens.dataset import Indices, TokenDataset, TokenSpool, open_dataset
from trainwright.data.tokens.lengths import check_length
from trainwright.errors import EXIT_TRAINING, MachineError, RequestError, TrainwrightError, build_error
from trainwright.machine.cache import explain_cache_errors
from trainwright.machine.detect import detect
from trainwright.machine.sharing import is_locked, lock_directory, read_host_name
from trainwright.recipe.extensions import build_child_environment
from trainwright.recipe.sections.data import DataSection, SourceSection
from trainwright.utils import heartbeat
from trainwright.utils.text import format_plural, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.parallel.world import World
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.recipe.sections.data import StreamingSection

_VERSION = 1  # raised when the examples or their order change
_SAMPLE = 512  # examples that are tokenized before training
_FIRST_ROWS = 1000  # whose columns determine the layout of the others
_LOOK_SECONDS = 0.02  # for a shard
_ROOM_SECONDS = 0.2  # for room on the disk
_FILES_BYTES = 2**11  # of a shard, beside its arrays
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PRODUCER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from trainwright.data.stream.streamed import main; main()"
)

Tokens = npt.NDArray[np.int32]
Targets = npt.NDArray[np.bool_]
PlacedExample: TypeAlias = "tuple[Begin, Tokens, Targets]"


class Begin(NamedTuple):
    """Where in the sources a shard begins, everything counted from 0.

    ``row``: of the source, or, of a corpus, its piece of text. ``skip``: how many examples of the row, or tokens of the
    piece, come before it.
    """

    epoch: int = 0
    source: int = 0
    row: int = 0
    skip: int = 0


@dataclass
class SourceReader:
    """The examples of a recipe's sources in order, read from any place; it is sent to the producer."""

    recipe: RecipeSchema
    tokenizer: PreTrainedTokenizerBase
    embeddings: int  # of the model
    layout: str = "text"
    counts: Counter[str] = field(default_factory=Counter)  # of rows, by what became of them
    remarks: Remarks = field(default_factory=Remarks)  # what their text or their template changes
    notes: dict[str, None] = field(default_factory=dict)  # lines about how the sources are read

    @property
    def streaming(self) -> StreamingSection:
        """Return the settings."""
        assert self.recipe.data.streaming is not None
        return self.recipe.data.streaming

    def lines(self) -> list[str]:
        """Return what became of the rows so far, as lines of text."""
        counts = ", ".join(f"{number:,} {label}" for label, number in self.counts.items() if number)
        return [f"rows so far: {counts}", *self.remarks.lines(), *self.notes]

    def examples(self, begin: Begin, processes: int = 1) -> Iterator[PlacedExample]:
        """Yield examples with their places, from ``begin`` on, without end.

        Raises:
            RequestError: a source or a row is wrong, or there is no example.
        """
        data = self.recipe.data
        sources = list(enumerate(zip(data.sources, data.source_keys, strict=True)))
        for epoch in count(begin.epoch):
            is_empty = True
            for number, (source, key) in sources[begin.source if epoch == begin.epoch else 0 :]:
                row, skip = begin[2:] if (epoch, number) == begin[:2] else (0, 0)
                if self.recipe.spec.corpus:
                    read = self._iterate_windows(source, key, row, skip, processes)
                else:
                    read = self._rows(source, key, row, skip)
                for row, skip, tokens, targets in read:
                    is_empty = False
                    yield Begin(epoch, number, row, skip), tokens, targets
            if is_empty:
                raise RequestError(f"data.train: no row of {data.name} has a token to train on")

    def _rows(
        self, source: SourceSection, key: str, begin: int, skip: int
    ) -> Iterator[tuple[int, int, Tokens, Targets]]:
        """Yield the row, the number within it, the tokens and the targets of each example of a source."""
        from trainwright.data.tokens.token_rows import RowEncoding, iterate_batches

        data, name = self.recipe.data, source.source
        placed_rows = iterate_source(name, source.limit, key, source.is_documents, stream=True)
        first = list(islice(placed_rows, _FIRST_ROWS))
        if not first:
            raise RequestError(f"{key}: {name} has no rows")
        rows, columns = [row for _, row in first[:8]], list_columns(row for _, row in first)
        kind = look_up_reader(self.recipe, key)
        encoding = RowEncoding.of(source, self.tokenizer, data, kind, columns, rows, key=key)
        self.layout = encoding.layout
        unused = encoding.layout.unused(columns)
        used_columns = [column for column in columns if column not in unused]
        known_columns, origins = set(columns), dict[int, str]()

        def needed() -> Iterator[tuple[int, dict[str, Any]]]:
            for index, (origin, row) in islice(enumerate(chain(first, placed_rows)), begin, None):
                if new := row.keys() - known_columns:
                    known_columns.update(new)
                    layout = kind.layout([*known_columns], rows, source.rows, f"{key}: {origin}")
                    if layout != encoding.layout or not new.isdisjoint(layout.used):
                        raise RequestError(
                            f"{key}: {origin}: has columns that would be used and that the first {_FIRST_ROWS:,} rows "
                            "lack; put such a row first, so that all are read alike"
                        )
                origins[index] = origin
                yield index, {column: row.get(column) for column in used_columns}

        for batch in iterate_batches(needed()):
            spool = TokenSpool(None)
            token_rows = encoding.create_token_rows(spool)
            token_rows.encoding = self.remarks
            encoding.take_in(batch, token_rows, origins.__getitem__)
            self._check(token_rows.largest[0], f"{key}: {origins.get(-token_rows.largest[1])}")
            for index, _ in batch:
                del origins[index]
            cut, without = token_rows.truncated, token_rows.without_target
            self.counts.update({"read": token_rows.rows, "cut to data.max_length": cut, "without a target": without})
            self.counts.update({f"left out: {why}": number for why, number in token_rows.left_out.items()})
            self.notes |= dict.fromkeys(f"{name}: {note}" for note in encoding.notes(unused))
            sequence = 0
            for index, examples in zip(token_rows.numbers, token_rows.examples_of_row, strict=True):
                for number in range(skip if index == begin else 0, examples):
                    tokens, targets = spool.read(sequence + number)
                    yield index, number, np.frombuffer(tokens, "<i4"), np.frombuffer(targets, np.bool_)
                sequence += examples

    def _iterate_windows(
        self, source: SourceSection, key: str, begin: int, skip: int, processes: int
    ) -> Iterator[tuple[int, int, Tokens, Targets]]:
        """Yield the windows of a corpus as `stream/windows.py` has them, each with its target behind the last token."""
        from trainwright.data.rows.texts import iterate_pieces
        from trainwright.data.tokens.shard_writer import build_settings, iterate_chunks, open_encoder

        settings, length = build_settings(self.tokenizer), self.recipe.data.max_length
        contiguous = self.recipe.spec.needs(self.recipe).full
        numbers = count(begin)
        pending = np.zeros(0, np.int32)
        starts: list[tuple[int, int]] = []  # pieces in `pending`, and where each begins in it, maybe before

        def window(size: int) -> tuple[int, int, Tokens, Targets]:
            while len(starts) > 1 and starts[1][1] <= 0:
                del starts[0]
            piece, start = starts[0]
            targets = np.ones(size, np.bool_)
            targets[0] = False
            return piece, -start, pending[:size], targets

        with open_encoder(settings, processes) as encode:
            for chunk, (content, lengths) in encode(
                iterate_chunks(islice(iterate_pieces(source, key, stream=True), begin, None))
            ):
                parts = np.split(np.frombuffer(content, settings.dtype), np.cumsum(lengths)[:-1])
                for piece, tokens, number in zip(chunk, parts, numbers, strict=False):
                    self._check(int(tokens.max(initial=0)), f"{key}: {piece.location}")
                    self.counts.update({"read": piece.first})
                    before = skip if number == begin else 0
                    starts.append((number, len(pending) - before))
                    pending = np.concatenate([pending, tokens[before:].astype(np.int32)])
                    while len(pending) > length:
                        yield window(length + 1)
                        pending, starts = pending[length:], [(piece, start - length) for piece, start in starts]
                    if piece.last and not contiguous:
                        if len(pending) > 1:
                            yield window(len(pending))
                        pending, starts = pending[:0], []
        if len(pending) > 1:
            yield window(len(pending))

    def _check(self, token: int, place: str) -> None:
        if wrong := check_token(token, self.tokenizer, self.embeddings):
            raise RequestError(f"{place}: {wrong}")


class _Shards:
    """The shards of a run on this machine: opened, waited for, and, by one of its processes, produced and removed."""

    def __init__(self, reader: SourceReader, cache: Path) -> None:
        self._reader, self.root = reader, cache / "streams"
        self.directory: Path | None = None  # while they are read
        self.begins = {0: Begin()}  # as far as they are known
        self._open: dict[int, TokenDataset] = {}
        self._produces = False
        self._producer: subprocess.Popen[bytes] | None = None
        self._first = 0  # the first shard that is there, or will be

    @contextmanager
    def open_reading(self, ranks: World) -> Iterator[None]:
        """Let the ranks read the shards meanwhile; all of them must enter."""
        host_root = f"{read_host_name()} {self.root}"
        leader = ranks.gather(host_root).index(host_root)
        self._produces = leader == ranks.rank
        directory = self.root / f"{read_host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        with ExitStack() as stack:
            if self._produces:
                with explain_cache_errors(self.root, CANNOT_STORE):
                    directory.mkdir(parents=True)
                    _remove_abandoned(self.root)
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                stack.enter_context(lock_directory(directory, f"{directory} is in use"))
                stack.callback(self._end)
            self.directory = Path(ranks.gather(str(directory))[leader])
            if not self.directory.is_dir():
                raise MachineError(f"{self.directory} is not on this machine; give every host a name of its own")
            try:
                yield
            finally:
                self.directory = None
                self._open.clear()

    def __getitem__(self, number: int) -> TokenDataset:
        """Return a shard, which is waited for."""
        if number not in self._open:
            self._open[number] = self._found(number) or self._await_shard(number)
        return self._open[number]

    def _await_shard(self, number: int) -> TokenDataset:
        heart = heartbeat.find_own_heartbeat()
        if heart is not None:
            heart.begin_within("waiting for tokens")
        while (shard := self._found(number)) is None:
            if self._produces:
                self._look(number)
            time.sleep(_LOOK_SECONDS)
            heartbeat.note_progress()
        if heart is not None:
            heart.end_within()
        return shard

    def _found(self, number: int) -> TokenDataset | None:
        assert self.directory is not None
        directory = self.directory / f"{number:010d}"
        if not directory.is_dir() or (shard := open_dataset(directory)) is None:  # not yet, or it is removed just now
            return None
        with suppress(OSError, ValueError):
            self.begins[number] = Begin(*json.loads((directory / "begin.json").read_text(encoding="utf-8")))
        return shard

    def _look(self, number: int) -> None:
        """Start the producer if there is none, or if it is beyond the shard; raise the error that has ended it."""
        if self._producer is None or number < self._first:
            self._start(number)
        elif self._producer.poll() is not None:
            assert self._producer.stdout is not None
            answer = self._producer.stdout.read()
            if not answer:
                raise MachineError(
                    f"the process that tokenizes {self._reader.recipe.data.name} was killed, perhaps because memory "
                    "ran out; resume the run"
                )
            raise build_error(*pickle.loads(answer))  # our own process has written it

    def _start(self, number: int) -> None:
        assert self.directory is not None
        self._end()
        for shard in self.directory.glob("[0-9]*"):
            shutil.rmtree(shard, ignore_errors=True)
        nearest = max(candidate for candidate in self.begins if candidate <= number)
        self._first = number
        self._producer = subprocess.Popen(
            [sys.executable, "-P", "-c", _PRODUCER, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=build_child_environment(),
        )
        assert self._producer.stdin is not None
        request = (self._reader, self.directory, nearest, self.begins[nearest], number)
        with suppress(BrokenPipeError):  # it has ended; its error is read later
            self._producer.stdin.write(pickle.dumps(request))
            self._producer.stdin.flush()

    def _end(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.kill()
            producer.communicate()

    def pass_by(self, passed: int, unused: int) -> None:
        """Close the shards before ``passed``, and remove those before ``unused``, which no rank has open any more."""
        self._open = {number: shard for number, shard in self._open.items() if number >= passed}
        if self._produces and self.directory is not None and self._first < unused:
            for shard in self.directory.glob("[0-9]*"):
                if int(shard.name) < unused:
                    shutil.rmtree(shard, ignore_errors=True)
            self._first = unused


@dataclass(frozen=True)
class StreamedDataset(TokenDataset):
    """The examples of sources that are read while training; `len` is the number of examples of a shard.

    The arrays are those of the first examples. They stand for all while nothing is read: in plans and checks.

    Attributes:
        first: the first examples.
        shift: tokens at the end of a sequence that are only targets.
    """

    first: TokenDataset = field(kw_only=True)
    shards: _Shards = field(kw_only=True)
    size: int = field(kw_only=True)
    shift: int = field(kw_only=True)

    def __len__(self) -> int:
        return self.size

    def _find(self, sequence: int) -> tuple[TokenDataset, int]:
        if self.shards.directory is None:
            return self.first, sequence % len(self.first)
        shard, index = divmod(sequence, self.size)
        return self.shards[shard], index

    def sequence(self, sequence: int) -> tuple[Tokens, Targets]:
        """Return ``(tokens [length + shift], targets [length + shift])`` of one sequence."""
        shard, index = self._find(sequence)
        return shard.sequence(index)

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""
        shard, index = self._find(sequence)
        return shard.sequence_length(index) - self.shift

    def sequence_targets(self, sequence: int) -> int:
        """Return the number of targets of one sequence; its first token is never one."""
        shard, index = self._find(sequence)
        return shard.sequence_targets(index)

    def example_lengths(self) -> Indices:
        """Return the number of tokens of the first examples."""
        return self.first.example_lengths() - self.shift

    def target_fraction(self, examples: Sequence[int] | Indices | None = None) -> float:
        """Return the fraction of tokens that are targets, in all or some of the first examples."""
        if examples is not None:
            return super().target_fraction(examples)
        return int(np.count_nonzero(self.targets)) / int(self.example_lengths().sum())

    def begin_of(self, position: int) -> dict[str, int]:
        """Return where the shard of a position of the stream begins, or the last one before it that is known."""
        shard = max(candidate for candidate in self.shards.begins if candidate <= position // self.size)
        return {"shard": shard, **self.shards.begins[shard]._asdict()}

    def resume(self, shard: int, **place: int) -> None:
        """Begin to tokenize at a place that ``begin_of`` has returned, in this or another run."""
        self.shards.begins[int(shard)] = Begin(**{name: int(value) for name, value in place.items()})


class _ValidationData(DataSection):
    """The validation sources of a recipe, as if they were put after one another to train on."""

    @property
    def source_keys(self) -> tuple[str, ...]:
        """Return the recipe keys of ``sources``, for messages."""
        return tuple(f"data.validation.{source.name}" if source.name else "data.validation" for source in self.sources)


def prepare_streamed(
    recipe: RecipeSchema,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    embeddings: int,
    positions: int | None,
    prepare_rows: Callable[[DataSection], PreparedData],
) -> PreparedData:
    """Return the data of a recipe with ``data.streaming``: of the rows to train on, only the first are tokenized.

    Args:
        embeddings: of the model.
        positions: the maximum number of the model, if limited.
        prepare_rows: prepares the rows of a section, here the validation sources, to train on.

    Raises:
        RequestError: a source or one of the first rows is wrong.
        MachineError: the cache cannot be written.
    """
    check_length(recipe.data, positions)
    reader = SourceReader(recipe, tokenizer, embeddings)
    train = _build_streamed(reader, cache)
    lines = [
        f"{recipe.data.name}: tokenized while training, in shards of {format_plural(len(train), 'example')}, with at "
        "most "
        f"{reader.streaming.disk_gb:g} GB of them in {train.shards.root} at a time; plans have the lengths of the "
        f"first {format_plural(len(train.first), 'example')}",
        *reader.lines(),
    ]
    rows = {name: rows for name, rows in recipe.data.validation_sets.items() if isinstance(rows, SourceSection)}
    if not rows:
        return PreparedData(train, None, lines)
    sources = [section.model_copy(update={"name": name or None}) for name, section in rows.items()]
    changes = {"train": sources, "mixing": "concatenate", "validation": None, "streaming": None, "limit": None}
    validation = prepare_rows(_ValidationData.model_construct(**{**dict(recipe.data), **changes}))
    dataset = validation.train
    sizes = count_source_examples(dataset)
    sets = {name: size for name, size in zip(rows, sizes, strict=True) if name}
    lines += [line for line in validation.summary if not line.startswith(("mixture:", "split:"))]
    lines.append(f"{format_plural(len(dataset), 'example')} for validation")
    return PreparedData(train, replace(dataset, mixture=None), lines, validation.directory, sets)


def _build_streamed(reader: SourceReader, cache: Path) -> StreamedDataset:
    recipe, tokenizer = reader.recipe, reader.tokenizer
    data = recipe.data.model_copy(update={"validation": None, "accept_omissions": False, "mixing": "weights"})
    keyed_sources = list(zip(data.sources, data.source_keys, strict=True))
    settings = {
        **select_settings(data, recipe.train.seed),
        "streamed": [_VERSION, reader.streaming.buffer_size, recipe.spec.corpus, recipe.spec.needs(recipe).full],
        "kinds": [look_up_reader(recipe, key).name for _, key in keyed_sources],
        "content": [digest_content(source, key, sampled=True) for source, key in keyed_sources],
        "tokenizer": digest_tokenizer(tokenizer),
    }
    examples = islice(reader.examples(Begin()), _SAMPLE)
    first = TokenDataset.from_examples((example[1:] for example in examples), digest_value(settings)[:32])
    return StreamedDataset(
        first.tokens,
        first.targets,
        first.offsets,
        first.fingerprint,
        {"format": reader.layout, "parts": []},
        first=first,
        shards=_Shards(reader, cache),
        size=reader.streaming.buffer_size,
        shift=int(recipe.spec.corpus),
    )


def main() -> None:
    """Produce shards until the parent process ends; write the error that has ended it to standard output."""
    for number in _ENDING:  # the run that reads the shards decides when to stop
        signal.signal(number, signal.SIG_IGN)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = pickle.load(sys.stdin.buffer)  # our own process has written it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _produce(*request)
    except TrainwrightError as error:
        pickle.dump((error.exit_code, str(error)), answer)
    except Exception as error:
        traceback.print_exc()
        message = f"tokenizing while training failed: {type(error).__name__}: {error}"
        pickle.dump((EXIT_TRAINING, message), answer)
    answer.flush()
    os._exit(EXIT_TRAINING)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_TRAINING)


def _produce(reader: SourceReader, directory: Path, start: int, begin: Begin, first: int) -> None:
    """Write the shards from ``first`` on; shard ``start``, maybe before it, begins at ``begin``."""
    examples = reader.examples(begin, max(1, detect().cpu_cores // 2))
    sizes: dict[Path, int] = {}
    reader.counts.clear()  # of the first examples, which are read again
    for number in count(start):
        part = list(islice(examples, reader.streaming.buffer_size))
        if number >= first:
            with explain_cache_errors(directory, CANNOT_STORE):
                _write(directory / f"{number:010d}", part, sizes, reader.streaming.disk_gb * 1e9)
        row = "{2:,} of source {1} in epoch {0}".format(*part[0][0])
        counts, *_ = reader.lines()
        say(f"shard {number:,} begins at row {row}, all from 0; {counts}", file=sys.stderr)


def _write(shard: Path, examples: Sequence[PlacedExample], sizes: dict[Path, int], most: float) -> None:
    """Write a shard as soon as all those that are there take at most ``most`` bytes; ``sizes`` are those so far."""
    dataset = TokenDataset.from_examples((example[1:] for example in examples), "shard")
    size = dataset.tokens.nbytes + dataset.targets.nbytes + dataset.offsets.nbytes + _FILES_BYTES
    while sum(bytes for other_shard, bytes in sizes.items() if other_shard.exists()) + size > most:
        time.sleep(_ROOM_SECONDS)
    sizes[shard] = size
    scratch = shard.with_name(f".{shard.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # of a producer that was stopped
    dataset.save(scratch)
    (scratch / "begin.json").write_text(json.dumps(examples[0][0]), encoding="utf-8")
    scratch.rename(shard)


def _remove_abandoned(root: Path) -> None:
    """Remove the directories of processes of this host that were killed."""
    for directory in root.glob(f"{read_host_name()}-*-*"):
        process = directory.name.rsplit("-", 2)[1]
        with suppress(OSError):
            if not Path(f"/proc/{process}").exists() and not is_locked(directory):
                shutil.rmtree(directory, ignore_errors=True)
