"""How the ranks that another launcher has started meet: at an address, at the launcher's store, or by a file.

No fixed port is assumed. On one machine a free port is chosen, and passed on in a small file that only this user can
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from trainwright.errors import FaultError, MachineError
from trainwright.run.group.addresses import LOOPBACK
from trainwright.run.group.environment import LaunchEnvironment
from trainwright.run.group.peers import Membership, NotPeerZero, Peers, PeerUnreachable, job_of
from trainwright.run.group.rendezvous import (
    DEFAULT_TIMEOUT,
    POLL_SECONDS,
    SHARED,
    Rendezvous,
    host_store,
    join_store,
    meet,
    unproven,
)
from trainwright.run.group.trust import Unproven, secret_of
from trainwright.run.group.waiting import Waiting


def meet_ranks(
    environment: LaunchEnvironment,
    arguments: Sequence[str] = (),
    seconds: float = DEFAULT_TIMEOUT,
    shared: Path = SHARED,
) -> Rendezvous:
    """Meet the other processes that the launcher started, at least one. All have the same ``arguments``.

    ``shared``: a directory that all machines see, for the secret of the job.

    Raises MachineError if the port is in use, the address is unknown, or rank 0 does not arrive.
    """
    address, port = environment.address, environment.port
    if address is not None and port is not None and not environment.agent_store:
        job = job_of(environment.size, arguments, environment.job_everywhere)
        fix = "set MASTER_PORT to a free one, the same for every process of the job"
        member = Membership(environment.rank, environment.size, (address, port), seconds)
        return meet("rank", member, job, fix, shared=shared)
    if address is not None and port is not None:
        store = join_store(address, port, seconds, "rank 0")
    else:
        store, port = _meet_by_file(environment, seconds)
        address = LOOPBACK
    return _join_round(environment, store, (address, port), seconds, shared)


def _join_round(
    environment: LaunchEnvironment, store: TCPStore, address: tuple[str, int], seconds: float, shared: Path
) -> Rendezvous:
    """Meet the other ranks of this start at a store that earlier ones of the job may have used.

    Rank 0 names each start anew: the launchers on several machines may have counted different numbers of restarts.
    """
    alone, rank, size = environment.nodes == 1, environment.rank, environment.size
    at = LOOPBACK if alone else address[0], address[1]
    starts = PrefixStore(f"trainwright/starts/{environment.job}", store)
    if rank == 0:
        name = secrets.token_hex(8)
        listener = socket.create_server((LOOPBACK if alone else "", 0), backlog=4096)
        peers = Peers.host(listener, {"start": name}, size, *secret_of(at, shared))
        starts.set("newest", json.dumps([name, peers.port]))
    else:
        name, peers = _newest_start(starts, rank, size, at, seconds, shared)
    rendezvous = Rendezvous("rank", rank, size, store, *address, prefix=f"/{environment.job}/{name}")
    rendezvous.peers = peers
    return rendezvous


def _newest_start(
    starts: Store, rank: int, size: int, rendezvous_address: tuple[str, int], seconds: float, shared: Path
) -> tuple[str, Peers]:
    """Return the name of the start whose rank 0 answers, and the connection to it."""
    address = rendezvous_address[0]
    deadline, why = time.monotonic() + seconds, "it has not started"
    waiting = Waiting(f"rank {rank}", seconds)
    while time.monotonic() < deadline:
        waiting.tell(lambda reason=why: f"rank 0 at {address} ({reason})")  # type: ignore[misc]
        try:
            newest = json.loads(starts.get("newest")) if starts.check(["newest"]) else None
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise FaultError("the launcher's store is gone; see its output") from error
        except ValueError:  # anybody can write into the launcher's store
            newest = None
        if isinstance(newest, list) and len(newest) == 2 and type(newest[1]) is int and 0 < newest[1] < 2**16:
            name, port = str(newest[0]), newest[1]
            try:
                job, secret = {"start": name}, lambda: secret_of(rendezvous_address, shared)[0]
                return name, Peers.join(Membership(rank, size, (address, port), 0.0), job, secret)
            except PeerUnreachable as error:  # of an earlier start
                why = f"port {port} of {address}: {error}"
            except NotPeerZero as error:
                if "member" in (error.differs or ()):
                    raise MachineError(f"rank {rank} is already there: two processes have the same rank") from None
                why = f"port {port} of {address} is used by another program"
            except Unproven:
                raise FaultError(unproven(rendezvous_address, shared)) from None
        time.sleep(POLL_SECONDS)
    raise MachineError(f"rank 0 cannot be reached within {seconds:g} s: {why}")


def _meet_by_file(environment: LaunchEnvironment, seconds: float) -> tuple[TCPStore, int]:
    """Meet on one machine: rank 0 chooses a free port and writes it to a file for the others of the same job."""
    if environment.nodes > 1 or environment.job is None:
        example = "-x MASTER_ADDR=… -x MASTER_PORT=…" if environment.launcher == "mpirun" else "in every process"
        raise MachineError(
            f"{environment.launcher} sets no rendezvous address for the {environment.size} processes; set MASTER_ADDR "
            f"to the name of rank 0's machine and MASTER_PORT to a free port ({example})"
        )
    path = _rendezvous_file(environment.job)
    if environment.rank == 0:
        store = host_store(LOOPBACK, 0, "")
        with _written(path, {"port": store.port, **_identity(os.getpid())}):
            # All have read it once all of them have reported.
            waiting = PrefixStore("trainwright/file", store)
            deadline = time.monotonic() + seconds
            progress = Waiting("rank 0", seconds)
            while (come := waiting.add("read", 0)) < environment.size - 1 and time.monotonic() < deadline:
                missing = f"{environment.size - 1 - come} of {environment.size} processes on {socket.gethostname()}"
                progress.tell(lambda what=missing: what)  # type: ignore[misc]
                time.sleep(POLL_SECONDS)
        return store, int(store.port)
    port = _read_port(path, seconds)
    store = join_store(LOOPBACK, port, seconds, "rank 0")
    PrefixStore("trainwright/file", store).add("read", 1)
    return store, port


def _rendezvous_file(job: str) -> Path:
    digest = hashlib.sha256(f"{os.getuid()} {job}".encode()).hexdigest()[:20]
    return Path(tempfile.gettempdir()) / f"trainwright-{digest}"


@contextlib.contextmanager
def _written(path: Path, content: dict[str, Any]) -> Any:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    scratch.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read_port(path: Path, seconds: float) -> int:
    deadline, waiting = time.monotonic() + seconds, Waiting("this process", seconds)
    while time.monotonic() < deadline:
        waiting.tell(lambda: f"rank 0 on this machine ({socket.gethostname()})")
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            content = json.loads(path.read_text(encoding="utf-8"))
            # A file left by a killed run belongs to a process that no longer exists.
            if path.stat().st_uid == os.getuid() and _identity(int(content["pid"])).items() <= content.items():
                return int(content["port"])
        time.sleep(POLL_SECONDS)
    raise MachineError(f"rank 0 did not start on this machine within {seconds:g} s")


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}
