"""What a node reports before anything is created, and what has to be the same on all nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright import __version__
from trainwright.errors import MachineError, RequestError
from trainwright.run import run_directory
from trainwright.utils.paths import appears


@dataclass(frozen=True)
class NodeInfo:
    """What a node reports before anything is created; all fields but `host` must be the same on all nodes.

    `processes`: how many it is to run at most.
    """

    host: str
    processes: int
    gpus: int
    recipe: str
    resume: bool
    version: str = __version__

    @classmethod
    def here(cls, processes: int, gpus: int, recipe: str, resume: bool) -> NodeInfo:
        """Describe this node."""
        return cls(socket.gethostname(), processes, gpus, recipe, resume)


def check_same(nodes: Mapping[int, NodeInfo]) -> None:
    """Raise an error that names a node that differs from node 0."""
    for index in nodes:
        check_machine(nodes[0], index, nodes[index])
    for index in nodes:
        _check_request(nodes[0], index, nodes[index])


def check_machine(first: NodeInfo, index: int, node: NodeInfo) -> None:
    """Raise MachineError if the machine or the installation of a node differs from that of node 0."""
    if node.version != first.version:
        raise MachineError(
            f"node 0 ({first.host}) has trainwright {first.version}, and node {index} ({node.host}) has "
            f"{node.version}; install the same on both"
        )
    if node.gpus != first.gpus:
        raise MachineError(
            f"all nodes must have the same number of GPUs: node 0 ({first.host}) has {first.gpus} and node "
            f"{index} ({node.host}) has {node.gpus}; hide the others with CUDA_VISIBLE_DEVICES"
        )


def _check_request(first: NodeInfo, index: int, node: NodeInfo) -> None:
    if (node.processes, node.recipe, node.resume) != (first.processes, first.recipe, first.resume):
        raise RequestError(
            f"node {index} ({node.host}) was started with another recipe, other overrides or other options than "
            f"node 0 ({first.host}); only --node-rank may differ"
        )


def visible(run: Path, recipe: str, node: int) -> Path:
    """Return the run directory. Raises MachineError if ``node``, this one, does not see it with this recipe."""
    if not appears(run / run_directory.RECIPE, recipe):
        raise MachineError(
            f"node {node} ({socket.gethostname()}) does not see the run directory {run}, which node 0 "
            "created; set logging.run_directory to a file system that all nodes share"
        )
    return run
