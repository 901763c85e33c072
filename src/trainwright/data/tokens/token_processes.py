"""Worker processes for tokenization, each with its own pipe, so that the death of either side is noticed at once.

The pools of the standard library hang if a process is killed while it reads or writes a large piece.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from trainwright.data.rows.texts import TextPiece
from trainwright.data.tokens import token_worker
from trainwright.data.tokens.token_worker import Encoded, Encoder, Settings
from trainwright.errors import MachineError

Chunk = list[TextPiece]
Encode = Callable[[Iterable[Chunk]], Iterator[tuple[Chunk, Encoded]]]


@contextmanager
def encoding(settings: Settings, processes: int) -> Iterator[Encode]:
    """Provide a function that yields chunks with their tokens, in order, computed by ``processes`` processes.

    Raises:
        MachineError: a process was killed.
    """
    if processes == 1:
        encoder = Encoder(settings)
        yield lambda chunks: ((chunk, encoder(chunk)) for chunk in chunks)
        return
    workers = _Workers(settings, processes)
    try:
        yield workers.encode
    finally:
        workers.end()


class _Workers:
    def __init__(self, settings: Settings, most: int) -> None:
        self._settings, self._most = settings, most
        self._processes: list[BaseProcess] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}  # with the index of its chunk

    def encode(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield chunks with their tokens, in order; at most twice as many chunks as processes are in flight."""
        left, ended = iter(chunks), False
        waiting: deque[Chunk] = deque()
        found: dict[int, Encoded] = {}
        first = 0  # index of the next chunk to yield
        while True:
            while not ended and len(waiting) < 2 * self._most and self._free():
                if (chunk := next(left, None)) is None:
                    ended = True
                else:
                    self._give(first + len(waiting), chunk)
                    waiting.append(chunk)
            if first in found:
                yield waiting.popleft(), found.pop(first)
                first += 1
            elif waiting:
                found.update(self._finished())
            else:
                return

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        for connection in (*self._idle, *self._busy):
            connection.close()

    def _free(self) -> bool:
        return bool(self._idle) or len(self._processes) < self._most

    def _give(self, number: int, chunk: Chunk) -> None:
        if not self._idle:
            self._idle.append(self._started())
        connection = self._idle.pop()
        self._busy[connection] = number
        try:
            connection.send([tuple(piece) for piece in chunk])
        except OSError as error:
            raise _lost() from error

    def _finished(self) -> Iterator[tuple[int, Encoded]]:
        for connection in wait(list(self._busy)):
            assert isinstance(connection, Connection)
            try:
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise _lost() from error
            if isinstance(answer, Exception):
                raise answer
            self._idle.append(connection)
            yield self._busy.pop(connection), answer

    def _started(self) -> Connection:
        # Spawn, because a fork would copy this process's locked locks without its threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=token_worker.work, args=(self._settings, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours


def _lost() -> MachineError:
    return MachineError(
        "a tokenizing process was killed, perhaps because memory ran out; run the same command again to continue, "
        "with fewer --processes to use less memory"
    )
