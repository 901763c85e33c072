"""Check the network: interfaces, the name of this machine, and the port at which processes meet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.machine.cgroups import read_text

_INFINIBAND = Path("/sys/class/infiniband")
_SELECTING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_UNKNOWN_SPEED = 2**16 - 1  # Mb/s; what some drivers report instead
_ERRORS = 1e-4  # share of packets


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed``: megabits per second, None if unknown."""

    name: str
    is_up: bool
    has_carrier: bool
    addresses: tuple[str, ...]
    speed: int | None
    mtu: int
    failed: int
    packets: int

    def describe(self) -> str:
        """Describe it in one line."""
        state = "up" if self.is_alive else "dead: no carrier" if self.is_up else "down"
        rate = "" if self.speed is None else f", {self.speed / 1000:g} Gb/s"
        return f"{self.name} {state}{rate}, MTU {self.mtu}, {', '.join(self.addresses) or 'no address'}"

    @property
    def is_alive(self) -> bool:
        """Whether packets can leave through it."""
        return self.is_up and self.has_carrier


def check(context: CheckContext) -> CheckResult:
    """Check every interface that has an address or that a variable selects."""
    interfaces = _list_interfaces()
    selection = [name for variable in _SELECTING for name in _parse_names(context.variables.get(variable, ""))]
    shown_interfaces = [
        interface
        for interface in interfaces.values()
        if interface.name != "lo" and (interface.addresses or interface.name in selection)
    ]
    findings = (
        *_check_selections(context.variables, interfaces),
        *_check_dead(shown_interfaces),
        *_check_failing(shown_interfaces),
        *_check_machine_name(),
        *_check_adapters(),
    )
    facts = tuple(interface.describe() for interface in shown_interfaces)
    return CheckResult(facts or ("no interface but loopback",), findings)


def _list_interfaces() -> dict[str, Interface]:
    """Return the interfaces of this process's network namespace, which /sys may not show."""
    addresses, counters = psutil.net_if_addrs(), psutil.net_io_counters(pernic=True, nowrap=False)
    interfaces = {}
    for name, state in psutil.net_if_stats().items():
        flags, counts = state.flags.split(","), counters.get(name)
        interfaces[name] = Interface(
            name=name,
            is_up="up" in flags,
            has_carrier="running" in flags,
            addresses=tuple(address.address for address in addresses.get(name, ()) if address.family == socket.AF_INET),
            speed=state.speed if 0 < state.speed < _UNKNOWN_SPEED else None,
            mtu=state.mtu,
            failed=0 if counts is None else counts.errin + counts.errout,
            packets=0 if counts is None else counts.packets_recv + counts.packets_sent,
        )
    return interfaces


def _parse_names(selection: str) -> list[str]:
    """Return the names that a variable selects; prefixes that begin with ^ exclude, = is an exact match."""
    text = selection.strip()
    if text.startswith("^"):
        return []
    return [name.removeprefix("=").partition(":")[0] for name in text.removeprefix("=").split(",") if name]


def _check_selections(variables: Mapping[str, str], interfaces: Mapping[str, Interface]) -> Iterator[Finding]:
    for variable in _SELECTING:
        text = variables.get(variable, "")
        exact = variable != "NCCL_SOCKET_IFNAME" or text.strip().startswith("=")
        if variable != "NCCL_SOCKET_IFNAME" and text.strip().startswith(("^", "=")):
            what = f"{variable}={text}: only NCCL_SOCKET_IFNAME may begin with {text.strip()[0]}"
            why = "processes fail to start with `Unable to find address`"
            fix = f"set the interfaces to use: {variable}={_join_usable_names(interfaces) or 'INTERFACE'}"
            yield Finding(Severity.BROKEN, what, why, fix)
            continue
        for name in _parse_names(text):
            matches = [
                interface
                for interface in interfaces.values()
                if interface.name == name or (not exact and interface.name.startswith(name))
            ]
            choose = (
                f"set {variable} to one that is up ({_join_usable_names(interfaces) or 'there is none'}), or unset it"
            )
            if not matches:
                why = "processes fail to start with `no socket interface found` or `Unable to find address`"
                yield Finding(Severity.BROKEN, f"{variable}={text}: there is no interface {name}", why, choose)
            elif not any(interface.is_alive for interface in matches):
                why = "processes cannot connect through an interface that is down, and wait until a timeout"
                what = f"{variable}={text}: dead interface: {matches[0].describe()}"
                yield Finding(Severity.BROKEN, what, why, f"`ip link set {matches[0].name} up` (as root), or {choose}")


def _join_usable_names(interfaces: Mapping[str, Interface]) -> str:
    return ",".join(
        interface.name
        for interface in interfaces.values()
        if interface.is_alive and interface.addresses and interface.name != "lo"
    )


