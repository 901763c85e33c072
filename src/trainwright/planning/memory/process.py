"""Memory of a process that is not in tensors of the run: libraries, driver, workspaces, and what allocators hold
unused. Imports no torch.
"""

from __future__ import annotations

from trainwright.machine.allocator import compute_kept_limit
from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import CACHED_PRODUCTS, PADDED_SIZES, PRODUCT_BYTES
from trainwright.planning.memory.strategies import StrategyMemory
from trainwright.planning.memory.walk import Walk
from trainwright.planning.trace.units import SizedModel
from trainwright.planning.workload import Choice, Workload

_MIB = 2**20
# Memory of the driver and the libraries, including kernels and workspaces: 0.4 to 0.6 GiB on data-center cards.
_CUDA_CONTEXT = 512 * _MIB
# Of these, the workspaces that torch allocates for cuBLAS and counts as tensors: 64 MiB, measured on an H200. Before
# Hopper, not measured: 8.125 MiB (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8) for each thread, of the forward and of the
# backward pass.
_WORKSPACES, _WORKSPACES_BEFORE_HOPPER = 64 * _MIB, 2 * 8_519_680
WORKSPACES = "workspaces of matrix products"
SLACK = "allocator slack"
# Communicators with their channels, within and between nodes.
_NCCL_IN_NODE, _NCCL_BETWEEN_NODES = 350 * _MIB, 300 * _MIB
# Blocks that a GPU's allocator holds unused, as a share of temporary memory.
_CUDA_SLACK = 0.04
# Resident: Python, torch, transformers and the mapped code of both; torch's exchange between processes and its sharded
# tensors; PEFT, which adapters need, and of whose code DeepSpeed needs most too. All measured.
_PROCESS, _EXCHANGE, _SHARDED, _PEFT = 378 * _MIB, 8 * _MIB, 20 * _MIB, 60 * _MIB
_HEAP = 160 * _MIB  # of the process, what is in use in the heap
# Of a thread's arena, where the copies that gloo gathers into stay; larger ones are in the process's own (malloc(3)).
_ARENA = 64 * _MIB
_TRIMMED = 256 * _MIB  # of free memory at the end of the heap, what glibc does not return (run/process.py)
# The part of freed memory that serves no others, as small blocks live on in it: measured as the growth of the heap. It
# is so once more where the sizes of batches or of gathered parameters vary, or blocks are recomputed. Otherwise a
# backward pass frees in the reverse order of the forward pass.
_SETTLED = 0.6


def estimate_overhead(
    workload: Workload,
    cluster: Cluster,
    model: StrategyMemory,
    walk: Walk,
    lasting: int,
    temporary: int,
    trace: SizedModel,
) -> dict[str, int]:
    """Return the overhead by name.

    Args:
        lasting: the bytes of tensors that last from step to step.
        temporary: the most bytes of others.
        trace: of the largest micro-batch.
    """
    choice = model.choice
    parts = estimate_libraries(workload, choice, cluster)
    if cluster.device != "cpu":
        return {**parts, SLACK: int(_CUDA_SLACK * temporary)}
    has_product_code = choice.width == 2 and "bf16" in cluster.card.rates
    products = _estimate_product_code(workload, choice, trace) if has_product_code else 0
    slack, copy_bytes = {SLACK: _estimate_unused(workload, model, walk, lasting, temporary)}, model.copied()
    other_parts = {"copies of the exchange": copy_bytes if copy_bytes <= _ARENA else 0, "code of products": products}
    return {**parts, **slack, **{name: size for name, size in other_parts.items() if size}}


def estimate_libraries(workload: Workload, choice: Choice, cluster: Cluster) -> dict[str, int]:
    """Return the bytes of the process, the driver and the libraries, by name."""
    several = choice.num_processes > 1
    if cluster.device == "cpu":
        library = choice.spec.library
        optional = max(_PEFT * bool(workload.model.adapter), library.process_bytes if library else 0)
        size = _PROCESS + _EXCHANGE * several + _SHARDED * choice.spec.gathers_blocks + optional
        return {"process and libraries": size}
    between = choice.num_processes > cluster.devices_per_node
    nccl = _NCCL_IN_NODE * several + _NCCL_BETWEEN_NODES * between
    workspaces = _WORKSPACES if (cluster.card.capability or (0, 0)) >= (9, 0) else _WORKSPACES_BEFORE_HOPPER
    return {
        "CUDA context": _CUDA_CONTEXT - workspaces,
        WORKSPACES: workspaces,
        **({"NCCL buffers": nccl} if nccl else {}),
    }


def _estimate_unused(workload: Workload, model: StrategyMemory, walk: Walk, lasting: int, temporary: int) -> int:
    """Return the bytes of freed memory that a CPU process keeps.

    Small blocks that live on settle in what a pass has freed, so the blocks of the next one need more. Where the
    model's blocks begin and have ended, free memory is returned if too much of it is kept (machine/allocator.py); what
    a recomputed block frees comes on top. Compiled blocks return nothing, but glibc the end of the heap; a block of the
    next size does not fit where the largest was, and with gathered parameters that happens twice in a step.
    """
    choice, inventory = model.choice, model.inventory
    rows_vary = not workload.packed and workload.mean_length < workload.longest
    recomputes = choice.activation_checkpointing not in ("none", "selective")
    varied = rows_vary or recomputes or choice.spec.hooks_modules
    if not choice.compile:
        limit = compute_kept_limit(_HEAP + lasting + walk.most_between_blocks)
        in_block = int(_SETTLED * recomputes * max(walk.forward.working_set, walk.backward.working_set))
        return min(int(_SETTLED * temporary * (1 + varied)), limit + in_block)
    shards = choice.spec.shards_parameters
    gathered_bytes = choice.width * inventory.largest if shards else 0
    largest = max(walk.forward.working_set, 4 * inventory.largest_trained, gathered_bytes)
    unreturned_bytes = min(temporary, max(_TRIMMED, largest))
    return unreturned_bytes + max(int(_SETTLED * unreturned_bytes * varied), shards * min(temporary, largest))


def _estimate_product_code(workload: Workload, choice: Choice, model: SizedModel) -> int:
    """Return the bytes of oneDNN's code for the run's products, each of which has its own (models/linear_losses.py)."""
    passes = [part for unit in model.units for part in (unit.forward, unit.backward)]
    products = {(o.m, o.n, o.k) for part in passes for o in part.operations if o.kind == "product" and o.width == 2}
    sizes = PADDED_SIZES  # of batches of varied lengths
    if workload.longest == workload.mean_length:
        sizes = 1
    elif workload.steps is not None:
        sizes = min(sizes, workload.steps * choice.gradient_accumulation_steps)
    return PRODUCT_BYTES * min(CACHED_PRODUCTS, sizes * len(products))
