"""Ask every host, before anything starts, whether it can be reached and can run the command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainwright.errors import MachineError, RequestError, TrainwrightError
from trainwright.launch.hosts.names import Host

SSH_FAILED = 255
_SECONDS = 30
_CLOCK_SECONDS = 30.0  # deadlines and the ages of files on a shared disk are compared with clocks
_NO_DIRECTORY, _NO_PYTHON = 71, 72
_ANSWER = """
import json, socket, sys, time, trainwright
free, unknown = socket.socket(), ""
free.bind(("", 0))
try:
    socket.getaddrinfo(sys.argv[1] or None, 1)
except OSError as error:
    unknown = error.strerror
print(json.dumps([time.time(), free.getsockname()[1], unknown]))
"""


@dataclass(frozen=True)
class Answer:
    """What a host answered: how many seconds its clock is ahead of ours, and a port that is free on it."""

    ahead: float
    port: int


def ssh(host: Host) -> list[str]:
    """Return the command that runs something on the host; TRAINWRIGHT_SSH replaces ``ssh``."""
    command = shlex.split(os.environ.get("TRAINWRIGHT_SSH", "ssh"))
    alive = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
    return [*command, "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *alive, host.name]


def in_shell(script: str) -> str:
    """Return the script for a host whose users may have any shell."""
    return f"exec sh -c {shlex.quote(script)}"


def ask(hosts: Sequence[Host], prepared: str) -> list[Answer]:
    """Return the answers of all hosts.

    Args:
        prepared: shell commands that set variables.

    Raises:
        RequestError: a host is not known, here or, if it is the first, on another one.
        MachineError: one cannot be reached, lacks the directory or Trainwright, or has another time.
    """
    answers = answers_of(hosts, prepared, hosts[0].address if len(hosts) > 1 else "")
    problems = [each for each in answers if isinstance(each, TrainwrightError)]
    if problems:
        raise type(problems[0])("\n".join(str(each) for each in problems[:8]))
    found = [each for each in answers if isinstance(each, Answer)]
    check_clocks(hosts, [each.ahead for each in found])
    return found


def answers_of(hosts: Sequence[Host], prepared: str, meeting: str = "") -> list[Answer | TrainwrightError]:
    """Return the answer of each host, or why there is none.

    Args:
        meeting: the name or address of the host where all of them meet, which each has to know.
    """
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return list(pool.map(lambda host: _ask(host, prepared, meeting), hosts))


def check_clocks(hosts: Sequence[Host], ahead: Sequence[float]) -> None:
    """Raise MachineError if the clocks of two hosts differ by more than a slow answer explains."""
    first, last = min(ahead), max(ahead)
    if last - first > _CLOCK_SECONDS:
        late, early = hosts[ahead.index(first)].name, hosts[ahead.index(last)].name
        raise MachineError(
            f"the clock of {early} is {last - first:.0f} s ahead of that of {late}; synchronize them, for instance "
            "with chrony: deadlines and the ages of shared files depend on them"
        )


def _ask(host: Host, prepared: str, meeting: str) -> Answer | TrainwrightError:
    python = shlex.quote(sys.executable)
    script = (
        f"cd {shlex.quote(os.getcwd())} || exit {_NO_DIRECTORY}\n{prepared}\n"
        f"test -x {python} || exit {_NO_PYTHON}\nexec {python} -c {shlex.quote(_ANSWER)} {shlex.quote(meeting)}"
    )
    began = time.time()
    try:
        done = subprocess.run(
            [*ssh(host), in_shell(script)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except FileNotFoundError as error:
        return MachineError(f"{error.filename}: no such program; --hosts needs ssh (apt-get install openssh-client)")
    except subprocess.TimeoutExpired:
        return MachineError(f"{host.name}: no answer over ssh within {_SECONDS} s")
    if done.returncode:
        return _problem(host, done)
    told, port, unknown = json.loads(done.stdout.splitlines()[-1])
    if unknown:
        return RequestError(
            f"{host.name}: does not know the name {meeting} of the first host ({unknown}); use a name or an address "
            "that all hosts know: what the configuration of ssh calls a host is known to ssh alone"
        )
    return Answer(told - (began + time.time()) / 2, port)


def _problem(host: Host, done: subprocess.CompletedProcess[str]) -> TrainwrightError:
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == _NO_DIRECTORY:
        return MachineError(
            f"{host.name}: no directory {os.getcwd()}; start from one on a file system that all hosts share"
        )
    if done.returncode == _NO_PYTHON:
        return MachineError(f"{host.name}: no {sys.executable}; install Trainwright at the same place on every host")
    if done.returncode != SSH_FAILED:
        return MachineError(f"{host.name}: {sys.executable} cannot import trainwright there: {said}")
    if "resolve hostname" in said:
        return RequestError(f"{host.name}: unknown host; correct --hosts or --hostfile ({said})")
    if "Permission denied" in said:
        return MachineError(
            f"{host.name}: ssh refuses the login without a password; set up a key with ssh-copy-id {host.name} ({said})"
        )
    if "Host key verification failed" in said:
        return MachineError(f"{host.name}: its host key is not known; log in once with ssh {host.name} ({said})")
    return MachineError(f"{host.name}: ssh failed: {said}")
