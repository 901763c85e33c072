"""The hosts of ``--hosts`` and ``--hostfile``, and whether each can be reached and can run the command.

Lists are as pdsh writes them, and files as MPI reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from trainwright.errors import MachineError, RequestError, TrainwrightError
from trainwright.recipe.files import missing_file

# A host as ssh takes it. Nothing that a shell or an option of ssh could be made of.
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?([A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)", re.ASCII)
_IPV6 = re.compile(r"([A-Za-z0-9_][\w.-]*@)?\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(.*))?", re.ASCII)
_OPTION = re.compile(r"(\w[\w-]*)\s*=\s*(\S*)\s*", re.ASCII)
# Of a line in a file of Open MPI: the number of processes, and what says nothing of it.
_SLOTS, _PASSED_OVER = "slots", ("max_slots", "max-slots")
_BRACKETS = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_MAX_HOSTS = 10_000


@dataclass(frozen=True)
class Host:
    """A host, with the number of its processes if that is written."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str, origin: str = "--hosts") -> list[Host]:
    """Return the hosts of ``node[1-3],node7:8``. Raises RequestError."""
    hosts: list[Host] = []
    for part in re.split(r",(?![^\[]*\])", text):
        name, slots = _split(part.strip(), origin)
        hosts += [_host(each, slots, origin) for each in _expanded(name, origin)]
    return _checked(hosts, origin)


def read_hostfile(file: Path) -> list[Host]:
    """Return the hosts of a file: on each line hosts as in ``--hosts``, or ``node1 slots=8 max_slots=8``.

    Raises RequestError.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RequestError(f"--hostfile: {missing_file(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--hostfile: {file} cannot be read: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        origin, (name, *rest) = f"--hostfile: {file}:{number}", (line.partition("#")[0].split(None, 1) or [""])
        slots = _slots_of_line(rest[0], origin) if rest else None
        for host in parse_hosts(name, origin) if name else []:
            if None not in (slots, host.slots):
                raise RequestError(f"{origin}: {line.strip()!r} has two numbers of slots; remove one")
            hosts.append(Host(host.name, host.slots or slots))
    return _checked(hosts, f"--hostfile: {file}")


def processes_of(hosts: list[Host]) -> int | None:
    """Return the number of processes of all hosts, None if it is not written. Raises RequestError."""
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        written = ", ".join(f"{host.name}: {host.slots or 'not written'}" for host in hosts[:4])
        raise RequestError(f"hosts: every host needs the same number of slots ({written}); a run is divided evenly")
    each = slots.pop()
    return None if each is None else each * len(hosts)


def _expanded(text: str, origin: str) -> Iterator[str]:
    """Yield node1, node2 and node3 for node[1-3]; a number keeps its zeros."""
    match = _BRACKETS.fullmatch(text)
    if match is None:
        yield text
        return
    before, ranges, after = match.groups()
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if not (first.isdigit() and (last or first).isdigit()) or not 0 <= int(last or first) - int(first) < _MAX_HOSTS:
            raise RequestError(f"{origin}: {text}: [{piece}] is not a number or a range such as [1-3]")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}", origin)


def _split(text: str, origin: str) -> tuple[str, str | None]:
    """Return the name of ``node1:8`` or ``[fd00::1]:8``, as ssh takes it, and the slots."""
    if (match := _IPV6.fullmatch(text)) is None:
        name, colon, slots = text.partition(":")
        return name, slots if colon else None
    user, number, slots = match.groups()
    try:
        return f"{user or ''}{IPv6Address(number)}", slots
    except AddressValueError as error:
        raise RequestError(f"{origin}: {text} is not an IPv6 address: {error}") from None


def _slots_of_line(options: str, origin: str) -> int | None:
    """Return the slots of what follows a host in a file of Open MPI, as in ``slots=8 max_slots = 8``."""
    options_by_name = {match[1]: match[2] for match in _OPTION.finditer(options)}
    if _OPTION.sub("", options) or options_by_name.keys() - {_SLOTS, *_PASSED_OVER}:
        raise RequestError(f"{origin}: {options.strip()!r} after the host is not slots=N, with or without max_slots=N")
    return _number(options_by_name[_SLOTS], origin) if _SLOTS in options_by_name else None


def _host(name: str, slots: str | None, origin: str) -> Host:
    if not _HOST.fullmatch(name):
        raise RequestError(
            f"{origin}: {name!r} is not a host name, such as node1, user@node1, node[1-3] or, with IPv6, [fd00::1]"
        )
    return Host(name, None if slots is None else _number(slots, f"{origin}: {name}"))


def _number(slots: str, origin: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", slots) or not int(slots):
        raise RequestError(f"{origin}: slots {slots!r}: expected the number of processes, at least 1")
    return int(slots)


def _checked(hosts: list[Host], origin: str) -> list[Host]:
    if not hosts:
        raise RequestError(f"{origin}: no hosts")
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{origin}: {twice} is named twice; use slots=N for several processes on a host")
    return hosts


SSH_FAILED = 255
_PROBE_SECONDS = 30
_CLOCK_SECONDS = 30.0  # deadlines and the ages of files on a shared disk are compared with clocks
_NO_DIRECTORY, _NO_PYTHON = 71, 72
_PROBE = """
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
class HostAnswer:
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


