"""The machine to simulate: NVIDIA GPUs with a datasheet, written as for ``trainwright plan --on``. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.machine.describe import Cluster, node_of
from trainwright.machine.machine import Machine
from trainwright.machine.machine_file import machine_of

MOST_RANKS = 16_384


def simulated_machine(text: str) -> Cluster:
    """Return the machine that ``--simulate`` describes, with the GPUs of each node that CUDA_VISIBLE_DEVICES leaves.

    Empty, the variable hides the GPUs of this machine, and none of the simulated ones.

    Raises:
        RequestError: the text is malformed, the card is unknown or cannot be trained on, or there are too many; or
            CUDA_VISIBLE_DEVICES names one that is not there.
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
    return visible_part(cluster)


def visible_part(cluster: Cluster) -> Cluster:
    """Return the cluster with those GPUs of each node that CUDA_VISIBLE_DEVICES names. Raises RequestError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible in ("", "-1"):
        return cluster
    names = [name.strip() for name in visible.split(",")]
    count = cluster.devices_per_node
    if absent := [name for name in names if not name.isdigit() or int(name) >= count]:
        raise RequestError(
            f"--simulate: CUDA_VISIBLE_DEVICES names {', '.join(absent)}, but {cluster.name} has the GPUs 0 to "
            f"{count - 1} on each node; unset it, or name some of these"
        )
    return replace(cluster, devices_per_node=len(set(names)))


def write_machine(cluster: Cluster, file: Path) -> None:
    """Write a node of the cluster as ``trainwright machine --json`` would, for ``$TRAINWRIGHT_MACHINE``."""
    from pydantic import TypeAdapter

    node = TypeAdapter(Machine).dump_python(node_of(cluster), mode="json")
    file.write_text(json.dumps({"machine": node}), encoding="utf-8")
