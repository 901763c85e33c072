"""Options that say which machines train together, of the commands that start processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        "--num-machines",
        min=1,
        max=100_000,
        help="Number of machines that work together; run the command on each.",
    ),
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", "--machine-rank", min=0, help="Rank of this node, from 0.")
]
Rendezvous = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of node 0 for the rendezvous.")]
RendezvousTimeout = Annotated[
    float | None, typer.Option(min=1, metavar="SECONDS", help="Seconds to wait for the other nodes. Default: 600.")
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS", help="Start it on these machines together, over ssh, from here: node1,node2 or node[1-4]."
    ),
]
HostFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The same with hosts from a file: a host a line, or `node1 slots=8`."),
]