def ask(hosts: Sequence[Host], prepared: str) -> list[HostAnswer]:
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
    answered = [each for each in answers if isinstance(each, HostAnswer)]
    check_clocks(hosts, [each.ahead for each in answered])
    return answered


def answers_of(hosts: Sequence[Host], prepared: str, meeting: str = "") -> list[HostAnswer | TrainwrightError]:
    """Return the answer of each host, or why there is none.

    Args:
        meeting: the name or address of the host where all of them meet, which each has to know.
    """
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return list(pool.map(lambda host: _probe(host, prepared, meeting), hosts))


def check_clocks(hosts: Sequence[Host], ahead: Sequence[float]) -> None:
    """Raise MachineError if the clocks of two hosts differ by more than a slow answer explains."""
    first, last = min(ahead), max(ahead)
    if last - first > _CLOCK_SECONDS:
        late, early = hosts[ahead.index(first)].name, hosts[ahead.index(last)].name
        raise MachineError(
            f"the clock of {early} is {last - first:.0f} s ahead of that of {late}; synchronize them, for instance "
            "with chrony: deadlines and the ages of shared files depend on them"
        )


def _probe(host: Host, prepared: str, meeting: str) -> HostAnswer | TrainwrightError:
    python = shlex.quote(sys.executable)
    script = (
        f"cd {shlex.quote(os.getcwd())} || exit {_NO_DIRECTORY}\n{prepared}\n"
        f"test -x {python} || exit {_NO_PYTHON}\nexec {python} -c {shlex.quote(_PROBE)} {shlex.quote(meeting)}"
    )
    began = time.time()
    try:
        probe = subprocess.run(
            [*ssh(host), in_shell(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except FileNotFoundError as error:
        return MachineError(f"{error.filename}: no such program; --hosts needs ssh (apt-get install openssh-client)")
    except subprocess.TimeoutExpired:
        return MachineError(f"{host.name}: no answer over ssh within {_PROBE_SECONDS} s")
    if probe.returncode:
        return _problem(host, probe)
    clock, port, unknown = json.loads(probe.stdout.splitlines()[-1])
    if unknown:
        return RequestError(
            f"{host.name}: does not know the name {meeting} of the first host ({unknown}); use a name or an address "
            "that all hosts know: what the configuration of ssh calls a host is known to ssh alone"
        )
    return HostAnswer(clock - (began + time.time()) / 2, port)


def _problem(host: Host, probe: subprocess.CompletedProcess[str]) -> TrainwrightError:
    message = (probe.stderr.strip().splitlines() or ["no message"])[-1]
    if probe.returncode == _NO_DIRECTORY:
        return MachineError(
            f"{host.name}: no directory {os.getcwd()}; start from one on a file system that all hosts share"
        )
    if probe.returncode == _NO_PYTHON:
        return MachineError(f"{host.name}: no {sys.executable}; install Trainwright at the same place on every host")
    if probe.returncode != SSH_FAILED:
        return MachineError(f"{host.name}: {sys.executable} cannot import trainwright there: {message}")
    if "resolve hostname" in message:
        return RequestError(f"{host.name}: unknown host; correct --hosts or --hostfile ({message})")
    if "Permission denied" in message:
        return MachineError(
            f"{host.name}: ssh refuses the login without a password; set up a key with ssh-copy-id {host.name} "
            f"({message})"
        )
    if "Host key verification failed" in message:
        return MachineError(f"{host.name}: its host key is not known; log in once with ssh {host.name} ({message})")
    return MachineError(f"{host.name}: ssh failed: {message}")
