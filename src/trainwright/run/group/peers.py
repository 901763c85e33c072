"""Connections between the processes of a run, independent of collectives, to notice at once when one is gone.

A star of sockets around peer 0. A process that dies loses its connection, and the kernel informs the others; a machine
that vanishes is detected by TCP's keep-alive (tcp(7)) within 20 s. No heartbeat is needed, so a process that is busy
for long is never taken for dead.

Each connection begins with the proof of `trust`, and belongs to one peer from its first message on: whose a message is
says the connection, never the message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.run.group.trust import PEERS, Door, Relay, Unproven, prove
from trainwright.utils.text import say

Message = dict[str, Any]

GONE = "gone"  # a peer ended without notice; created here, never sent by the peer itself
_DIRECT = "direct"
_HELLO, _BYE, _WELCOME, _REFUSED = "hello", "bye", "welcome", "refused"
_SEND_SECONDS = 5.0
# How long a listener may take to answer as peer 0 of this job; an earlier job may still be ending.
ANSWER_SECONDS = 8.0
_FIRST_SECONDS = 10.0
_RECEIVE, _LONGEST = 65536, 2**24  # bytes; of a message, which may have the failures of all ranks of a node


@dataclass
class _Line:
    """One connection and its incomplete message."""

    socket: socket.socket
    peer: int | None = None  # unknown until its first message
    pending: bytes = b""
    outgoing: bytearray = field(default_factory=bytearray)  # what the socket's buffer had no room for
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)

    def receive(self) -> bool:
        """Read available data into `messages`; return False when the connection has ended."""
        try:
            data = self.socket.recv(_RECEIVE)
        except BlockingIOError:  # it was ready to be written to
            return True
        except OSError:
            return False
        self.pending += data
        *lines, self.pending = self.pending.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict) and isinstance(message.get("kind"), str):
                    self.messages.append(message)
        return bool(data) and len(self.pending) <= _LONGEST

    def send(self, message: Message) -> None:
        self.outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what there is room for; the rest, of which a peer that does not read may leave much, waits."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # receiving tells that the connection has ended
            self.outgoing.clear()


@dataclass(frozen=True)
class Membership:
    """Which member of a group this process is, and where the group meets.

    Attributes:
        index: of this member, of ``count``.
        address: host and port of member 0.
        seconds: how long the members wait for each other.
        patience: seconds that the process listening at ``address`` may take to answer as member 0.
    """

    index: int
    count: int
    address: tuple[str, int]
    seconds: float
    patience: float = ANSWER_SECONDS


class PeerUnreachable(Exception):
    """Nothing listens there; the reason is in the message."""


class NotPeerZero(Exception):
    """The listener is not peer 0 of this job: it is of another job, with other ``differs``, or another program."""

    def __init__(self, differs: list[str] | None) -> None:
        super().__init__()
        self.differs = differs


class Peers:
    """The connections of this process: to all others for peer 0, to peer 0 for the others.

    Use `host` or `join`. A message is a dictionary with a "kind"; "peer" is added, the index of the sender.

    Attributes:
        job: what every peer has to present.
        welcome: what peer 0 sends to each peer that joins.
        files: what peer 0 removes when it leaves, such as the one of the secret.
    """

    def __init__(self, index: int, job: Job, size: int) -> None:
        self.index = index
        self.job = job
        self._size = size
        self.port = 0
        self.welcome: Message = {}
        self._members = {0}
        self._door: Door | None = None  # of peer 0
        self._relay: Relay | None = None  # of the others
        self.files: list[Path] = []
        self._arrivals: deque[socket.socket] = deque()
        self._lines: list[_Line] = []
        self._history: list[Message] = []  # for peers that join late
        self._lock = threading.RLock()
        self._wake = os.pipe()
        self._closed = False
        os.register_at_fork(after_in_child=self._close_in_child)

    @classmethod
    def host(cls, listener: socket.socket, job: Job, size: int, secret: bytes) -> Peers:
        """Return peer 0 of ``size``, listening at ``listener``."""
        peers = cls(0, job, size)
        peers.port = listener.getsockname()[1]
        peers._door = Door(listener, secret, peers._arrive)
        return peers

    @classmethod
    def join(
        cls,
        member: Membership,
        job: Job,
        secret: Callable[[], bytes],
        meanwhile: Callable[[], None] = lambda: None,
        failing: Callable[[str], None] = lambda reason: None,
    ) -> Peers:
        """Return any other peer after peer 0 has accepted it; `welcome` is what peer 0 sent.

        `secret` is called at each attempt, as an earlier job at the same place may just have ended. `meanwhile` is
        called repeatedly, and may raise; so is `failing`, with the reason why the port cannot be reached.

        Raises:
            PeerUnreachable: nothing listened there for `member.seconds`.
            NotPeerZero: the listener is not peer 0 of this job, or already has this peer.
            Unproven: the listener has another secret.
        """
        peers = cls(member.index, job, member.count)
        deadline, answered_by = time.monotonic() + member.seconds, None
        reason: Unproven | NotPeerZero = NotPeerZero(None)
        while True:
            try:
                line = _Line(_connect(*member.address), peer=0)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerUnreachable(error.strerror or str(error)) from None
                failing(error.strerror or str(error))
            else:
                answered_by = answered_by or time.monotonic() + member.patience
                current_secret = secret()
                try:
                    prove(line.socket, current_secret, PEERS, answered_by, meanwhile)
                    line.send({"kind": _HELLO, "peer": member.index, "job": job})
                    answer = _await_answer(line, answered_by, meanwhile)
                    if answer.get("kind") == _WELCOME:
                        peers.welcome = answer
                        peers._lines.append(line)
                        peers._relay = Relay(line.socket, current_secret)
                        return peers
                    reason = NotPeerZero(answer.get("differs"))
                except Unproven as error:
                    reason = error
                except OSError:  # it ended, or is another program
                    pass
                line.socket.close()
            if answered_by is not None and time.monotonic() > answered_by:
                raise reason
            meanwhile()
            time.sleep(0.2)

    def send(self, kind: str, **content: Any) -> None:
        """Send to all others. Messages that cannot be delivered are dropped."""
        self._send({"kind": kind, "peer": self.index, **content}, origin=None)

    def send_direct(self, kind: str, **content: Any) -> None:
        """Send to those that are connected now: from peer 0 to all others, from another one to peer 0 only."""
        self._send({"kind": kind, "peer": self.index, _DIRECT: True, **content}, origin=None)

    def open_to_members(self, port: int) -> None:
        """Let the others connect to the store at this port of the loopback interface, as peer 0."""
        assert self._door is not None, "of peer 0"
        self._door.stores.add(port)

    def reach(self, port: int) -> int:
        """Return the port of this machine's loopback interface at which a store of peer 0 is."""
        return port if self._relay is None else self._relay.to(port)

    def list_connected(self) -> set[int]:
        """Return the peers that are connected to this one."""
        with self._lock:
            return {line.peer for line in self._lines if line.peer is not None}

    def drop(self, peer: int, kind: str) -> None:
        """Take a peer for gone, as peer 0; it finds a message of this kind should it read again."""
        with self._lock:
            for line in [line for line in self._lines if line.peer == peer]:
                line.send({"kind": kind, "peer": self.index})
                self._drop(line)
                self._send({"kind": GONE, "peer": peer}, origin=line)

    def forget(self) -> None:
        """Keep the messages so far from peers that join later."""
        with self._lock:
            self._history.clear()

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Return the messages of the others, waiting up to `seconds` for the first."""
        with self._lock:
            if self._closed:
                return []
            out = {True: select.POLLIN | select.POLLOUT, False: select.POLLIN}
            event_masks: dict[Any, int] = {line.socket: out[bool(line.outgoing)] for line in self._lines}
            event_masks[self._wake[0]] = select.POLLIN
            if self._door is not None:
                self._door.tell()
            if any(line.messages for line in self._lines):  # they arrived with the welcome
                seconds = 0
        poller = select.poll()
        for descriptor, events in event_masks.items():
            with contextlib.suppress(ValueError):  # closed meanwhile
                poller.register(descriptor, events)
        ready = {number for number, _ in poller.poll(seconds * 1000)}
        with self._lock:
            return [] if self._closed else self._read(ready)

    def close(self) -> None:
        """Leave in a way that the others do not take for a death."""
        with self._lock:
            if self._closed:
                return
            self.send(_BYE)
            self._closed = True
            os.write(self._wake[1], b"x")
            until = time.monotonic() + _SEND_SECONDS
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.socket.settimeout(max(0.01, until - time.monotonic()))
                    line.socket.sendall(line.outgoing)
                    line.socket.shutdown(socket.SHUT_WR)
                line.socket.close()
            if self._door is not None:
                self._door.tell(ends=True)
            for file in self.files:  # before the port is free for another job, which may need the one of the secret
                file.unlink(missing_ok=True)
            for endpoint in (self._door, self._relay):
                if endpoint is not None:
                    endpoint.close()

    def watch(self, react: Callable[[Message], None]) -> None:
        """Call `react` with every message from now on, in a separate thread."""

        def follow() -> None:
            while not self._closed:
                for message in self.poll(1.0):
                    react(message)

        threading.Thread(target=follow, daemon=True, name="peers").start()

    def _read(self, ready: set[int]) -> list[Message]:
        if self._wake[0] in ready:
            os.read(self._wake[0], _RECEIVE)
            while self._arrivals:
                connection = self._arrivals.popleft()
                _keep_alive(connection)
                self._lines.append(_Line(connection))
        messages: list[Message] = []
        for line in [line for line in self._lines if line.socket.fileno() in ready or line.messages]:
            line.flush()
            alive = line.socket.fileno() not in ready or line.receive()
            for message in line.messages:
                messages += self._handle(line, message)
            line.messages.clear()
            if not alive and line in self._lines:
                self._drop(line)
                if line.peer is not None:
                    gone = {"kind": GONE, "peer": line.peer}
                    self._send(gone, origin=line)
                    messages.append(gone)
        return messages

    def _handle(self, line: _Line, message: Message) -> list[Message]:
        if line.peer is None:
            differs = self._list_differences(message)
            if differs:
                line.send({"kind": _REFUSED, "differs": differs})
                self._drop(line)
                return []
            line.peer = int(message["peer"])
            self._members.add(line.peer)
            line.send({"kind": _WELCOME, **self.welcome})
            for earlier in self._history:
                line.send(earlier)
            return []
        if message.get("kind") == _BYE:
            if self._door is not None or message.get("peer") == 0:
                self._drop(line)
            return []
        if self._door is not None:
            if message["kind"] == GONE:
                return []
            message["peer"] = line.peer
        elif not self._is_peer(message.get("peer")):
            return []
        if not message.get(_DIRECT):
            self._send(message, origin=line)
        return [message]

    def _list_differences(self, message: Message) -> list[str]:
        """Return how the sender differs from this job; empty if it belongs to it."""
        job, peer = message.get("job"), message.get("peer")
        if message["kind"] != _HELLO or not isinstance(job, dict) or not self._is_peer(peer):
            return ["program"]
        different_keys = [key for key in dict.fromkeys([*self.job, *job]) if self.job.get(key) != job.get(key)]
        return different_keys or (["member"] if peer in self._members else [])

    def _is_peer(self, index: object) -> bool:
        return type(index) is int and 0 <= index < self._size

    def _send(self, message: Message, origin: _Line | None) -> None:
        with self._lock:
            if self._door is not None and not message.get(_DIRECT):
                self._history.append(message)
            elif self._door is None and origin is not None:
                return  # only peer 0 forwards messages
            before = self._count_waiting()
            for line in self._lines:
                if line is not origin and line.peer is not None:
                    line.send(message)
            if self._count_waiting() > before:
                os.write(self._wake[1], b"x")  # for a thread that polls, and does not know of it

    def _count_waiting(self) -> int:
        return sum(bool(line.outgoing) for line in self._lines)

    def _arrive(self, connection: socket.socket) -> None:
        """Take a connection of a member, in the door's thread."""
        self._arrivals.append(connection)
        os.write(self._wake[1], b"x")

    def _drop(self, line: _Line) -> None:
        self._lines.remove(line)
        if line.peer:
            self._members.discard(line.peer)  # it may come back
        line.socket.close()

    def _close_in_child(self) -> None:
        """Close inherited connections in a forked child: a copy would keep them open after their owner's death."""
        self._closed = True
        for connection in (*(line.socket for line in self._lines), *self._arrivals):
            connection.close()


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_SEND_SECONDS)
    _keep_alive(connection)
    return connection


