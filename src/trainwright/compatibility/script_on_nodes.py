"""A user's own script on this machine as one of several nodes, whose workers start together and end together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from trainwright.run.group.addresses import in_words
from trainwright.run.group.environment import NodeRendezvous
from trainwright.run.node_launches import NodeLaunches, taking_part
from trainwright.run.nodes import LinkedStopping, NodeInfo, NodeRules, Nodes
from trainwright.run.shutdown.failure import Failure
from trainwright.run.supervisor import raise_failure, run_workers
from trainwright.utils.activity import Activity


def run_as_node(
    entry: Callable[[], int],
    command: str,
    processes: int,
    gpus: int,
    met: NodeRendezvous,
    make: Callable[[], Path],
    stopping: LinkedStopping,
) -> int:
    """Run ``entry`` in ``processes`` workers here, and in as many on each other node; return the exit code.

    Args:
        command: the same on all nodes.
        gpus: of this machine.
        make: returns the directory for logs, on node 0; the others write into one at the same path.

    Raises:
        TrainwrightError: the script failed on any node, or a node was lost.
    """
    mine = NodeInfo.here(processes, gpus, command, resume=False)
    rules = NodeRules(may_lose=False, on_hang="warn")
    with Activity(sys.stderr, f"waiting for the other nodes at {in_words(met.host, met.port)}"):
        nodes = Nodes.meet(met, mine, stopping, rules)
    with taking_part(nodes):
        logs = nodes.open(lambda: (make(), command), _made)
        launches = NodeLaunches(None, nodes, (processes * met.nodes,), lambda: processes, stopping)
        if here := launches.first():
            ended = run_workers(entry, processes=here, logs=logs, stopping=stopping, nodes=nodes)
            if not isinstance(ended, Failure):
                return ended
            if launches.leads:
                raise_failure(ended)
            launches.next()
        return launches.code


def _made(logs: Path, command: str, node: int) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs
