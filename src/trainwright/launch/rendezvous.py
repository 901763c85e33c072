"""Where the processes or the machines of a run meet: one store that index 0 hosts or the launcher has opened.

No port is assumed. On one machine a free one is taken, and passed on in a small file that only this user can
read; on several machines the launcher or the user names one, and a taken one is an error that names it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from trainwright.errors import MachineError, TrainingError
from trainwright.launch.environment import Environment
from trainwright.launch.peers import Peers

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT = 600.0  # seconds

_STORE_TIMEOUT = timedelta(minutes=15)
_POLL_SECONDS = 0.1


class Meeting:
    """The members of a start, counted from 0: ranks or nodes. Member 0 asks, checks and decides.

    Attributes:
        store: for whoever wants to go on from here, such as a process group.
        peers: tells at once of a member that is gone.
    """

    def __init__(self, noun: str, index: int, count: int, store: TCPStore, address: str, port: int) -> None:
        self.noun = noun
        self.index = index
        self.count = count
        self.address = address
        self.port = port
        self.store: Store = store
        self._keys = PrefixStore(f"trainwright/{noun}", store)
        self.peers: Peers

    def join_peers(self, bind: str, address: str) -> None:
        """Open the lines between the members. Called once, right after the store is there."""
        if self.index == 0:
            self.peers = Peers.host(bind)
            self.publish("peers", [self.peers.port, self.peers.token])
        else:
            port, token = self.wait_for("peers")
            self.peers = Peers.join(self.index, address, port, token)

    def publish(self, key: str, value: Any) -> None:
        self._keys.set(key, json.dumps(value))

    def wait_for(self, key: str, meanwhile: Callable[[], None] = lambda: None, seconds: float | None = None) -> Any:
        """What was published under `key`; however long it takes where `seconds` is not given.

        `meanwhile` is called again and again, and may raise. Raises TrainingError when the store is gone,
        TimeoutError.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                if self._keys.check([key]):
                    return json.loads(self._keys.get(key))
            except RuntimeError as error:  # torch's DistNetworkError is one
                raise TrainingError(f"{self.noun} 0 is gone; its own output says why") from error
            meanwhile()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(_POLL_SECONDS)

    def post(self, value: Any) -> None:
        """What this member says of itself, for member 0's `gather`."""
        self.publish(f"member/{self.index}", value)

    def gather(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """What every member has posted. Raises MachineError that names those who have not come in time."""
        deadline = time.monotonic() + seconds
        members: list[Any] = []
        while len(members) < self.count:
            left = max(0.0, deadline - time.monotonic())
            try:
                members.append(self.wait_for(f"member/{len(members)}", meanwhile, left))
            except TimeoutError:
                raise self._missing(seconds) from None
        return members

    def leave(self) -> None:
        """Say to member 0 that this one needs the store no more."""
        self._keys.add("left", 1)

    def wait_until_left(self, seconds: float) -> None:
        """Member 0, which may host the store: wait for the others' `leave`, or so many seconds."""
        self.wait_until_all_left(self.count - 1, seconds)

    def wait_until_all_left(self, number: int, seconds: float) -> None:
        """As wait_until_left, for so many."""
        deadline = time.monotonic() + seconds
        while self._keys.add("left", 0) < number and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self.peers.close()

    def _missing(self, seconds: float) -> MachineError:
        missing = [str(i) for i in range(self.count) if not self._keys.check([f"member/{i}"])]
        names = f"{self.noun}{'s' * (len(missing) > 1)} {', '.join(missing)}"
        return MachineError(
            f"{len(missing)} of {self.count} {self.noun}s did not come to {self.address}:{self.port} within "
            f"{seconds:g} s: {names}; start them, or give them longer with --rendezvous-timeout"
        )


def meet_ranks(environment: Environment, seconds: float = DEFAULT_TIMEOUT) -> Meeting:
    """Meet the other processes that the launcher started; there are some.

    Raises MachineError for a port that is taken, an unknown place to meet, or a rank 0 that does not come.
    """
    alone = environment.nodes == 1
    if environment.address is not None and environment.port is not None:
        address, port = environment.address, environment.port
        if environment.agent_store or environment.rank != 0:
            store = join_store(address, port, seconds, "rank 0")
        else:
            fix = "set MASTER_PORT to a free one, the same for every process"
            store = host_store(address, port, fix)
    else:
        store, port = _meet_by_file(environment, seconds)
        address = LOOPBACK
    meeting = Meeting("rank", environment.rank, environment.size, store, address, port)
    meeting.join_peers(LOOPBACK if alone else "", LOOPBACK if alone else address)
    return meeting


def host_store(address: str, port: int, fix: str) -> TCPStore:
    """A store that listens at `address`; `port` 0 takes a free one, to be read from the store.

    Raises MachineError, ending with `fix` where the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_listening_at(address), port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(f"port {port} of {address} is taken by another program; {fix}") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise MachineError(
                f"{address} is not an address of this machine ({socket.gethostname()}); the first node has to be "
                "started on the machine that the others meet at"
            ) from None
        raise MachineError(f"cannot listen on {address}:{port}: {error}; {fix}") from None
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def join_store(
    address: str, port: int, seconds: float, host: str, meanwhile: Callable[[], None] = lambda: None
) -> TCPStore:
    """A client of the store that `host`, a name for messages, opens at this address within `seconds`."""
    deadline = time.monotonic() + seconds
    # Asked for here first: torch's own attempts cannot be interrupted.
    while (problem := _unreachable(address, port)) is not None:
        if time.monotonic() > deadline:
            raise MachineError(
                f"{host} did not open {address}:{port} within {seconds:g} s ({problem}); start it, or give it "
                "longer with --rendezvous-timeout"
            )
        meanwhile()
        time.sleep(_POLL_SECONDS)
    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MachineError(f"what listens at {address}:{port} is not {host} of this run ({reason})") from None


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that leads to `address`; None where it cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, places in found if any(place.address == own for place in places)), None)


def set_interfaces(address: str) -> None:
    """Tell gloo, and NCCL where all is on one machine, which network to use; the user's own values stay."""
    interface = interface_of(address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def is_loopback(address: str) -> bool:
    """Whether a literal or well-known name for this machine; its own name may stand for it in /etc/hosts too."""
    return address == "localhost" or address.startswith("127.")


def _listening_at(address: str) -> str:
    """What to bind to. A machine's own name may stand for loopback in its /etc/hosts; others cannot come there."""
    try:
        number = socket.gethostbyname(address)
    except OSError:
        raise MachineError(f"{address} is not the name of a machine that can be found from here") from None
    return "" if number.startswith("127.") and not is_loopback(address) else number


def _unreachable(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _meet_by_file(environment: Environment, seconds: float) -> tuple[TCPStore, int]:
    """On one machine: rank 0 takes a free port and writes it down for the others of the same job."""
    if environment.nodes > 1 or environment.job is None:
        example = "-x MASTER_ADDR=… -x MASTER_PORT=…" if environment.launcher == "mpirun" else "in every process"
        raise MachineError(
            f"{environment.launcher} does not say where the {environment.size} processes meet; set MASTER_ADDR to "
            f"the name of rank 0's machine and MASTER_PORT to a free port ({example})"
        )
    path = _meeting_file(environment.job)
    if environment.rank == 0:
        store = host_store(LOOPBACK, 0, "")
        with _written(path, {"port": store.port, **_identity(os.getpid())}):
            # The others have read it when all of them have said so.
            waiting = PrefixStore("trainwright/file", store)
            deadline = time.monotonic() + seconds
            while waiting.add("read", 0) < environment.size - 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        return store, int(store.port)
    port = _read_port(path, seconds)
    store = join_store(LOOPBACK, port, seconds, "rank 0")
    PrefixStore("trainwright/file", store).add("read", 1)
    return store, port


def _meeting_file(job: str) -> Path:
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
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            content = json.loads(path.read_text())
            # A file that a killed run has left behind is of a process that is no more.
            if path.stat().st_uid == os.getuid() and _identity(int(content["pid"])).items() <= content.items():
                return int(content["port"])
        time.sleep(_POLL_SECONDS)
    raise MachineError(f"rank 0 did not start on this machine within {seconds:g} s")


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "started": psutil.Process(pid).create_time()}
