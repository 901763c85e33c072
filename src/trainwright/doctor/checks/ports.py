"""Check that the rendezvous port is free, and that this machine can connect to itself."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import psutil

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity

_DEFAULT = 29500  # of torchrun and Accelerate
_LOOPBACK = "127.0.0.1"
_SECONDS = 5.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def check(context: CheckContext) -> CheckResult:
    """Listen on every port for a moment, and exchange a byte over the loopback interface."""
    chosen = context.ports or _from_variables(context)
    ports = chosen or (_DEFAULT,)
    severity = Severity.BROKEN if chosen else Severity.WARNING
    busy = {port: holder for port in ports if (holder := _holder(port)) is not None}
    findings = [_taken(port, holder, severity) for port, holder in busy.items()]
    free = [str(port) for port in ports if port not in busy]
    facts = [f"port {', '.join(free)} free"] if free else []
    return CheckResult(tuple(facts), (*findings, *_loopback()))


def _from_variables(context: CheckContext) -> tuple[int, ...]:
    text = context.variables.get("MASTER_PORT", "").strip()
    return (int(text),) if text.isdigit() and 0 < int(text) < 65536 else ()


def _holder(port: int) -> str | None:
    """Return a description of what uses a port; None if it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            if error.errno == errno.EACCES:
                return "the system: only root may use ports below 1024"
            return _program(port) if error.errno == errno.EADDRINUSE else f"the system: {error.strerror}"
    return None


def _program(port: int) -> str:
    try:
        connections = [
            c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"
        ]
    except psutil.Error:
        connections = []
    for pid in (connection.pid for connection in connections if connection.pid):
        try:
            process = psutil.Process(pid)
            words = " ".join(process.cmdline())[:100] or process.name()
            stopped = ", which is stopped" if process.status() in _STOPPED else ""
        except psutil.Error:
            continue
        return f"process {pid}{stopped}: {words}"
    return "a program of another user, whose name only root can see"


def _taken(port: int, holder: str, severity: Severity) -> Finding:
    return Finding(
        severity,
        f"port {port} is taken by {holder}",
        "it is the rendezvous port of torchrun, Accelerate and several nodes, and the first process fails with "
        "`Address already "
        "in use`; a run of `trainwright train` on one machine chooses a free port itself",
        f"end that program if it is left over from a run, or choose another port: MASTER_PORT={port + 1}, --rendezvous "
        f"HOST:{port + 1}, torchrun --master-port, main_process_port of Accelerate",
    )


def _loopback() -> Iterator[Finding]:
    try:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            listener.settimeout(_SECONDS)
            with socket.create_connection(listener.getsockname(), timeout=_SECONDS) as client:
                server, _ = listener.accept()
                with server:
                    server.settimeout(_SECONDS)
                    client.sendall(b"x")
                    problem = None if server.recv(1) == b"x" else "nothing arrives"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is not None:
        yield Finding(
            Severity.BROKEN,
            f"the loopback interface does not work: {problem}",
            "processes of one machine connect to each other at 127.0.0.1",
            "`ip link set lo up` (as root), and allow connections from lo in the firewall",
        )
