"""Hosts of ``--hosts`` and ``--hostfile``, and one command that runs on several of them over ssh.

Lists are as pdsh writes them, and files as MPI reads them. Output is gathered, signals are passed on, and the hosts
are ended together, and started again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from trainwright.clusters.job import capture_variables
from trainwright.engine.events import append_event
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, FaultError, MachineError, RequestError, TrainwrightError
from trainwright.recipe.files import describe_missing_file
from trainwright.run.group.environment import expand_node, split_nodes
from trainwright.run.shutdown.failure import Cause, Failure
from trainwright.run.shutdown.stop import STOP_SIGNALS
from trainwright.utils.text import quote_word, replace_unencodable, say

# A host as ssh takes it. Nothing that a shell or an option of ssh could be made of.
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?([A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)", re.ASCII)
_IPV6 = re.compile(r"([A-Za-z0-9_][\w.-]*@)?\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(.*))?", re.ASCII)
_OPTION = re.compile(r"(\w[\w-]*)\s*=\s*(\S*)\s*", re.ASCII)
# Of a line in a file of Open MPI: the number of processes, and what says nothing of it.
_SLOTS, _PASSED_OVER = "slots", ("max_slots", "max-slots")
_MAX_HOSTS = 10_000
_FORMS = "node1, user@node1, node[1-3] or, with IPv6, [fd00::1]"


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
    for part in split_nodes(text):
        name, slots = _split(part, origin)
        for host_name in _expand_hosts(name, origin):
            if not _HOST.fullmatch(host_name):
                raise RequestError(f"{origin}: {host_name!r} is not a host name, such as {_FORMS}")
            hosts.append(Host(host_name, None if slots is None else _parse_slot_count(slots, f"{origin}: {host_name}")))
    return _check_hosts(hosts, origin)


def read_hostfile(file: Path) -> list[Host]:
    """Return the hosts of a file: on each line hosts as in ``--hosts``, or ``node1 slots=8 max_slots=8``.

    Raises RequestError.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RequestError(f"--hostfile: {describe_missing_file(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--hostfile: {file} cannot be read: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        origin, (name, *rest) = f"--hostfile: {file}:{number}", (line.partition("#")[0].split(None, 1) or [""])
        slots = _parse_slots(rest[0], origin) if rest else None
        for host in parse_hosts(name, origin) if name else []:
            if None not in (slots, host.slots):
                raise RequestError(f"{origin}: {line.strip()!r} has two numbers of slots; remove one")
            hosts.append(Host(host.name, host.slots or slots))
    return _check_hosts(hosts, f"--hostfile: {file}")


def sum_processes(hosts: list[Host]) -> int | None:
    """Return the number of processes of all hosts, None if it is not written. Raises RequestError."""
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        slots_text = ", ".join(f"{host.name}: {host.slots or 'not written'}" for host in hosts[:4])
        raise RequestError(f"hosts: every host needs the same number of slots ({slots_text}); a run is divided evenly")
    slots_per_host = slots.pop()
    return None if slots_per_host is None else slots_per_host * len(hosts)


def _expand_hosts(text: str, origin: str) -> list[str]:
    """Return node1, node2 and node3 for node[1-3]. Raises RequestError."""
    try:
        return expand_node(text, _MAX_HOSTS)
    except ValueError as error:
        raise RequestError(f"{origin}: {text}: {error}; write a host as {_FORMS}") from None


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


def _parse_slots(options: str, origin: str) -> int | None:
    """Return the slots of what follows a host in a file of Open MPI, as in ``slots=8 max_slots = 8``."""
    options_by_name = {match[1]: match[2] for match in _OPTION.finditer(options)}
    if _OPTION.sub("", options) or options_by_name.keys() - {_SLOTS, *_PASSED_OVER}:
        raise RequestError(f"{origin}: {options.strip()!r} after the host is not slots=N, with or without max_slots=N")
    return _parse_slot_count(options_by_name[_SLOTS], origin) if _SLOTS in options_by_name else None


def _parse_slot_count(slots: str, origin: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", slots) or not int(slots):
        raise RequestError(f"{origin}: slots {slots!r}: expected the number of processes, at least 1")
    return int(slots)


def _check_hosts(hosts: list[Host], origin: str) -> list[Host]:
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


def build_ssh_command(host: Host) -> list[str]:
    """Return the command that runs something on the host; TRAINWRIGHT_SSH replaces ``ssh``."""
    command = shlex.split(os.environ.get("TRAINWRIGHT_SSH", "ssh"))
    alive = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
    return [*command, "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *alive, host.name]


def wrap_for_shell(script: str) -> str:
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
    answers = collect_answers(hosts, prepared, hosts[0].address if len(hosts) > 1 else "")
    problems = [answer for answer in answers if isinstance(answer, TrainwrightError)]
    if problems:
        raise type(problems[0])("\n".join(str(answer) for answer in problems[:8]))
    host_answers = [answer for answer in answers if isinstance(answer, HostAnswer)]
    check_clocks(hosts, [answer.ahead for answer in host_answers])
    return host_answers


def collect_answers(hosts: Sequence[Host], prepared: str, meeting: str = "") -> list[HostAnswer | TrainwrightError]:
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
        f"test -x {python} || exit {_NO_PYTHON}\nexec {python} -P -c {shlex.quote(_PROBE)} {shlex.quote(meeting)}"
    )
    began = time.time()
    try:
        probe = subprocess.run(
            [*build_ssh_command(host), wrap_for_shell(script)],
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
        return _build_ssh_error(host, probe)
    clock, port, unknown = json.loads(probe.stdout.splitlines()[-1])
    if unknown:
        return RequestError(
            f"{host.name}: does not know the name {meeting} of the first host ({unknown}); use a name or an address "
            "that all hosts know: what the configuration of ssh calls a host is known to ssh alone"
        )
    return HostAnswer(clock - (began + time.time()) / 2, port)


def _build_ssh_error(host: Host, probe: subprocess.CompletedProcess[str]) -> TrainwrightError:
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


# The nodes of a run notice by themselves that one has ended; what has not noticed after this time is ended from here.
_ENDS_BY_ITSELF, _ENDS_AFTER_SIGNAL = 90.0, 60.0
# What has just been started again knows nothing of a run that is over.
_ENDS_AFTER_FIRST = 20.0
_SAME_REQUEST_SECONDS = 1.0
_AGAIN_SECONDS = 15.0
_KILLED, _SIGNALS = 128, 64  # a shell's code of a command that a signal killed is 128 and its number
_TELLS_SECONDS = 2.0

# Runs on the host. The names of signals arrive on its input; the input ends with the connection, however that ends. The
# last line tells the command's exit code: 255 is ssh's own, too.
_SUPERVISED = """exec 3<&0
{command} </dev/null 3<&- &
child=$!
{{ while read -r name <&3; do kill -s "$name" $child; done; kill -s TERM $child; }} >/dev/null 2>&1 &
reader=$!
wait $child
code=$?
kill $reader 2>/dev/null
echo {told}$code >&2
exit $code"""


def format_exports() -> str:
    """Return shell commands that set the variables of this process that decide how a run computes."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in capture_variables(os.environ).items())


@dataclass(frozen=True)
class HostsResult:
    """How a command has ended on all hosts: its exit code, and the hosts that were lost, with how.

    Attributes:
        stopped: whether a stop signal was passed on. A host that was lost then is no cause: 75 if the others stopped.
    """

    code: int
    lost: dict[Host, str]
    stopped: bool = False


def run_on(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], logs: Path, *, may_lose: bool = False
) -> HostsResult:
    """Run a command on each host to its end.

    The first host's output is shown as it is, that of the others with their names; all of it is appended to
    ``logs/host-NAME.log``. A stop signal is passed on; a second ctrl-C too, which kills.

    Args:
        may_lose: while the first host runs, the others may be lost: their commands are started again when they answer.
    """
    group = _Group([_Remote(host, command, logs) for host, command in zip(hosts, commands, strict=True)], may_lose)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
            signal.signal(number, group.pass_on)
    try:
        return group.wait()
    finally:
        group.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Remote:
    """The command on one host."""

    def __init__(self, host: Host, command: Sequence[str], logs: Path) -> None:
        self.host, self._command, self._logs = host, command, logs
        script = f"cd {shlex.quote(os.getcwd())} || exit 3\n{format_exports()}\n"
        marker = f"trainwright-{secrets.token_hex(8)}-ended-with-"
        self._told, self._ended = marker.encode(), False
        script += _SUPERVISED.format(command=shlex.join(command), told=marker)
        self.process = subprocess.Popen(
            [*build_ssh_command(host), wrap_for_shell(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a ctrl-C of the terminal is passed on, instead of ending the connection
        )
        self._log = (logs / f"host-{host.name}.log").open("ab", buffering=0)
        pipes = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._gather, args=pipe, daemon=True) for pipe in pipes]
        self.prefix = ""

    def start_again(self) -> _Remote:
        """Return the command, started once more."""
        self.hang_up()
        return _Remote(self.host, self._command, self._logs)

    @property
    def lost(self) -> str | None:
        """Say how the host or the command was lost; None if it runs or has ended by itself."""
        code = self.process.poll()
        if code is None or 0 <= code < _KILLED:
            return None
        if code > 0 and self._has_reported_end():
            return f"its command was killed (exit code {code})" if _KILLED < code <= _KILLED + _SIGNALS else None
        return "its connection was lost" if code == SSH_FAILED else f"its command was killed (exit code {code})"

    def _has_reported_end(self) -> bool:
        """Return whether the host has reported its command's exit code, which then is that of the connection too."""
        if not self._ended and self._threads[1].is_alive():
            self._threads[1].join(_TELLS_SECONDS)
        return self._ended

    def begin(self, prefix: str) -> None:
        """Begin to show the output, each line after ``prefix``."""
        self.prefix = prefix
        for thread in self._threads:
            thread.start()

    def send(self, name: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(f"{name}\n".encode())
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """End the connection; what is left of the command then gets SIGTERM."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(5)
        self._log.close()

    def _gather(self, pipe: IO[bytes], shown: TextIO | None) -> None:
        """Show and log each line; without what cannot be written, the rest is read all the same, or the host waits."""

        def show(line: bytes) -> None:
            if shown is not None:  # it was not closed before the command began
                shown.write(replace_unencodable(self.prefix + line.decode(errors="replace"), shown))
                shown.flush()

        targets: list[tuple[str, Callable[[bytes], object]]] = [("output", show), (self._log.name, self._log.write)]
        for read in pipe:
            line, marker, _ = read.partition(self._told)
            self._ended |= bool(marker)
            for target in tuple(targets) if line else ():
                name, write = target
                try:
                    write(line)
                except (OSError, ValueError) as error:
                    targets.remove(target)
                    if not self._log.closed:
                        with suppress(OSError, ValueError):
                            say(f"warning: {self.host.name}: {name} cannot be written: {error}", file=sys.stderr)


class _Group:
    def __init__(self, remotes: list[_Remote], may_lose: bool) -> None:
        self._remotes = remotes
        self._may_lose = may_lose
        self._signalled = 0.0
        self._missing: dict[int, float] = {}  # the hosts that were lost, and when they are tried again
        for i in range(len(remotes)):
            self._begin(i)

    def _begin(self, i: int) -> None:
        self._remotes[i].begin(f"{self._remotes[i].host.name}: " if i else "")

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to all hosts; the same one within a second is the same request."""
        now = time.monotonic()
        if now - self._signalled > _SAME_REQUEST_SECONDS:
            self._signalled = now
            self._send("INT" if number == signal.SIGINT else "TERM")

    def wait(self) -> HostsResult:
        """Wait for all; what is left long after one has failed is ended."""
        failed_at: float | None = None
        sent, patience = False, _ENDS_AFTER_FIRST if self._may_lose else _ENDS_BY_ITSELF
        while None in (codes := [remote.process.poll() for remote in self._remotes]):
            now = time.monotonic()
            if self._may_lose and codes[0] is None:
                self._replace(now)
            elif failed_at is None and (self._may_lose or any(codes)):
                failed_at = now
            if failed_at is not None and now - failed_at > patience and not sent:
                self._send("TERM")
                sent = True
            if failed_at is not None and now - failed_at > patience + _ENDS_AFTER_SIGNAL:
                break
            time.sleep(0.05)
        return self._ended()

    def _replace(self, now: float) -> None:
        """Start the commands of hosts that were lost once more, now and then."""
        for i, remote in enumerate(self._remotes):
            if i == 0 or remote.lost is None or self._signalled:
                continue
            if i not in self._missing:
                say(f"{remote.host.name}: {remote.lost}; it is tried again while the others go on", file=sys.stderr)
            if now >= self._missing.setdefault(i, now + _AGAIN_SECONDS):
                self._missing[i] = now + _AGAIN_SECONDS
                self._remotes[i] = remote.start_again()
                self._begin(i)

    def _ended(self) -> HostsResult:
        first = self._remotes[0]
        lost = {}
        for remote in self._remotes:
            how = "it did not end after the others" if remote.process.poll() is None else remote.lost
            if how is not None:
                lost[remote.host] = how
        stopped = self._signalled != 0
        if self._may_lose and first.host not in lost:
            return HostsResult(first.process.returncode, lost, stopped)
        for host, how in lost.items():
            say(f"{host.name}: {how}", file=sys.stderr)
        codes = [remote.process.returncode for remote in self._remotes if remote.host not in lost]
        if stopped and lost and codes and {*codes} <= {0, EXIT_STOPPED}:
            return HostsResult(EXIT_STOPPED, lost, stopped)
        return HostsResult(choose_exit_code([*codes, *(EXIT_FAULT for _ in lost)]), lost, stopped)

    def end(self) -> None:
        for remote in self._remotes:
            remote.hang_up()

    def _send(self, name: str) -> None:
        for remote in self._remotes:
            remote.send(name)


def choose_exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of a run from those of its hosts: a cause comes before what follows from it.

    A request or a failure that would occur again is the cause; a lost machine is what the other hosts see of one.
    """
    causes = [code for code in codes if code not in (0, EXIT_FAULT, EXIT_STOPPED)]
    if causes:
        return causes[0]
    return next((code for code in (EXIT_FAULT, EXIT_STOPPED) if code in codes), 0)


# A host whose command was killed, or that restarts its network, may answer again soon.
_RESTART_TRIES, _RESTART_TRY_SECONDS = 6, 10.0


class HostRestarts:
    """Decide whether and where a run is started again.

    Args:
        allowed: ``faults.restarts``.
        may_lose: whether the run can go on with some of its hosts.
        started_at: when it was started on them, in seconds since the epoch.
    """

    def __init__(self, run: Path, allowed: str, may_lose: bool, started_at: float) -> None:
        from trainwright.run.relaunch import Restarts  # imports torch

        self._run, self._may_lose = run, may_lose
        self._restarts = Restarts(run, allowed, started_at=started_at)

    def decide(self, hosts: Sequence[Host], lost: Mapping[Host, str]) -> tuple[list[Host], int]:
        """Return the hosts in their new order, those that answer first, and a free port of the first.

        Raises:
            FaultError: the run has been restarted too often, or too few hosts answer.
        """
        lost_hosts = "; ".join(f"{host.name}: {how}" for host, how in lost.items())
        decision = self._restarts.decide(Failure(f"{lost_hosts}; logs: {self._run}/logs", EXIT_FAULT, cause=Cause.NODE))
        if isinstance(decision, Failure):
            raise FaultError(decision.message)
        for _ in range(_RESTART_TRIES):
            answers = dict(zip(hosts, collect_answers(hosts, format_exports()), strict=True))
            reachable_hosts = [host for host, answer in answers.items() if isinstance(answer, HostAnswer)]
            if len(reachable_hosts) == len(hosts) or (reachable_hosts and self._may_lose):
                say(decision.line(), file=sys.stderr)
                with suppress(OSError):
                    append_event(self._run / "events.jsonl", decision)
                first = answers[reachable_hosts[0]]
                assert isinstance(first, HostAnswer), "it is there"
                return [*reachable_hosts, *(host for host in hosts if host not in reachable_hosts)], first.port
            time.sleep(_RESTART_TRY_SECONDS)
        missing = "; ".join(str(answer) for answer in answers.values() if not isinstance(answer, HostAnswer))
        raise FaultError(
            f"{lost_hosts}\nnot restarted: {missing}; resume the run on other hosts with --resume "
            f"{quote_word(self._run)}"
        )
