"""How processes of several machines trust each other: a job's secret, and the only port that it opens to others.

Each connection begins with a proof of the secret. The listener sends a nonce; the member answers with its own, its
purpose and an HMAC of them, and the listener with another HMAC (RFC 2104). Neither end has said anything else before,
and nothing that was recorded can be used again.

torch's store has no authentication, so it listens on the loopback interface of member 0 alone. Members reach it through
a port of their own loopback interface, from which a `Relay` connects to the `Door` of member 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.errors import MachineError
from trainwright.run.group.addresses import LOOPBACK, format_address, is_loopback
from trainwright.utils.text import say

# The secret itself, for processes without a directory that all of them share.
VARIABLE = "TRAINWRIGHT_JOB_SECRET"
BYTES = 32  # of a secret, a nonce and an HMAC
REPLY_BYTES = BYTES + 2 + BYTES
_SHORTEST = 16  # characters of the variable
_WRITE_SECONDS = 5.0  # for which another process may take between creating the file and writing it


class Unproven(Exception):
    """The listener hung up on this process's proof: it does not know the same secret."""


def read_secret(address: tuple[str, int], folder: Path) -> tuple[bytes, Path | None]:
    """Return the secret of the job that meets at ``address``, and its file, which the first of its processes creates.

    Args:
        folder: that all its machines share; not used if all processes are on this one.

    Raises:
        MachineError: the file cannot be used.
    """
    if secret := os.environ.get(VARIABLE, ""):
        if len(secret) < _SHORTEST:
            raise MachineError(f"{VARIABLE} has fewer than {_SHORTEST} characters; set it to openssl rand -hex 32")
        return hashlib.sha256(secret.encode()).digest(), None
    if is_loopback(address[0]):
        folder = Path(tempfile.gettempdir())
    digest = hashlib.sha256(f"{os.getuid()} {format_address(*address)}".encode()).hexdigest()[:20]
    file = folder / f".trainwright-secret-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(BYTES))
        return _read(file), file
    except OSError as error:
        raise MachineError(
            f"{file}, the secret of the job, cannot be used: {error.strerror}; set {VARIABLE} to the same random text "
            "for every process of the job"
        ) from None


