"""Run one command on several hosts over ssh: output gathered, signals passed on, ended together, started again."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from trainwright.clusters.hosts.names import SSH_FAILED, Host, HostAnswer, answers_of, in_shell, ssh
from trainwright.clusters.job import captured
from trainwright.engine.events import append_event
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, FaultError
from trainwright.run.relaunch import Restarts
from trainwright.run.shutdown.failure import Cause, Failure
from trainwright.run.shutdown.stop import STOP_SIGNALS
from trainwright.utils.text import encodable, quoted, say

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


def exports() -> str:
    """Return shell commands that set the variables of this process that decide how a run computes."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in captured(os.environ).items())


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
        script = f"cd {shlex.quote(os.getcwd())} || exit 3\n{exports()}\n"
        marker = f"trainwright-{secrets.token_hex(8)}-ended-with-"
        self._told, self._ended = marker.encode(), False
        script += _SUPERVISED.format(command=shlex.join(command), told=marker)
        self.process = subprocess.Popen(
            [*ssh(host), in_shell(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a ctrl-C of the terminal is passed on, instead of ending the connection
        )
        self._log = (logs / f"host-{host.name}.log").open("ab", buffering=0)
        pipes = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._gather, args=pipe, daemon=True) for pipe in pipes]
        self.prefix = ""

    def restarted(self) -> _Remote:
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
        """Send a signal to the command."""
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
                shown.write(encodable(self.prefix + line.decode(errors="replace"), shown))
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
        failed: float | None = None
        sent, patience = False, _ENDS_AFTER_FIRST if self._may_lose else _ENDS_BY_ITSELF
        while None in (codes := [each.process.poll() for each in self._remotes]):
            now = time.monotonic()
            if self._may_lose and codes[0] is None:
                self._replace(now)
            elif failed is None and (self._may_lose or any(codes)):
                failed = now
            if failed is not None and now - failed > patience and not sent:
                self._send("TERM")
                sent = True
            if failed is not None and now - failed > patience + _ENDS_AFTER_SIGNAL:
                break
            time.sleep(0.05)
        return self._ended()

    def _replace(self, now: float) -> None:
        """Start the commands of hosts that were lost once more, now and then."""
        for i, each in enumerate(self._remotes):
            if i == 0 or each.lost is None or self._signalled:
                continue
            if i not in self._missing:
                say(f"{each.host.name}: {each.lost}; it is tried again while the others go on", file=sys.stderr)
            if now >= self._missing.setdefault(i, now + _AGAIN_SECONDS):
                self._missing[i] = now + _AGAIN_SECONDS
                self._remotes[i] = each.restarted()
                self._begin(i)

    def _ended(self) -> HostsResult:
        first = self._remotes[0]
        lost = {}
        for each in self._remotes:
            how = "it did not end after the others" if each.process.poll() is None else each.lost
            if how is not None:
                lost[each.host] = how
        stopped = self._signalled != 0
        if self._may_lose and first.host not in lost:
            return HostsResult(first.process.returncode, lost, stopped)
        for host, how in lost.items():
            say(f"{host.name}: {how}", file=sys.stderr)
        codes = [each.process.returncode for each in self._remotes if each.host not in lost]
        if stopped and lost and codes and {*codes} <= {0, EXIT_STOPPED}:
            return HostsResult(EXIT_STOPPED, lost, stopped)
        return HostsResult(exit_code([*codes, *(EXIT_FAULT for _ in lost)]), lost, stopped)

    def end(self) -> None:
        """End all connections."""
        for each in self._remotes:
            each.hang_up()

    def _send(self, name: str) -> None:
        for each in self._remotes:
            each.send(name)


def exit_code(codes: Sequence[int]) -> int:
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
            answers = dict(zip(hosts, answers_of(hosts, exports()), strict=True))
            there = [host for host, answer in answers.items() if isinstance(answer, HostAnswer)]
            if len(there) == len(hosts) or (there and self._may_lose):
                say(decision.line(), file=sys.stderr)
                with suppress(OSError):
                    append_event(self._run / "events.jsonl", decision)
                first = answers[there[0]]
                assert isinstance(first, HostAnswer), "it is there"
                return [*there, *(host for host in hosts if host not in there)], first.port
            time.sleep(_RESTART_TRY_SECONDS)
        missing = "; ".join(str(answer) for answer in answers.values() if not isinstance(answer, HostAnswer))
        raise FaultError(
            f"{lost_hosts}\nnot restarted: {missing}; resume the run on other hosts with --resume {quoted(self._run)}"
        )
