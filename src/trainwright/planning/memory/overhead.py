"""What a process takes beside the tensors of its run, and what of those is in the host's memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.machine.describe import Cluster
from trainwright.planning.workload import Choice

_MIB = 2**20
# The driver's and the libraries' own, kernels and workspaces among it: 0.4 to 0.6 GiB on data-centre cards.
_CUDA_CONTEXT = 512 * _MIB
# Communicators with their channels, by what they reach.
_NCCL_IN_NODE, _NCCL_BETWEEN_NODES = 350 * _MIB, 300 * _MIB
# Blocks that the allocator holds and nobody fills, as a part of what comes and goes.
_SLACK = {"cuda": 0.04, "cpu": 0.02}
# Resident: Python, torch, transformers and the mapped code of both.
_PROCESS = 380 * _MIB


def overhead(choice: Choice, cluster: Cluster, lasting: int, most: int) -> dict[str, int]:
    """By name. ``lasting``: bytes of tensors that stay from step to step, ``most``: of the fullest moment."""
    slack = {"allocator slack": int(_SLACK[cluster.device] * max(0, most - lasting))}
    if cluster.device == "cpu":
        library = choice.spec.library
        return {"process and libraries": _PROCESS + (library.process_bytes if library else 0), **slack}
    several = choice.num_processes > 1
    between = choice.num_processes > cluster.devices_per_node
    nccl = _NCCL_IN_NODE * several + _NCCL_BETWEEN_NODES * between
    return {"CUDA context": _CUDA_CONTEXT, **({"NCCL buffers": nccl} if nccl else {}), **slack}


def divided(choice: Choice, cluster: Cluster, base: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Divide ``base``, what stays from step to step, between the device and the host's memory, as a strategy places
    it.
    """
    if cluster.device == "cpu":
        return dict(base), {}
    moved = choice.offloaded
    host = {name: count for name, count in base.items() if name in moved and count}
    return {name: 0 if name in moved else count for name, count in base.items()}, host


def loading(choice: Choice, numel: int) -> int:
    """Bytes in the host's memory while a process reads its weights: fp32, whole or its own part of them."""
    return -(-4 * numel // choice.shards) if choice.spec.shards_parameters else 4 * numel