def _read(file: Path) -> bytes:
    until = time.monotonic() + _WRITE_SECONDS
    while True:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
            state = os.fstat(stream.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
                raise MachineError(f"{file}, the secret of the job, is not this user's alone; remove it")
            content = stream.read(BYTES + 1)
        if len(content) == BYTES:
            return content
        if time.monotonic() > until:
            raise MachineError(f"{file} is no secret of a job; remove it")
        time.sleep(0.05)


def reply(secret: bytes, nonce: bytes, purpose: int) -> tuple[bytes, bytes]:
    """Return what a member answers to a listener's nonce, and what the listener has to answer to that."""
    header = secrets.token_bytes(BYTES) + purpose.to_bytes(2, "big")
    return header + _compute_mac(secret, b"member", nonce + header), _compute_mac(secret, b"listener", nonce + header)


def answer(secret: bytes, nonce: bytes, received: bytes) -> tuple[int, bytes] | None:
    """Return the purpose of a member's reply to the nonce and the listener's answer; None if it is no member's."""
    header = received[: BYTES + 2]
    if not hmac.compare_digest(received[BYTES + 2 :], _compute_mac(secret, b"member", nonce + header)):
        return None
    return int.from_bytes(header[BYTES:], "big"), _compute_mac(secret, b"listener", nonce + header)


def prove(connection: socket.socket, secret: bytes, purpose: int, until: float, meanwhile: Callable[[], None]) -> None:
    """Prove this process to the listener, and have the listener prove itself.

    ``meanwhile`` is called repeatedly, and may raise.

    Raises:
        Unproven: the listener hung up on the proof.
        OSError: the listener is another program, or too late.
    """
    nonce = _receive(connection, until, meanwhile)
    if len(nonce) < BYTES:
        raise ConnectionError("no nonce")
    answer_bytes, expected_proof = reply(secret, nonce, purpose)
    connection.sendall(answer_bytes)
    proof = _receive(connection, until, meanwhile)
    if not proof and time.monotonic() < until:
        raise Unproven
    if not hmac.compare_digest(proof, expected_proof):
        raise ConnectionError("no proof")


def _receive(connection: socket.socket, until: float, meanwhile: Callable[[], None]) -> bytes:
    """Return the next ``BYTES`` bytes; fewer if the connection has ended or it is too late."""
    buffer, before = b"", connection.gettimeout()
    connection.settimeout(0.1)
    try:
        while len(buffer) < BYTES and time.monotonic() < until:
            with suppress(TimeoutError):
                data = connection.recv(BYTES - len(buffer))
                if not data:
                    break
                buffer += data
            meanwhile()
    finally:
        connection.settimeout(before)
    return buffer


def _compute_mac(secret: bytes, role: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, b"trainwright " + role + b" " + content, "sha256")


PEERS = 0  # the purpose of a connection that carries messages; another one is the port of a store
_PROOF_SECONDS = 5.0
# Connections that have not proved anything yet; the oldest makes room for the newest, as a member takes milliseconds.
_UNPROVEN = 128
_CHUNK = 65536
_FIRST_LINE_SECONDS, _CLOSE_SECONDS = 1.0, 2.0


class _Loop:
    """Connections that a thread serves. A forked process does not have the thread, and closes its copies of them."""

    def __init__(self, name: str) -> None:
        self._sockets: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()
        os.register_at_fork(after_in_child=self._close_sockets)

    def close(self) -> None:
        """End the thread and all connections."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for task in (pending := asyncio.all_tasks(self._loop)):
                task.cancel()
            if pending:
                self._loop.run_until_complete(asyncio.wait(pending))
            self._close_sockets()
            self._loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen(self, listener: socket.socket, serve: Callable[[socket.socket, str], None]) -> None:
        listener.setblocking(False)
        self._sockets.add(listener)
        self._loop.call_soon_threadsafe(lambda: self._start(self._accept(listener, serve)))

    async def _accept(self, listener: socket.socket, serve: Callable[[socket.socket, str], None]) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError:  # no file descriptor is left, or the stranger is gone
                await asyncio.sleep(0.05)
                continue
            serve(self._prepared(connection), address[0])
            await asyncio.sleep(0)  # however many strangers wait

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        """Pass on what either end sends until both have ended."""
        await asyncio.gather(self._copy(one, other), self._copy(other, one))

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := await self._loop.sock_recv(source, _CHUNK):
                await self._loop.sock_sendall(target, data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def _open_connection(self, family: int, address: Any) -> socket.socket:
        connection = self._prepared(socket.socket(family, socket.SOCK_STREAM))
        await self._loop.sock_connect(connection, address)
        return connection

    def _prepared(self, connection: socket.socket) -> socket.socket:
        connection.setblocking(False)
        with suppress(OSError):  # the other end is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.add(connection)
        return connection

    async def _receive(self, connection: socket.socket, size: int) -> bytes:
        buffer = b""
        while len(buffer) < size and (data := await self._loop.sock_recv(connection, size - len(buffer))):
            buffer += data
        return buffer

    def _drop(self, *connections: socket.socket) -> None:
        for connection in connections:
            self._sockets.discard(connection)
            connection.close()

    def _close_sockets(self) -> None:
        self._drop(*self._sockets)


class Door(_Loop):
    """Listen as member 0, and let in who knows the secret of the job. Strangers are hung up on, and only counted.

    Attributes:
        stores: the ports of the stores on this machine that members may connect to.
    """

    def __init__(self, listener: socket.socket, secret: bytes, admit: Callable[[socket.socket], None]) -> None:
        self.stores: set[int] = set()
        self._secret, self._admit = secret, admit
        self._unproven: dict[asyncio.Task[None], None] = {}  # in their order
        self._refused, self._told, self._last = 0, 0, ""
        self._seconds, self._next = _FIRST_LINE_SECONDS, 0.0
        super().__init__("door")
        self._listen(listener, self._begin)

    def tell(self, *, ends: bool = False) -> None:
        """Write how many strangers were refused, if there are more of them and it is time to, or if the run ends."""
        now, count = time.monotonic(), self._refused
        if count == self._told or (now < self._next and not ends):
            return
        self._told, self._next, self._seconds = count, now + self._seconds, 2 * self._seconds
        text = f"warning: connections that are not of this run were refused: {count}, the last one from {self._last}"
        say(text, file=sys.stderr)

    def _begin(self, connection: socket.socket, address: str) -> None:
        if len(self._unproven) >= _UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.cancel()
        self._unproven[self._start(self._serve_one(connection, address))] = None

    async def _serve_one(self, connection: socket.socket, address: str) -> None:
        purpose: int | None = None
        try:
            async with asyncio.timeout(_PROOF_SECONDS):
                purpose = await self._check_proof(connection)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        task = asyncio.current_task()
        assert task is not None, "this is one"
        self._unproven.pop(task, None)
        if purpose == PEERS:
            self._sockets.discard(connection)
            self._admit(connection)
            return
        if purpose is None:
            self._refused, self._last = self._refused + 1, address
        elif purpose in self.stores:
            with suppress(OSError):
                await self._join(connection, await self._open_connection(socket.AF_INET, (LOOPBACK, purpose)))
        self._drop(connection)

    async def _check_proof(self, connection: socket.socket) -> int | None:
        """Return the purpose of a member's connection; None for a stranger's."""
        nonce = secrets.token_bytes(BYTES)
        await self._loop.sock_sendall(connection, nonce)
        proof = await self._receive(connection, REPLY_BYTES)
        response = answer(self._secret, nonce, proof) if len(proof) == REPLY_BYTES else None
        if response is None:
            return None
        await self._loop.sock_sendall(connection, response[1])
        return response[0]


class Relay(_Loop):
    """Connect this machine's loopback interface to the stores behind a door.

    Args:
        door: a connection to it.
    """

    def __init__(self, door: socket.socket, secret: bytes) -> None:
        self._family, self._address, self._secret = door.family, door.getpeername(), secret
        self._ports: dict[int, int] = {}
        super().__init__("relay")

    def to(self, port: int) -> int:
        """Return the port of this machine's loopback interface that leads to a store's ``port`` at member 0."""
        if port not in self._ports:
            listener = socket.create_server((LOOPBACK, 0), backlog=1024)
            self._ports[port] = listener.getsockname()[1]
            self._listen(listener, lambda local, _: self._begin(local, port))
        return self._ports[port]

    def _begin(self, local: socket.socket, port: int) -> None:
        self._start(self._pass_on(local, port))

    async def _pass_on(self, local: socket.socket, port: int) -> None:
        remote: list[socket.socket] = []
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PROOF_SECONDS):
                remote.append(await self._open_connection(self._family, self._address))
                answer_bytes, expected_proof = reply(self._secret, await self._receive(remote[0], BYTES), port)
                await self._loop.sock_sendall(remote[0], answer_bytes)
                proved = hmac.compare_digest(await self._receive(remote[0], BYTES), expected_proof)
            if proved:
                await self._join(local, remote[0])
        self._drop(local, *remote)
