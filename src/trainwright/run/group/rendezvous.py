"""Rendezvous of the processes or machines of a run, at a store that index 0 hosts or the launcher has opened.

The launcher or the user names a port, and the error for a port in use names it. Of ranks that another launcher has
started without a known address, rank 0 chooses a port, and announces it in the launcher's store, or, on one machine
without such a store, in a small file of this user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore

from trainwright.errors import FaultError, MachineError
from trainwright.run.group.addresses import LOOPBACK, format_address, resolve_own_address
from trainwright.run.group.environment import LaunchEnvironment
from trainwright.run.group.peers import (
    JOB_DIFFERENCES,
    Job,
    Membership,
    Message,
    NotPeerZero,
    Peers,
    PeerUnreachable,
    Waiting,
    build_job,
)
from trainwright.run.group.trust import VARIABLE, Unproven, read_secret
from trainwright.run.run_directory import RUNS

_STORE_TIMEOUT = timedelta(minutes=15)
POLL_SECONDS = 0.1

_PREPARED = "prepared"


class Rendezvous:
    """The members of a start, counted from 0: ranks or nodes. Member 0 collects, checks and decides.

    Attributes:
        store: of member 0, for further use, such as a process group.
        peers: reports at once when a member is gone.
        early: messages of the others that arrived while member 0 waited for all of them.
    """

    def __init__(self, noun: str, member: Membership, store: TCPStore, peers: Peers) -> None:
        self.noun, self.index, self.count = noun, member.index, member.count
        self.address, self.port = member.address
        self.store, self.peers = store, peers
        self._keys = PrefixStore(f"trainwright/{noun}", store)
        self.early: list[Message] = []

    def host_store(self) -> TCPStore:
        """Return a new store on this machine, which is member 0's, that the other members can reach."""
        store = host_store()
        self.peers.open_to_members(int(store.port))
        return store

    def listen(self) -> None:
        """Accept connections of other members; member 0 calls this while it waits."""
        self.early += self.peers.poll()

    def publish(self, key: str, value: Any) -> None:
        """Set ``key`` for all members to read."""
        self._keys.set(key, json.dumps(value))

    def is_published(self, key: str) -> bool:
        """Return whether a member has set ``key``."""
        return bool(self._keys.check([key]))

    def wait_for(self, key: str, meanwhile: Callable[[], None] = lambda: None, seconds: float | None = None) -> Any:
        """Return the value published under `key`; wait without limit if `seconds` is None.

        `meanwhile` is called repeatedly, and may raise. Raises FaultError if the store is gone, TimeoutError.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                if self._keys.check([key]):
                    return json.loads(self._keys.get(key))
            except RuntimeError as error:  # torch's DistNetworkError is one
                raise FaultError(f"{self.noun} 0 is gone; see its output") from error
            meanwhile()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(POLL_SECONDS)

    def post(self, value: Any) -> None:
        """Publish this member's description for member 0's `gather`."""
        self.publish(f"member/{self.index}", value)

    def gather(
        self,
        seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
        enough: Callable[[int], bool] = lambda number: False,
    ) -> dict[int, Any]:
        """Return what every member has posted, by its index; after `seconds` those that came, if they are enough.

        Raises MachineError naming those that did not arrive in time.
        """
        deadline, waiting = time.monotonic() + seconds, Waiting(f"{self.noun} {self.index}", seconds)

        def wait() -> None:
            meanwhile()
            waiting.tell(lambda: f"{self._missing()} at {format_address(self.address, self.port)}")

        members: dict[int, Any] = {}
        for index in range(self.count):
            remaining = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                members[index] = self.wait_for(f"member/{index}", wait, remaining)
        if len(members) < self.count and not enough(len(members)):
            raise MachineError(
                f"{self.count - len(members)} of {self.count} {self.noun}s did not come to "
                f"{format_address(self.address, self.port)} within {seconds:g} s: {self._missing()}; start them, or "
                "increase "
                "--rendezvous-timeout"
            )
        return members

    def leave(self) -> None:
        """Tell member 0 that this member no longer needs the store."""
        self._keys.add("left", 1)

    def wait_until_left(self, seconds: float) -> None:
        """Wait at most `seconds` for the others' `leave`; for member 0, which hosts the store."""
        deadline = time.monotonic() + seconds
        while self._keys.add("left", 0) < self.count - 1 and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close the connections to the other members."""
        self.peers.close()

    def _missing(self) -> str:
        missing = [str(i) for i in range(self.count) if not self._keys.check([f"member/{i}"])]
        return f"{self.noun}{'s' * (len(missing) > 1)} {', '.join(missing)}"


def meet(
    noun: str, member: Membership, job: Job, fix: str, meanwhile: Callable[[], None] = lambda: None, shared: Path = RUNS
) -> Rendezvous:
    """Meet the other members. Strangers and members of other jobs are rejected before the store.

    `noun`: what a member is, in messages. `shared`: a directory that all members see, for the secret of the job.

    Raises:
        MachineError: another program or another job uses the port; it ends with `fix`.
        FaultError: member 0 does not know the same secret.
    """
    address, port = member.address
    # torch looks up a name for the address of every connection (torch/csrc/distributed/c10d/socket.cpp), which by
    # default takes 10 s each if no DNS server answers (resolv.conf(5)).
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    if member.index == 0:
        listener = _listen(address, port, fix, member.seconds, meanwhile)
        return build_host_rendezvous(noun, member, job, listener, shared)
    waiting, address_text = Waiting(f"{noun} {member.index}", member.seconds), format_address(address, port)

    def tell(reason: str) -> None:
        waiting.tell(lambda: f"{noun} 0 at {address_text} ({reason})")

    try:
        peers = Peers.join(member, job, lambda: read_secret(member.address, shared)[0], meanwhile, tell)
    except PeerUnreachable as error:
        raise MachineError(
            f"{noun} 0 did not open {format_address(address, port)} within {member.seconds:g} s ({error}); start it, "
            "or "
            "increase --rendezvous-timeout"
        ) from None
    except NotPeerZero as error:
        raise MachineError(_describe_wrong_member(noun, member, error.differs, fix)) from None
    except Unproven:
        raise FaultError(describe_unproven(member.address, shared)) from None
    return build_peer_rendezvous(noun, member, peers)


def build_host_rendezvous(noun: str, member: Membership, job: Job, listener: socket.socket, shared: Path) -> Rendezvous:
    """Return the rendezvous of member 0, whose other members come to ``listener``; its address names the secret."""
    secret, file = read_secret(member.address, shared)  # once this process has the port, nobody else removes the file
    peers = Peers.host(listener, job, member.count, secret)
    peers.files += [] if file is None else [file]
    store = host_store()
    peers.open_to_members(int(store.port))
    peers.welcome = {"store": store.port}
    return Rendezvous(noun, member, store, peers)


def build_peer_rendezvous(noun: str, member: Membership, peers: Peers) -> Rendezvous:
    """Return the rendezvous of another member, which member 0 has accepted."""
    store = _connect_store(LOOPBACK, peers.reach(int(peers.welcome["store"])), f"{noun} 0")
    return Rendezvous(noun, member, store, peers)


def describe_unproven(address: tuple[str, int], shared: Path) -> str:
    """Return the message of a process that could not prove itself at ``address``."""
    file = read_secret(address, shared)[1]
    differs = f"{VARIABLE} differs" if file is None else f"{file} is not the same file there"
    return (
        f"{format_address(*address)} refuses this process, which could not prove that it is of the run: {differs}; "
        "start all "
        f"processes in a directory that they share, or set {VARIABLE} to the same random text for each"
    )


def _describe_wrong_member(noun: str, member: Membership, differs: list[str] | None, fix: str) -> str:
    address_text, port = format_address(*member.address), member.address[1]
    if not differs or "program" in differs:
        return f"port {port} at {address_text} is used by another program, not {noun} 0 of this run; {fix}"
    if "member" in differs:
        return f"{noun} {member.index} of the run at {address_text} is already there: two jobs use port {port}; {fix}"
    words = ", ".join(JOB_DIFFERENCES.get(key, key) for key in differs)
    return f"{noun} 0 at {address_text} is of another run ({words}): two jobs use port {port}; {fix}"


def host_store() -> TCPStore:
    """Return a store on the loopback interface, at a port that the kernel picks, so that ports cannot collide."""
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _listen(address: str, port: int, fix: str, seconds: float, meanwhile: Callable[[], None]) -> socket.socket:
    family, number = resolve_own_address(address, seconds, meanwhile)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((number, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(f"port {port} of {address} is used by another program; {fix}") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise MachineError(
                f"{address} is not an address of this machine ({socket.gethostname()}); start the first node on the "
                "machine with that address"
            ) from None
        raise MachineError(f"cannot listen on {format_address(address, port)}: {error}; {fix}") from None
    return listener


def join_store(address: str, port: int, seconds: float, host: str) -> TCPStore:
    """Return a client of the store that `host`, a name for messages, opens at this address within `seconds`."""
    deadline, waiting = time.monotonic() + seconds, Waiting("this process", seconds)
    # Try to connect here first: torch's own attempts cannot be interrupted.
    while (problem := _explain_unreachable(address, port)) is not None:
        waiting.tell(lambda reason=problem: f"{host} at {format_address(address, port)} ({reason})")  # type: ignore[misc]
        if time.monotonic() > deadline:
            raise MachineError(
                f"{host} did not open {format_address(address, port)} within {seconds:g} s ({problem}); start it, or "
                "increase --rendezvous-timeout"
            )
        time.sleep(POLL_SECONDS)
    return _connect_store(address, port, host)


def _connect_store(address: str, port: int, host: str) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MachineError(
            f"what listens at {format_address(address, port)} is not {host} of this run ({reason})"
        ) from None


def _explain_unreachable(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def prepare_each_machine(prepare: Callable[[], None], rendezvous: Rendezvous | None, firsts: Sequence[int]) -> None:
    """Call ``prepare`` if this process is the first of its machine; return when it is done on every machine.

    The machines may share a cache or each have one of its own. There is no time limit, as there is for joining the
    process group: preparing takes as long as it takes.

    Args:
        firsts: the first rank of each machine but rank 0's, which is prepared.
    """
    if rendezvous is None or not firsts:
        return
    if rendezvous.index in firsts:
        prepare()
        rendezvous.publish(f"{_PREPARED}/{rendezvous.index}", True)
    if rendezvous.index == 0:
        for first in firsts:
            rendezvous.wait_for(f"{_PREPARED}/{first}")
        rendezvous.publish(_PREPARED, True)
    else:
        rendezvous.wait_for(_PREPARED)


def meet_ranks(environment: LaunchEnvironment, arguments: Sequence[str], seconds: float, shared: Path) -> Rendezvous:
    """Meet the other processes that the launcher started, at least one. All have the same ``arguments``.

    ``shared``: a directory that all machines see, for the secret of the job.

    Raises MachineError if the port is in use, the address is unknown, or rank 0 does not arrive.
    """
    address, port = environment.address, environment.port
    if address is None or port is None:
        return _meet_announced(environment, _File(environment), seconds, shared)
    if environment.agent_store:
        return _meet_announced(environment, _LaunchersStore(environment, (address, port), seconds), seconds, shared)
    job = build_job(environment.size, arguments, environment.job_everywhere)
    fix = "set MASTER_PORT to a free one, the same for every process of the job"
    member = Membership(environment.rank, environment.size, (address, port), seconds)
    return meet("rank", member, job, fix, shared=shared)


# Rank 0's name for a start of the job, and the port at which it is.
_Announced = tuple[str, int]


class _LaunchersStore:
    """Where rank 0 announces a start: the launcher's store, which earlier starts of the job may have used.

    Rank 0 names each start anew: the launchers on several machines may have counted different numbers of restarts.

    Attributes:
        host: of rank 0; it listens at ``listens_at``, where "" is all addresses.
    """

    def __init__(self, environment: LaunchEnvironment, address: tuple[str, int], seconds: float) -> None:
        self._starts = PrefixStore(f"trainwright/starts/{environment.job}", join_store(*address, seconds, "rank 0"))
        self.host, self.listens_at = (LOOPBACK, LOOPBACK) if environment.nodes == 1 else (address[0], "")
        self._port = address[1]

    def build_secret_name(self, port: int) -> tuple[str, int]:
        """Return the address that names the job's secret, for a start at ``port``."""
        return self.host, self._port

    def announce(self, rendezvous: Rendezvous, start: _Announced) -> None:
        """Let the other ranks read the start of this process, rank 0."""
        self._starts.set("newest", json.dumps(start))

    def newest(self) -> _Announced | None:
        """Return the start announced last; None before that."""
        try:
            return _parse_announced(json.loads(self._starts.get("newest"))) if self._starts.check(["newest"]) else None
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise FaultError("the launcher's store is gone; see its output") from error
        except ValueError:  # anybody can write into the launcher's store
            return None


