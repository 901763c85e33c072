"""The machine to simulate: NVIDIA GPUs with a datasheet, written as for ``trainwright plan --on``. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.machine.describe import Cluster, node_of
from trainwright.machine.machine import Machine
from trainwright.machine.machine_file import machine_of

MOST_RANKS = 16_384


def simulated_machine(text: str) -> Cluster:
    """Return the machine that ``--simulate`` describes.

    Raises:
        RequestError: the text is malformed, the card is unknown or cannot be trained on, or there are too many.
    """
    try:
        cluster = machine_of(text)[0]
    except RequestError as error:
        raise RequestError(f"--simulate: {error}") from None
    if cluster.planned_only is not None or cluster.device != "cuda":
        raise RequestError(
            f"--simulate: {text}: NVIDIA GPUs are simulated, such as 8xH100; training on {cluster.card.name} "
            f"{'needs no simulation' if cluster.device == 'cpu' else 'is not supported'}"
        )
    if cluster.devices > MOST_RANKS:
        fewer = f"{max(1, MOST_RANKS // cluster.devices_per_node)}x{cluster.devices_per_node}x{cluster.card.name}"
        raise RequestError(
            f"--simulate: {text}: at most {MOST_RANKS:,} GPUs are simulated, not {cluster.devices:,}; such as {fewer}"
        )
    return cluster


def write_machine(cluster: Cluster, file: Path) -> None:
    """Write a node of the cluster as ``trainwright machine --json`` would, for ``$TRAINWRIGHT_MACHINE``."""
    from pydantic import TypeAdapter

    node = TypeAdapter(Machine).dump_python(node_of(cluster), mode="json")
    file.write_text(json.dumps({"machine": node}), encoding="utf-8")
