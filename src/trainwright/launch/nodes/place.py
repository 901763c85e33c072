"""Where several nodes meet: ``--nodes``, ``--node-rank`` and ``--rendezvous``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainwright.errors import RequestError
from trainwright.launch.group.environment import node_of_srun

_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\[\]:]+)):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class NodeRendezvous:
    """Where several nodes meet, the index of this one, and how long they wait for each other."""

    nodes: int
    node_rank: int
    host: str
    port: int
    seconds: float

    @classmethod
    def of(
        cls, nodes: int, node_rank: int | None, rendezvous: str | None, seconds: float | None
    ) -> NodeRendezvous | None:
        """Return the rendezvous that a command's options describe, or srun's variables in place of them; None for one
        node. Raises RequestError.
        """
        if nodes > 1 and node_rank is None and rendezvous is None:
            node_rank, rendezvous = node_of_srun(nodes) or (None, None)
        if nodes == 1:
            options = {"--rendezvous": rendezvous, "--node-rank": node_rank, "--rendezvous-timeout": seconds}
            if given := [name for name, value in options.items() if value is not None]:
                verb = "are" if len(given) > 1 else "is"
                raise RequestError(f"{' and '.join(given)} {verb} for several nodes; pass --nodes")
            return None
        if rendezvous is None:
            raise RequestError(
                f"--nodes {nodes} needs --rendezvous host:port, an address of node 0; the same on every node"
            )
        if node_rank is None:
            raise RequestError(f"--nodes {nodes} needs --node-rank: 0 to {nodes - 1}, another one on every node")
        if node_rank >= nodes:
            raise RequestError(f"--node-rank: nodes are counted from 0, so with {nodes} nodes the last is {nodes - 1}")
        host, port = parse_place(rendezvous)
        return cls(nodes, node_rank, host, port, seconds or 600.0)


def parse_place(text: str) -> tuple[str, int]:
    """Parse `--rendezvous host:port`. Raises RequestError."""
    found = _PLACE.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 2**16:
        raise RequestError(
            f"--rendezvous: {text!r} is not host:port, such as node0.example.org:29500, or [fd00::1]:29500 with IPv6"
        )
    return found[1] or found[2], int(found[3])