class _File:
    """Where rank 0 announces a start on one machine: a file, which it removes at its end. As ``_LaunchersStore``."""

    host = listens_at = LOOPBACK

    def __init__(self, environment: LaunchEnvironment) -> None:
        if environment.nodes > 1 or environment.job is None:
            example = "-x MASTER_ADDR=… -x MASTER_PORT=…" if environment.launcher == "mpirun" else "in every process"
            raise MachineError(
                f"{environment.launcher} sets no rendezvous address for the {environment.size} processes; set "
                f"MASTER_ADDR to the name of rank 0's machine and MASTER_PORT to a free port ({example})"
            )
        digest = hashlib.sha256(f"{os.getuid()} {environment.job}".encode()).hexdigest()[:20]
        self._file = Path(tempfile.gettempdir()) / f"trainwright-{digest}"

    def build_secret_name(self, port: int) -> tuple[str, int]:
        return LOOPBACK, port

    def announce(self, rendezvous: Rendezvous, start: _Announced) -> None:
        rendezvous.peers.files.append(self._file)
        _write(self._file, {"start": start, **_identify_process(os.getpid())})

    def newest(self) -> _Announced | None:
        with suppress(OSError, ValueError, KeyError, psutil.Error):
            content = json.loads(self._file.read_text(encoding="utf-8"))
            # A file left by a killed run belongs to a process that no longer exists.
            if (
                self._file.stat().st_uid == os.getuid()
                and _identify_process(int(content["pid"])).items() <= content.items()
            ):
                return _parse_announced(content["start"])
        return None


