"""Addresses at which the processes of a run meet: looked up, bound, and the network that leads there; IPv4 and IPv6."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

import psutil

from trainwright.errors import MachineError
from trainwright.utils.text import say

LOOPBACK = "127.0.0.1"
_LOOK_AGAIN_SECONDS = 1.0
# Addresses that no machine has (RFC 5737, RFC 3849).
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def format_address(address: str, port: int | str) -> str:
    """Return ``address:port``, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Return whether this is a literal or known loopback name; /etc/hosts may map the machine's name to it, too."""
    return address in ("localhost", "::1") or address.startswith("127.")


def resolve_own_address(
    address: str, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> tuple[socket.AddressFamily, str]:
    """Return the family and the number of this machine's ``address`` to bind to; "" is all addresses.

    A name may not be known yet: Kubernetes publishes those of pods some seconds after their start. And a machine's own
    name may resolve to loopback in its /etc/hosts, which other machines cannot reach.

    Args:
        seconds: how long to try.
        meanwhile: is called repeatedly, and may raise.

    Raises:
        MachineError: the name cannot be resolved.
    """
    deadline, is_shown = time.monotonic() + seconds, False
    while True:
        try:
            family, number = _look_up_address(address)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise MachineError(
                    f"cannot resolve the host name {address} within {seconds:g} s ({error}); correct it, or increase "
                    "--rendezvous-timeout"
                ) from None
            if not is_shown:
                say(f"cannot resolve the host name {address} yet ({error}); trying for {seconds:g} s", file=sys.stderr)
                is_shown = True
        else:
            return family, "" if _is_loopback_number(number) and not is_loopback(address) else number
        meanwhile()
        time.sleep(_LOOK_AGAIN_SECONDS)


def find_interface(address: str) -> str | None:
    """Return the name of this machine's network interface that leads to `address`, or None if unknown.

    If `address` is this machine's own name, which often resolves to loopback in /etc/hosts (127.0.1.1 on Debian), it is
    the interface of the default route, through which other machines connect.
    """
    try:
        family, number = _look_up_address(address)
        if _is_loopback_number(number) and not is_loopback(address):
            number = _ELSEWHERE[family]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((number, 9))  # sends nothing
            local_address = probe.getsockname()[0]
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(local_address == entry.address.partition("%")[0] for entry in entries):
            return name
    return None


def set_interfaces(address: str) -> None:
    """Set the network for gloo, and for NCCL if all processes are on one machine; the user's own values are kept."""
    interface = find_interface(address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if is_loopback(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _look_up_address(address: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and number of an address, IPv4 if it has one. Raises OSError."""
    address_infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    family, *_, socket_address = min(address_infos, key=lambda each: each[0] != socket.AF_INET)
    return family, str(socket_address[0])


def _is_loopback_number(number: str) -> bool:
    return number == "::1" or number.startswith("127.")
