"""Memory of a process in addition to its tensors, and its division between device and host. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.machine.describe import Cluster
from trainwright.planning.workload import Choice

_MIB = 2**20
# Memory of the driver and the libraries, including kernels and workspaces: 0.4 to 0.6 GiB on data-centre cards.
_CUDA_CONTEXT = 512 * _MIB
# Communicators with their channels, within and between nodes.
_NCCL_IN_NODE, _NCCL_BETWEEN_NODES = 350 * _MIB, 300 * _MIB
# Blocks that the allocator holds unused, as a share of temporary memory.
_SLACK = {"cuda": 0.04, "cpu": 0.02}
# Resident: Python, torch, transformers and the mapped code of both.
_PROCESS = 380 * _MIB


def overhead(choice: Choice, cluster: Cluster, lasting: int, most: int) -> dict[str, int]:
    """Return the overhead by name. ``lasting``: bytes of tensors kept between steps, ``most``: bytes at the peak."""
    slack = {"allocator slack": int(_SLACK[cluster.device] * max(0, most - lasting))}
    if cluster.device == "cpu":
        library = choice.spec.library
        return {"process and libraries": _PROCESS + (library.process_bytes if library else 0), **slack}
    several = choice.num_processes > 1
    between = choice.num_processes > cluster.devices_per_node
    nccl = _NCCL_IN_NODE * several + _NCCL_BETWEEN_NODES * between
    return {"CUDA context": _CUDA_CONTEXT, **({"NCCL buffers": nccl} if nccl else {}), **slack}


def divided(choice: Choice, cluster: Cluster, base: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Divide ``base``, the memory kept between steps, into device and host memory according to the strategy."""
    if cluster.device == "cpu":
        return dict(base), {}
    moved = choice.offloaded
    host = {name: count for name, count in base.items() if name in moved and count}
    return {name: 0 if name in moved else count for name, count in base.items()}, host


def loading(choice: Choice, numel: int) -> int:
    """Return the host bytes while a process reads its weights: fp32, in full or its own shard."""
    return -(-4 * numel // choice.shards) if choice.spec.shards_parameters else 4 * numel