def _meet_announced(
    environment: LaunchEnvironment, board: _LaunchersStore | _File, seconds: float, shared: Path
) -> Rendezvous:
    """Meet at a port that the kernel picks and rank 0 announces; the others try the newest one announced."""
    rank, deadline, why = environment.rank, time.monotonic() + seconds, "it has not started"
    if rank == 0:
        listener = socket.create_server((board.listens_at, 0), backlog=4096)
        name, port = secrets.token_hex(8), int(listener.getsockname()[1])
        member = Membership(0, environment.size, board.build_secret_name(port), 0.0)
        rendezvous = build_host_rendezvous("rank", member, {"start": name}, listener, shared)
        board.announce(rendezvous, (name, port))
        return rendezvous
    waiting = Waiting(f"rank {rank}", seconds)
    while time.monotonic() < deadline:
        waiting.tell(lambda reason=why: f"rank 0 at {board.host} ({reason})")  # type: ignore[misc]
        if (announcement := board.newest()) is not None:
            name, port = announcement
            member, at = Membership(rank, environment.size, (board.host, port), 0.0), board.build_secret_name(port)
            try:
                peers = Peers.join(member, {"start": name}, lambda at=at: read_secret(at, shared)[0])  # type: ignore[misc]
                return build_peer_rendezvous("rank", member, peers)
            except PeerUnreachable as error:  # of an earlier start
                why = f"port {port} of {board.host}: {error}"
            except NotPeerZero as error:
                if "member" in (error.differs or ()):
                    raise MachineError(f"rank {rank} is already there: two processes have the same rank") from None
                why = f"port {port} of {board.host} is used by another program"
            except Unproven:
                raise FaultError(describe_unproven(at, shared)) from None
        time.sleep(POLL_SECONDS)
    raise MachineError(f"rank 0 cannot be reached within {seconds:g} s: {why}")


def _parse_announced(value: Any) -> _Announced | None:
    if isinstance(value, list) and len(value) == 2 and type(value[1]) is int and 0 < value[1] < 2**16:
        return str(value[0]), value[1]
    return None


def _write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    scratch.replace(path)


def _identify_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}
