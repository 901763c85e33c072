"""Tokenize text into shards on several cores, for ``trainwright data tokenize`` and for pretraining.

One process reads the text in pieces, in order; others tokenize them; the first writes the tokens in order. The number
of pieces in flight is limited, so memory does not grow with the text. Every few seconds the number of pieces written is
saved, and a run that was killed resumes from there: later tokens are truncated and written again.

A thread per process passes it pieces over a pipe of its own: the process pools of the standard library hang if a
process is killed while it writes a large result to their common queue.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainwright.data.rows.texts import TextPiece, iterate_pieces, list_end_texts
from trainwright.data.sources.shards import ABOUT, INDEX, VERSION, describe_tokenizer, fingerprint_tokenizer
from trainwright.data.tokens import token_worker
from trainwright.data.tokens.token_worker import Encoded, Encoder, Settings
from trainwright.errors import MachineError, RequestError
from trainwright.machine.sharing import LOCK, lock_directory, remove_locked
from trainwright.recipe.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.data import SourceSection


SHARD_TOKENS = 100_000_000
_PROGRESS = "progress.json"
_CHUNK = 2**20  # characters that a process gets at a time
_SAVE_SECONDS = 3.0
_COPY = 2**22

ReportProgress = Callable[[int, int, int], None]  # characters, tokens and documents so far


@dataclass
class Position:
    """The state on disk: pieces written, finished shards, and the size of the shard being written."""

    pieces: int = 0
    documents: int = 0
    characters: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    index: int = 0


def tokenize(
    sources: Sequence[tuple[SourceSection, str]],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    identity: Any,
    processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    report: ReportProgress = lambda characters, tokens, documents: None,
) -> dict[str, Any]:
    """Write the token shards of ``sources`` into ``out``, or resume an interrupted call; return the corpus description.

    Args:
        sources: pairs of a source and the recipe key that names it in messages.
        identity: a value that changes whenever the sources or their content change.

    Raises:
        RequestError: ``out`` has other files or shards of other text, another process writes there, or a source is
            empty or not text.
        MachineError: a worker process was killed.
        OSError: ``out`` cannot be written.
    """
    fingerprint = fingerprint_tokenizer(tokenizer)
    task = hashlib.sha256(json.dumps([identity, fingerprint, shard_tokens], default=str).encode()).hexdigest()
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out: {out} is a file; choose a directory")
    new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(
        out, f"--out: {out} is being written by another process; wait for it, or choose another directory"
    ):
        if (manifest := _read_finished(out, task)) is not None:
            return manifest
        settings = build_settings(tokenizer)
        writer = _Writer(out, task, settings.dtype, shard_tokens)
        notes: list[str] = []
        text = (piece for source, key in sources for piece in iterate_pieces(source, key, notes))
        pending = islice(text, writer.position.pieces, None)
        try:
            with open_encoder(settings, processes) as encode:
                for chunk, encoded_chunk in encode(iterate_chunks(pending)):
                    writer.add(chunk, encoded_chunk)
                    report(writer.position.characters, writer.tokens, writer.position.documents)
        except RequestError:
            if writer.discard_empty() and new:
                remove_locked(out)
            raise
        made_by = {"name": describe_tokenizer(tokenizer), "fingerprint": fingerprint, "vocabulary": len(tokenizer)}
        about = {
            "version": VERSION,
            "source": " + ".join(source.source for source, _ in sources),
            "tokenizer": made_by,
            "dtype": settings.dtype,
            "task": task,
            "notes": notes,
        }
        return writer.finish(about)


def build_settings(tokenizer: PreTrainedTokenizerBase) -> Settings:
    """Return the settings of a tokenizer for worker processes, with its special tokens around a document."""
    backend: Any = tokenizer.backend_tokenizer
    end = tokenizer.eos_token_id
    prefix = [token for token in backend.encode("", add_special_tokens=True).ids if token != end]
    return Settings(
        backend=backend.to_str(),
        dtype=np.min_scalar_type(max(tokenizer.get_vocab().values())).name,
        prefix=tuple(prefix),
        suffix=() if end is None else (int(end),),
        ends=list_end_texts(tokenizer),
        characters=bool(tokenizer.init_kwargs.get("characters")),
    )


def _read_finished(out: Path, task: str) -> dict[str, Any] | None:
    """Return the description of finished shards in ``out``, or None if they are not finished."""
    if (out / ABOUT).is_file():
        about = read_json(out / ABOUT)
        if isinstance(about, dict) and about.get("task") == task:
            return about
        raise RequestError(f"--out: {out} has shards of another text or tokenizer; choose a new directory")
    if not (out / _PROGRESS).is_file() and any(path.name != LOCK for path in out.iterdir()):
        raise RequestError(f"--out: {out} has other files; choose a new directory")
    return None


class _Writer:
    """Appends tokens to shards, in order, and saves the position."""

    def __init__(self, out: Path, task: str, dtype: str, shard_tokens: int) -> None:
        self._out, self._task = out, task
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self.position = self._earlier()
        self._note()  # first, so that a later call recognizes the files as an unfinished corpus
        self._open()

    @property
    def tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.position.shards) + self.position.tokens

    def _earlier(self) -> Position:
        file = self._out / _PROGRESS
        if not file.is_file():
            return Position()
        progress = read_json(file)
        if not isinstance(progress, dict) or not progress.keys() >= {"task", "pieces"}:
            raise RequestError(f"--out: {file} does not say how far the text is tokenized; remove {self._out}")
        task = progress.pop("task")
        if not progress["pieces"]:
            return Position()
        if task != self._task:
            raise RequestError(
                f"--out: {self._out} has unfinished shards of another text, tokenizer or shard size; choose a new "
                "directory, or remove it"
            )
        return Position(**progress)

    def _open(self) -> None:
        """Open the files of the shard being written, truncated to the saved length."""
        name = f"{len(self.position.shards):05d}"
        width = self._dtype.itemsize
        self._tokens = _open_resized(self._out / f"{name}.tokens", self.position.tokens * width)
        self._index = _open_resized(self._out / f"{name}.index", self.position.index * INDEX.itemsize)
        self._document = hashlib.blake2b(digest_size=8)
        start = 0  # start of the unfinished document
        if self.position.index:
            self._index.seek(-INDEX.itemsize, os.SEEK_END)
            start = int(np.frombuffer(self._index.read(INDEX.itemsize), INDEX)["end"][0])
        self._tokens.seek(start * width)
        while part := self._tokens.read(_COPY):
            self._document.update(part)

    def add(self, chunk: Sequence[TextPiece], encoded: Encoded) -> None:
        tokens, lengths = encoded
        width, begin = self._dtype.itemsize, 0
        for piece, length in zip(chunk, lengths, strict=True):
            part = tokens[begin : begin + length * width]
            begin += length * width
            self._tokens.write(part)
            self._document.update(part)
            self.position.tokens += length
            self.position.pieces += 1
            self.position.characters += len(piece.text)
            if piece.last:
                self._end_document()
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._flush()
            self._note()

    def _end_document(self) -> None:
        record = np.zeros(1, INDEX)
        record["end"] = self.position.tokens
        record["digest"] = int.from_bytes(self._document.digest(), "little")
        self._index.write(record.tobytes())
        self._document = hashlib.blake2b(digest_size=8)
        self.position.index += 1
        self.position.documents += 1
        if self.position.tokens >= self._shard_tokens:
            self._end_shard()
            self._open()

    def _end_shard(self) -> None:
        name = f"{len(self.position.shards):05d}"
        self._flush()
        self._close()
        self.position.shards.append({"name": name, "tokens": self.position.tokens, "documents": self.position.index})
        self.position.tokens = self.position.index = 0
        self._note()

    def _flush(self) -> None:
        for file in (self._tokens, self._index):
            file.flush()
            os.fsync(file.fileno())

    def discard_empty(self) -> bool:
        """Remove the files if no piece was saved to resume from; return whether they were removed."""
        if self._noted:
            return False
        self._close(remove=True)
        (self._out / _PROGRESS).unlink()
        return True

    def _close(self, remove: bool = False) -> None:
        for file in (self._tokens, self._index):
            file.close()
            if remove:
                Path(file.name).unlink()

    def _note(self) -> None:
        _replace(self._out / _PROGRESS, json.dumps({"task": self._task, **asdict(self.position)}))
        self._noted = self.position.pieces
        self._saved = time.monotonic()

    def finish(self, about: dict[str, Any]) -> dict[str, Any]:
        """Close the shards and write the corpus description."""
        if self.position.index:
            self._end_shard()
        else:
            self._close(remove=True)
        digest = hashlib.sha256(about["tokenizer"]["fingerprint"].encode())
        for shard in self.position.shards:
            for kind in ("tokens", "index"):
                with (self._out / f"{shard['name']}.{kind}").open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        about |= {
            "documents": self.position.documents,
            "tokens": self.tokens,
            "characters": self.position.characters,
            "shards": self.position.shards,
            "fingerprint": digest.hexdigest()[:32],
        }
        _replace(self._out / ABOUT, json.dumps(about, indent=1) + "\n")
        (self._out / _PROGRESS).unlink(missing_ok=True)
        return about


def _replace(file: Path, text: str) -> None:
    scratch = file.with_name(f"{file.name}.new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def _open_resized(file: Path, size: int) -> BinaryIO:
    stream = file.open("r+b" if file.exists() else "w+b")
    stream.truncate(size)
    stream.seek(size)
    return stream


def iterate_chunks(text: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield pieces in lists that a process gets at a time."""
    chunk: list[TextPiece] = []
    size = 0
    for piece in text:
        chunk.append(piece)
        size += len(piece.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


Chunk = list[TextPiece]
Encode = Callable[[Iterable[Chunk]], Iterator[tuple[Chunk, Encoded]]]


@contextmanager
def open_encoder(settings: Settings, processes: int) -> Iterator[Encode]:
    """Provide a function that yields chunks with their tokens, in order, computed by ``processes`` processes.

    Raises:
        MachineError: a process was killed.
    """
    if processes == 1:
        encoder = Encoder(settings)
        yield lambda chunks: ((chunk, encoder(chunk)) for chunk in chunks)
        return
    # Spawn, because a fork would copy this process's locked locks without its threads.
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    local = threading.local()

    def start() -> None:
        local.connection, theirs = context.Pipe()
        process = context.Process(target=token_worker.work, args=(settings, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append(process)

    def ask(chunk: Chunk) -> Encoded:
        try:
            local.connection.send([tuple(piece) for piece in chunk])
            answer: Encoded | Exception = local.connection.recv()
        except (EOFError, OSError) as error:
            raise MachineError(
                "a tokenizing process was killed, perhaps because memory ran out; run the same command again to "
                "continue, with fewer --processes to use less memory"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def encode(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in chunks:
            pending.append((chunk, threads.submit(ask, chunk)))
            if len(pending) == 2 * processes:
                first, future = pending.popleft()
                yield first, future.result()
        yield from ((chunk, future.result()) for chunk, future in pending)

    with ThreadPoolExecutor(processes, initializer=start) as threads:
        try:
            yield encode
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in workers:
                process.terminate()
                process.join()