def _check_dead(interfaces: list[Interface]) -> Iterator[Finding]:
    for interface in interfaces:
        if interface.addresses and not interface.is_alive:
            yield Finding(
                Severity.WARNING,
                f"dead interface: {interface.describe()}",
                "it has an address, so NCCL and Gloo may choose it, and then connections fail",
                (
                    "plug in its cable, or check what it is connected to"
                    if interface.is_up
                    else f"`ip link set {interface.name} up`"
                )
                + f"; or exclude it: NCCL_SOCKET_IFNAME=^{interface.name},lo and GLOO_SOCKET_IFNAME=INTERFACE",
            )


def _check_failing(interfaces: list[Interface]) -> Iterator[Finding]:
    for one in interfaces:
        if one.packets and one.failed > _ERRORS * one.packets:
            what = f"{one.name} had errors in {one.failed / one.packets:.2%} of its packets since the machine started"
            why = "every lost packet is sent again, which delays collectives"
            fix = f"`ethtool -S {one.name}` says which; replace the cable, compare the MTU with the switch"
            yield Finding(Severity.WARNING, what, why, fix)


def _check_machine_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        what = f"the name of this machine, {name}, cannot be resolved: {error.strerror or error}"
        why = "programs that connect to their own machine by its name fail, torchrun among them"
        fix = f"add a line to /etc/hosts: ADDRESS {name}"
        yield Finding(Severity.WARNING, what, why, fix)
        return
    if address.startswith("127."):
        what = f"the name of this machine, {name}, resolves to the loopback interface ({address})"
        why = "with several nodes, a rendezvous at this name can be reached only from this machine"
        fix = f"name node 0 by its address (--rendezvous ADDRESS:PORT), or give {name} its address in /etc/hosts"
        yield Finding(Severity.NOTE, what, why, fix)


def _check_adapters(root: Path = _INFINIBAND) -> Iterator[Finding]:
    for state in sorted(root.glob("*/ports/*/state")):
        text = read_text(state).strip()
        physical = read_text(state.with_name("phys_state")).strip()
        if text and "ACTIVE" not in text and "Disabled" not in physical:
            adapter, port = state.parts[-4], state.parts[-2]
            what = f"dead interface: InfiniBand adapter {adapter}, port {port}, is {text.partition(': ')[2] or text}"
            why = "NCCL uses the others, or the slower Ethernet, without a message"
            fix = f"`ibstat {adapter}`: check the cable and the switch; or exclude it: NCCL_IB_HCA=^{adapter}"
            yield Finding(Severity.WARNING, what, why, fix)


_DEFAULT = 29500  # of torchrun and Accelerate
_LOOPBACK = "127.0.0.1"
_SECONDS = 5.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def check_ports(context: CheckContext) -> CheckResult:
    """Listen on every port for a moment, and exchange a byte over the loopback interface."""
    text = context.variables.get("MASTER_PORT", "").strip()
    chosen_ports = (int(text),) if text.isdigit() and 0 < int(text) < 65536 else ()
    explicit_ports = context.ports or chosen_ports
    ports = explicit_ports or (_DEFAULT,)
    severity = Severity.BROKEN if explicit_ports else Severity.WARNING
    busy = {port: holder for port in ports if (holder := _find_port_holder(port)) is not None}
    findings = [_describe_taken_port(port, holder, severity) for port, holder in busy.items()]
    free = [str(port) for port in ports if port not in busy]
    facts = [f"port {', '.join(free)} free"] if free else []
    return CheckResult(tuple(facts), (*findings, *_check_loopback()))


def _find_port_holder(port: int) -> str | None:
    """Return a description of what uses a port; None if it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            if error.errno == errno.EACCES:
                return "the system: only root may use ports below 1024"
            return _describe_program(port) if error.errno == errno.EADDRINUSE else f"the system: {error.strerror}"
    return None


def _describe_program(port: int) -> str:
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
            suffix = ", which is stopped" if process.status() in _STOPPED else ""
        except psutil.Error:
            continue
        return f"process {pid}{suffix}: {words}"
    return "a program of another user, whose name only root can see"


def _describe_taken_port(port: int, holder: str, severity: Severity) -> Finding:
    return Finding(
        severity,
        f"port {port} is taken by {holder}",
        "it is the rendezvous port of torchrun, Accelerate and several nodes, and the first process fails with "
        "`Address already in use`; a run of `trainwright train` on one machine chooses a free port itself",
        f"end that program if it is left over from a run, or choose another port: MASTER_PORT={port + 1}, --rendezvous "
        f"HOST:{port + 1}, torchrun --master-port, main_process_port of Accelerate",
    )


def _check_loopback() -> Iterator[Finding]:
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
        what = f"the loopback interface does not work: {problem}"
        why = "processes of one machine connect to each other at 127.0.0.1"
        fix = "`ip link set lo up` (as root), and allow connections from lo in the firewall"
        yield Finding(Severity.BROKEN, what, why, fix)
