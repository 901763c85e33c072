"""The only port of a job that Trainwright opens to other machines, and the way to the stores behind it.

torch's store has no authentication, so it listens on the loopback interface of member 0 alone. Members reach it through
a port of their own loopback interface, from which a `Relay` connects to the `Door` of member 0.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from trainwright.launch.group.addresses import LOOPBACK
from trainwright.launch.group.trust.secret import BYTES, REPLY_BYTES, answer, reply
from trainwright.text import say

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
            for task in (left := asyncio.all_tasks(self._loop)):
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
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

    async def _connected(self, family: int, address: Any) -> socket.socket:
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
        received = b""
        while len(received) < size and (data := await self._loop.sock_recv(connection, size - len(received))):
            received += data
        return received

    def _drop(self, *connections: socket.socket) -> None:
        for each in connections:
            self._sockets.discard(each)
            each.close()

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
        now, refused = time.monotonic(), self._refused
        if refused == self._told or (now < self._next and not ends):
            return
        self._told, self._next, self._seconds = refused, now + self._seconds, 2 * self._seconds
        text = f"warning: connections that are not of this run were refused: {refused}, the last one from {self._last}"
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
                purpose = await self._proof(connection)
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
                await self._join(connection, await self._connected(socket.AF_INET, (LOOPBACK, purpose)))
        self._drop(connection)

    async def _proof(self, connection: socket.socket) -> int | None:
        """Return the purpose of a member's connection; None for a stranger's."""
        nonce = secrets.token_bytes(BYTES)
        await self._loop.sock_sendall(connection, nonce)
        received = await self._receive(connection, REPLY_BYTES)
        proved = answer(self._secret, nonce, received) if len(received) == REPLY_BYTES else None
        if proved is None:
            return None
        await self._loop.sock_sendall(connection, proved[1])
        return proved[0]


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
                remote.append(await self._connected(self._family, self._address))
                said, expected = reply(self._secret, await self._receive(remote[0], BYTES), port)
                await self._loop.sock_sendall(remote[0], said)
                proved = hmac.compare_digest(await self._receive(remote[0], BYTES), expected)
            if proved:
                await self._join(local, remote[0])
        self._drop(local, *remote)
