"""The secret of a job, and the proof with which the two ends of a connection begin.

The listener sends a nonce; the member answers with its own, its purpose and an HMAC of them, and the listener with
another HMAC (RFC 2104). Neither end has said anything else before, and nothing that was recorded can be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainwright.errors import MachineError
from trainwright.launch.group.addresses import in_words, is_loopback

# The secret itself, for processes without a directory that all of them share.
VARIABLE = "TRAINWRIGHT_JOB_SECRET"
BYTES = 32  # of a secret, a nonce and an HMAC
REPLY_BYTES = BYTES + 2 + BYTES
_SHORTEST = 16  # characters of the variable
_WRITE_SECONDS = 5.0  # for which another process may take between creating the file and writing it


class Unproven(Exception):
    """The listener hung up on this process's proof: it does not know the same secret."""


def secret_of(place: tuple[str, int], folder: Path) -> tuple[bytes, Path | None]:
    """Return the secret of the job that meets at ``place``, and its file, which the first of its processes creates.

    Args:
        folder: that all its machines share; not used if all processes are on this one.

    Raises:
        MachineError: the file cannot be used.
    """
    if given := os.environ.get(VARIABLE, ""):
        if len(given) < _SHORTEST:
            raise MachineError(f"{VARIABLE} has fewer than {_SHORTEST} characters; set it to openssl rand -hex 32")
        return hashlib.sha256(given.encode()).digest(), None
    if is_loopback(place[0]):
        folder = Path(tempfile.gettempdir())
    digest = hashlib.sha256(f"{os.getuid()} {in_words(*place)}".encode()).hexdigest()[:20]
    file = folder / f".trainwright-secret-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as created:
                created.write(secrets.token_bytes(BYTES))
        return _read(file), file
    except OSError as error:
        raise MachineError(
            f"{file}, the secret of the job, cannot be used: {error.strerror}; set {VARIABLE} to the same random text "
            "for every process of the job"
        ) from None


def _read(file: Path) -> bytes:
    until = time.monotonic() + _WRITE_SECONDS
    while True:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            state = os.fstat(opened.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
                raise MachineError(f"{file}, the secret of the job, is not this user's alone; remove it")
            content = opened.read(BYTES + 1)
        if len(content) == BYTES:
            return content
        if time.monotonic() > until:
            raise MachineError(f"{file} is no secret of a job; remove it")
        time.sleep(0.05)


def reply(secret: bytes, nonce: bytes, purpose: int) -> tuple[bytes, bytes]:
    """Return what a member answers to a listener's nonce, and what the listener has to answer to that."""
    said = secrets.token_bytes(BYTES) + purpose.to_bytes(2, "big")
    return said + _mac(secret, b"member", nonce + said), _mac(secret, b"listener", nonce + said)


def answer(secret: bytes, nonce: bytes, received: bytes) -> tuple[int, bytes] | None:
    """Return the purpose of a member's reply to the nonce and the listener's answer; None if it is no member's."""
    said = received[: BYTES + 2]
    if not hmac.compare_digest(received[BYTES + 2 :], _mac(secret, b"member", nonce + said)):
        return None
    return int.from_bytes(said[BYTES:], "big"), _mac(secret, b"listener", nonce + said)


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
    said, expected = reply(secret, nonce, purpose)
    connection.sendall(said)
    received = _receive(connection, until, meanwhile)
    if not received and time.monotonic() < until:
        raise Unproven
    if not hmac.compare_digest(received, expected):
        raise ConnectionError("no proof")


def _receive(connection: socket.socket, until: float, meanwhile: Callable[[], None]) -> bytes:
    """Return the next ``BYTES`` bytes; fewer if the connection has ended or it is too late."""
    received, before = b"", connection.gettimeout()
    connection.settimeout(0.1)
    try:
        while len(received) < BYTES and time.monotonic() < until:
            with suppress(TimeoutError):
                data = connection.recv(BYTES - len(received))
                if not data:
                    break
                received += data
            meanwhile()
    finally:
        connection.settimeout(before)
    return received


def _mac(secret: bytes, role: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, b"trainwright " + role + b" " + content, "sha256")
