"""Cut connections between workers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import socket
import subprocess
from pathlib import Path

from trainwright.drilling import phases, promises
from trainwright.drilling.faults.kills import RESTARTS, started
from trainwright.drilling.kinds import SEVERAL, fault
from trainwright.drilling.scene import FAILED, FAULT, FINISHED, Scene
from trainwright.drilling.verdicts import Missed, require

_PIDFD_GETFD = 438  # the number of the system call, the same on all architectures since Linux 5.6
_ESTABLISHED = "01"  # include/net/tcp_states.h


@functools.cache
def cut_refused() -> str | None:
    """Return why this process cannot cut the connections of its children; None if it can."""
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as child:
        try:
            os.close(_file_of(child.pid, 0))
        except (OSError, AttributeError) as error:
            return f"no access to the connections of other processes: {error}"
        finally:
            child.kill()
    return None


@fault(
    "connections that are cut", spreads=SEVERAL, phases=phases.TRAINING, variants=RESTARTS, share=2, needs=cut_refused
)
def cut_connections(scene: Scene) -> None:
    """Every rank ends in bounded time, and the run goes on, by itself or resumed."""
    command = started(scene, RESTARTS[scene.variant])
    workers = scene.workers(command)
    rank = scene.draw.choice(list(workers))
    require(_cut(workers[rank]) or command.ended, f"rank {rank} has no connections")
    ended = scene.wait(command)
    restarts = [event for event in promises.lines(scene.run) if event["event"] == "restart"]
    if ended.code == FINISHED:
        if not restarts:
            raise Missed("the run needed its connections no more")
        require(scene.variant == "restarted", f"restarts are off, and there was one: {restarts}")
        scene.stays_undisturbed(ended)
        return
    scene.expect(ended, (FAILED, FAULT), r"rank \d")
    require(scene.variant == "resumed", f"restarts are on, and the run ended: {ended}")
    promises.none_lost(scene.run)
    scene.resumes()


def _cut(pid: int) -> int:
    """Shut down every TCP connection of a process; return their number."""
    connections = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                connections.add(fields[9])
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if found and found[1] in connections:
                with socket.socket(fileno=_file_of(pid, int(link.name))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _file_of(pid: int, number: int) -> int:
    """Return a file of another process as a file of this one."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        found: int = libc.syscall(_PIDFD_GETFD, process, number, 0)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found
    finally:
        os.close(process)