def _await_answer(line: _Line, until: float, meanwhile: Callable[[], None]) -> Message:
    """Return the first message on a line; empty if none arrived in time."""
    poller = select.poll()
    poller.register(line.socket, select.POLLIN)
    while not line.messages and time.monotonic() < until:
        if poller.poll(100) and not line.receive():
            break
        meanwhile()
    return line.messages.pop(0) if line.messages else {}


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(_SEND_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20000)):
        if hasattr(socket, name):  # not available on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Names of one job by a scheduler or launcher, the same in all of its processes.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "TORCHELASTIC_RUN_ID")


Job = dict[str, str]


# Descriptions of the fields in which two jobs differ.
JOB_DIFFERENCES = {
    "user": "another user's",
    "job": "another job's",
    "size": "of another size",
    "arguments": "of another recipe",
}


def build_job(
    size: int, arguments: Sequence[str] = (), start: str | None = None, variables: Mapping[str, str] | None = None
) -> Job:
    """Return what all members of a start have in common.

    Args:
        size: the number of members.
        arguments: of the command line, if they must be the same for all.
        start: the launcher's own name for this start.
    """
    environment = os.environ if variables is None else variables
    ids = [environment[name] for name in _JOB_IDS if environment.get(name)]
    return {
        "user": str(os.getuid()),
        "job": _digest([*ids, start or ""]),
        "size": str(size),
        "arguments": _digest(list(arguments)),
    }


def _digest(values: list[str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:20]


class Waiting:
    """Call ``tell`` repeatedly: it writes a line after 10 s, and then after twice as long each time.

    Args:
        who: this process, such as "rank 1".
        seconds: how long it waits at most; None: without limit.
    """

    def __init__(self, who: str, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._who, self._seconds, self._clock = who, seconds, clock
        self._started_at = clock()
        self._next = _FIRST_SECONDS

    def tell(self, what: Callable[[], str]) -> None:
        """Write that ``what`` is waited for, if it is time to."""
        seconds = self._clock() - self._started_at
        if seconds < self._next:
            return
        self._next += 2 * seconds
        until = "" if self._seconds is None else f"; --rendezvous-timeout ends this after {self._seconds:g} s"
        say(f"{self._who} has been waiting for {what()} for {seconds:.0f} s{until}", file=sys.stderr)
