"""Networks of their own for the nodes of a cluster on this machine: as far apart as machines that share their disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str | None:
    """Why nodes cannot have networks of their own here; None if they can."""
    missing = [name for name in ("ip", "nsenter") if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install iproute2 util-linux)"
    name = f"t{os.getpid()}try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return None


class Networks:
    """A network namespace for each of these names, on a bridge of this machine; ``close`` removes them.

    Attributes:
        addresses: of the nodes, in their order.
        controller: this machine's address on the bridge.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        net = _free_net()
        self._bridge, self.controller = f"tw{net}b", f"10.213.{net}.1"
        self.addresses = [f"10.213.{net}.{11 + i}" for i in range(len(nodes))]
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.controller}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for i, (node, address) in enumerate(zip(nodes, self.addresses, strict=True)):
                link = f"tw{net}n{i}"
                _ip("netns", "add", node)
                _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", node)
                _ip("link", "set", link, "master", self._bridge, "up")
                _ip("-n", node, "link", "set", "lo", "up")
                _ip("-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", node, "link", "set", "eth0", "up")
                _ip("-n", node, "route", "add", "default", "via", self.controller)
        except subprocess.CalledProcessError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the namespaces and the bridge."""
        for words in (*(("netns", "del", node) for node in self._nodes), ("link", "del", self._bridge)):
            with suppress(subprocess.CalledProcessError):
                _ip(*words)


def _free_net() -> int:
    """The third number of a /24 network that no interface of this machine is in."""
    taken = {each["local"] for link in json.loads(_ip("-j", "addr")) for each in link.get("addr_info", ())}
    start = os.getpid() % 200
    return next(n for n in (*range(start, 250), *range(start)) if f"10.213.{n}.1" not in taken)


def _ip(*words: str) -> str:
    command = ["ip", *words]
    return subprocess.run(command, env={**os.environ, "PATH": _PATH}, capture_output=True, text=True, check=True).stdout
