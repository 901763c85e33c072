"""How the ranks that another launcher has started meet: at an address that is known, or at a port that rank 0 chooses.

No fixed port is assumed. Rank 0 announces its port in the launcher's store, or, on one machine without such a store, in
a small file of this user.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore

from trainwright.errors import FaultError, MachineError
from trainwright.run.group.addresses import LOOPBACK
from trainwright.run.group.environment import LaunchEnvironment
from trainwright.run.group.peers import Membership, NotPeerZero, Peers, PeerUnreachable, job_of
from trainwright.run.group.rendezvous import (
    DEFAULT_TIMEOUT,
    POLL_SECONDS,
    SHARED,
    Rendezvous,
    join_store,
    meet,
    rendezvous_of_host,
    rendezvous_of_peer,
    unproven,
)
from trainwright.run.group.trust import Unproven, secret_of
from trainwright.run.group.waiting import Waiting

# Returns what rank 0 has announced newest, its name for this start and its port; None before that.
_Newest = Callable[[], tuple[str, int] | None]


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
    if address is None or port is None:
        return _meet_by_file(environment, seconds, shared)
    if environment.agent_store:
        return _meet_by_store(environment, (address, port), seconds, shared)
    job = job_of(environment.size, arguments, environment.job_everywhere)
    fix = "set MASTER_PORT to a free one, the same for every process of the job"
    return meet(
        "rank", Membership(environment.rank, environment.size, (address, port), seconds), job, fix, shared=shared
    )


def _meet_by_store(
    environment: LaunchEnvironment, address: tuple[str, int], seconds: float, shared: Path
) -> Rendezvous:
    """Meet with the help of the launcher's store, which earlier starts of the job may have used.

    Rank 0 names each start anew: the launchers on several machines may have counted different numbers of restarts.
    """
    starts = PrefixStore(f"trainwright/starts/{environment.job}", join_store(*address, seconds, "rank 0"))
    local, host = environment.nodes == 1, LOOPBACK if environment.nodes == 1 else address[0]
    proof = host, address[1]  # names the job's secret
    if environment.rank == 0:
        rendezvous, announced = _host(environment, "" if not local else LOOPBACK, proof, shared)
        starts.set("newest", json.dumps(announced))
        return rendezvous

    def newest() -> tuple[str, int] | None:
        try:
            return _announced(json.loads(starts.get("newest"))) if starts.check(["newest"]) else None
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise FaultError("the launcher's store is gone; see its output") from error
        except ValueError:  # anybody can write into the launcher's store
            return None

    return _join(environment, host, newest, lambda port: proof, seconds, shared)


def _meet_by_file(environment: LaunchEnvironment, seconds: float, shared: Path) -> Rendezvous:
    """Meet on one machine with the help of a file, which rank 0 removes at its end."""
    if environment.nodes > 1 or environment.job is None:
        example = "-x MASTER_ADDR=… -x MASTER_PORT=…" if environment.launcher == "mpirun" else "in every process"
        raise MachineError(
            f"{environment.launcher} sets no rendezvous address for the {environment.size} processes; set MASTER_ADDR "
            f"to the name of rank 0's machine and MASTER_PORT to a free port ({example})"
        )
    digest = hashlib.sha256(f"{os.getuid()} {environment.job}".encode()).hexdigest()[:20]
    file = Path(tempfile.gettempdir()) / f"trainwright-{digest}"
    if environment.rank == 0:
        rendezvous, announced = _host(environment, LOOPBACK, None, shared)
        rendezvous.peers.files.append(file)
        _write(file, {"start": announced, **_identity(os.getpid())})
        return rendezvous

    def newest() -> tuple[str, int] | None:
        with suppress(OSError, ValueError, KeyError, psutil.Error):
            content = json.loads(file.read_text(encoding="utf-8"))
            # A file left by a killed run belongs to a process that no longer exists.
            if file.stat().st_uid == os.getuid() and _identity(int(content["pid"])).items() <= content.items():
                return _announced(content["start"])
        return None

    return _join(environment, LOOPBACK, newest, lambda port: (LOOPBACK, port), seconds, shared)


def _host(
    environment: LaunchEnvironment, address: str, proof: tuple[str, int] | None, shared: Path
) -> tuple[Rendezvous, tuple[str, int]]:
    """Return rank 0's rendezvous at a port that the kernel picks, and what to announce.

    Args:
        address: to listen at; "" is all addresses.
        proof: what names the job's secret; None: the address and the port.
    """
    listener = socket.create_server((address, 0), backlog=4096)
    name, port = secrets.token_hex(8), int(listener.getsockname()[1])
    member = Membership(0, environment.size, proof or (address, port), 0.0)
    return rendezvous_of_host("rank", member, {"start": name}, listener, shared), (name, port)


def _join(
    environment: LaunchEnvironment,
    host: str,
    newest: _Newest,
    proof: Callable[[int], tuple[str, int]],
    seconds: float,
    shared: Path,
) -> Rendezvous:
    """Return the rendezvous with the rank 0 that answers at the newest port announced."""
    rank, deadline, why = environment.rank, time.monotonic() + seconds, "it has not started"
    waiting = Waiting(f"rank {rank}", seconds)
    while time.monotonic() < deadline:
        waiting.tell(lambda reason=why: f"rank 0 at {host} ({reason})")  # type: ignore[misc]
        if (announced := newest()) is not None:
            name, port = announced
            member, at = Membership(rank, environment.size, (host, port), 0.0), proof(port)
            try:
                peers = Peers.join(member, {"start": name}, lambda at=at: secret_of(at, shared)[0])  # type: ignore[misc]
                return rendezvous_of_peer("rank", member, peers)
            except PeerUnreachable as error:  # of an earlier start
                why = f"port {port} of {host}: {error}"
            except NotPeerZero as error:
                if "member" in (error.differs or ()):
                    raise MachineError(f"rank {rank} is already there: two processes have the same rank") from None
                why = f"port {port} of {host} is used by another program"
            except Unproven:
                raise FaultError(unproven(at, shared)) from None
        time.sleep(POLL_SECONDS)
    raise MachineError(f"rank 0 cannot be reached within {seconds:g} s: {why}")


def _announced(value: Any) -> tuple[str, int] | None:
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


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}
