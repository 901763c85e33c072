"""The hosts of ``--hosts`` and ``--hostfile``: lists as pdsh writes them, and files as MPI reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.recipe.files import missing_file

# A host as ssh takes it. Nothing that a shell or an option of ssh could be made of.
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)
_SLOTS = re.compile(r"(?:slots|max[_-]slots)=([0-9]+)|:([0-9]+)")
_BRACKETS = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_MOST = 10_000


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
        name, colon, slots = part.strip().partition(":")
        hosts += [_host(each, f":{slots}" if colon else "", origin) for each in _expanded(name, origin)]
    return _checked(hosts, origin)


def read_hostfile(file: Path) -> list[Host]:
    """Return the hosts of a file: on each line hosts as in ``--hosts``, or ``node1 slots=8``. Raises RequestError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RequestError(f"--hostfile: {missing_file(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--hostfile: {file} cannot be read: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        origin, words = f"--hostfile: {file}:{number}", line.partition("#")[0].split()
        if len(words) > 2:
            raise RequestError(f"{origin}: {line.strip()!r} is not `host` or `host slots=N`")
        if len(words) == 2:
            hosts += [_host(each, words[1], origin) for each in _expanded(words[0], origin)]
        elif words:
            hosts += parse_hosts(words[0], origin)
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
    found = _BRACKETS.fullmatch(text)
    if found is None:
        yield text
        return
    before, ranges, after = found.groups()
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        if not (first.isdigit() and (last or first).isdigit()) or not 0 <= int(last or first) - int(first) < _MOST:
            raise RequestError(f"{origin}: {text}: [{piece}] is not a number or a range such as [1-3]")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}", origin)


def _host(name: str, slots: str, origin: str) -> Host:
    if not _HOST.fullmatch(name):
        raise RequestError(f"{origin}: {name!r} is not a host name, such as node1, user@node1 or node[1-3]")
    if not slots:
        return Host(name)
    found = _SLOTS.fullmatch(slots)
    number = int(found[1] or found[2]) if found else 0
    if not number:
        raise RequestError(f"{origin}: {name} {slots}: expected slots=N, the number of processes, at least 1")
    return Host(name, number)


def _checked(hosts: list[Host], origin: str) -> list[Host]:
    if not hosts:
        raise RequestError(f"{origin}: no hosts")
    names = [host.name for host in hosts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{origin}: {twice} is named twice; use slots=N for several processes on a host")
    return hosts
