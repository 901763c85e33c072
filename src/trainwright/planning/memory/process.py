"""Memory of a process that is not in tensors of the run: libraries, driver, workspaces, and what allocators hold
unused. Imports no torch.
"""

from __future__ import annotations

from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import CACHED_PRODUCTS, PRODUCT_BYTES
from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.memory.walk import Walk
from trainwright.planning.workload import Choice, Workload

_MIB = 2**20
# Memory of the driver and the libraries, including kernels and workspaces: 0.4 to 0.6 GiB on data-center cards.
_CUDA_CONTEXT = 512 * _MIB
# Of these, the workspaces that torch allocates for cuBLAS and counts as tensors: 64 MiB, measured on an H200. Before
# Hopper, not measured: 8.125 MiB (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8) for each thread, of the forward and of the
# backward pass.
_WORKSPACES, _WORKSPACES_BEFORE_HOPPER = 64 * _MIB, 2 * 8_519_680
WORKSPACES = "workspaces of matrix products"
# Communicators with their channels, within and between nodes.
_NCCL_IN_NODE, _NCCL_BETWEEN_NODES = 350 * _MIB, 300 * _MIB
# Blocks that a GPU's allocator holds unused, as a share of temporary memory.
_CUDA_SLACK = 0.04
# Resident: Python, torch, transformers and the mapped code of both; PEFT, which adapters need.
_PROCESS, _PEFT = 400 * _MIB, 40 * _MIB


def overhead(
    workload: Workload, choice: Choice, cluster: Cluster, inventory: Inventory, walk: Walk, temporary: int
) -> dict[str, int]:
    """Return the overhead by name. ``temporary``: the most bytes of tensors that do not last from step to step."""
    on_cpu = cluster.device == "cpu"
    unused = _unused(choice, inventory, walk, temporary) if on_cpu else int(_CUDA_SLACK * temporary)
    slack = {"allocator slack": unused}
    products = {"code of products": CACHED_PRODUCTS * PRODUCT_BYTES} if on_cpu and choice.width == 2 else {}
    return {**libraries(workload, choice, cluster), **slack, **products}


def libraries(workload: Workload, choice: Choice, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of the process, the driver and the libraries, by name."""
    if cluster.device == "cpu":
        library = choice.spec.library
        optional = _PEFT * bool(workload.model.adapter) + (library.process_bytes if library else 0)
        return {"process and libraries": _PROCESS + optional}
    several = choice.num_processes > 1
    between = choice.num_processes > cluster.devices_per_node
    nccl = _NCCL_IN_NODE * several + _NCCL_BETWEEN_NODES * between
    workspaces = _WORKSPACES if (cluster.card.capability or (0, 0)) >= (9, 0) else _WORKSPACES_BEFORE_HOPPER
    return {
        "CUDA context": _CUDA_CONTEXT - workspaces,
        WORKSPACES: workspaces,
        **({"NCCL buffers": nccl} if nccl else {}),
    }


def _unused(choice: Choice, inventory: Inventory, walk: Walk, temporary: int) -> int:
    """Return the bytes of freed memory that a CPU process keeps (machine/allocator.py).

    A block of the next size does not fit where the largest was; with gathered parameters that happens twice in a step.
    """
    shards = choice.spec.shards_parameters
    gathered = choice.width * inventory.largest if shards else 0
    largest = max(walk.forward.working_set, 4 * inventory.largest_trained, gathered)
    return min(temporary, largest) * (1 + shards)
