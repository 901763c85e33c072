"""Predict the memory that a choice needs on the fullest device, by part and by phase. Imports no torch.

The live bytes of tensors follow from the model's operations and the strategy's tensors at each moment; the memory of
the process, the driver and the libraries is listed separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import CACHED_ELEMENTS, CACHED_PRODUCTS, PRODUCT_BYTES, padded_size
from trainwright.planning.memory.inventory import (
    Inventory,
    by_unit,
    first_blocks,
    inventory,
    optimizer_state,
    partly_trained,
)
from trainwright.planning.memory.strategies import StrategyMemory, memory_model, orthogonalizing
from trainwright.planning.memory.walk import Allocated, Moved, Peak, Walk
from trainwright.planning.operations import BatchShape, PassSettings, passes
from trainwright.planning.operations.launches import excess_when_pinned
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.registries import OPTIMIZERS

# models/quantization.py: number of elements that are quantized at once, and the approximate bytes that each needs.
_QUANTIZED, _QUANTIZING = 2**20, 23
_PLACES = 256  # rows whose lengths are read one by one
_MIB = 2**20
LOADING = "weights while loading"
COPY = "copy of the state for checkpoints"
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


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that needs most.

    ``parts``: live tensors at the peak of the run, by purpose. ``phases``: the peak of live tensors in each phase:
    load, forward, backward, optimizer, evaluation, checkpoint. ``overhead``: memory that is not in tensors of the run.
    ``host``: memory on the host, for a process that computes on a GPU.
    """

    parts: Mapping[str, int]
    phases: Mapping[str, int]
    overhead: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def tensors(self) -> int:
        """The peak of live tensors."""
        return max(self.phases.values())

    @property
    def allocated(self) -> int:
        """What torch's allocator counts at the peak: tensors, and on a GPU workspaces of libraries."""
        return self.tensors + self.overhead.get(WORKSPACES, 0)

    @property
    def total(self) -> int:
        """The peak of live tensors plus the overhead."""
        return self.tensors + sum(self.overhead.values())


def micro_batch(workload: Workload, choice: Choice, later: bool = False) -> BatchShape:
    """Return the largest micro-batch of a process; with ``later``, of those after the first of their step.

    Padded rows are sorted (data/stream/stream.py), the longest first; packs fill the last micro-batch only partly.
    """
    rows, row, longest = choice.micro_batch_size, workload.row_tokens, workload.longest
    mean = max(1, round(workload.mean_length))
    if not workload.packed:
        # Rows of similar length share a micro-batch: the fullest one has the longest rows.
        first = rows * choice.num_processes if later else 0
        longest = workload.length_at(first) or longest
        masked = rows > 1 and mean < longest
        targets = workload.targets(_filled(workload, first, rows), rows)
        return BatchShape(rows, longest, ((longest, rows),), targets, packed=False, masked=masked)
    tokens = rows * row
    if later and choice.gradient_accumulation_steps == 2 and workload.most_batch_tokens is not None:
        # The tokens that the packs of the first pass leave over.
        remaining_tokens = workload.most_batch_tokens - choice.num_processes * tokens
        tokens = min(tokens, max(round(remaining_tokens), mean))
    longest = min(longest, tokens)
    others, rest = divmod(tokens - longest, mean)
    sequences = [(mean, others), (longest, 1), (rest, 1)]
    remaining = tuple((length, count) for length, count in sequences if length and count)
    return BatchShape(
        1, tokens, remaining, workload.targets(tokens, sum(n for _, n in remaining)), packed=True, masked=False
    )


def _padded(batch: BatchShape, padded: bool) -> BatchShape:
    """Return the batch as half-precision products on a CPU compute it (models/padding.py)."""
    return replace(batch, length=padded_size(batch.length)) if padded else batch


def _filled(workload: Workload, first: int, rows: int) -> int:
    """Return the tokens, without padding, of ``rows`` padded rows from index ``first`` of the global batch."""
    lengths = [workload.length_at(first + row) for row in range(min(rows, _PLACES))]
    known = [length for length in lengths if length is not None]
    if known:
        return round(sum(known) / len(known) * rows)
    share = min(1.0, rows / max(1.0, workload.global_batch_rows))
    return round(rows * (workload.longest - share * (workload.longest - max(1, round(workload.mean_length)))))


def memory_of(workload: Workload, choice: Choice, cluster: Cluster, stack: Stack = OWN) -> Memory:
    """Return the memory that ``choice`` needs for ``workload`` on a device of ``cluster``; ``stack``: the program."""
    padded = cluster.device == "cpu" and choice.width == 2 and stack is OWN
    batch = _padded(micro_batch(workload, choice), padded)
    setting = PassSettings.of(workload, choice, batch, cluster, stack)
    trained_inventory = partly_trained(
        inventory(
            workload.architecture, setting.width, setting.trainable, setting.adapter, setting.quantization, stack
        ),
        workload.trained,
    )
    recompute = _recomputed(choice, cluster)
    parts = passes(setting, recompute)
    after = parts
    if choice.gradient_accumulation_steps > 1:
        batch = _padded(micro_batch(workload, choice, later=True), padded)
        after = passes(replace(setting, batch=batch), recompute)
    moved = _moved(choice, cluster)
    frozen = choice.spec.gathers_blocks and setting.adapter is not None
    holds = stack.holds_inputs and frozen and choice.activation_checkpointing == "full"
    walk = Walk(
        parts,
        after,
        tied=workload.architecture.tied,
        width=setting.width,
        moved=moved,
        holds=holds,
        fetches_ahead=stack.fetches_ahead,
        cached=_cached(setting),
        trained=workload.trained,
        counts=by_unit(trained_inventory),
        before=_returned(setting),
    )
    model = memory_model(choice.strategy)(trained_inventory, setting, choice, workload.optimizer)
    flow = model.flow()
    walk.step(flow, choice.gradient_accumulation_steps)
    if workload.evaluates:
        walk.evaluate(flow)
    base, host = _divided(choice, cluster, _lasting(model, workload))
    updates_on_host = bool(host)  # read before other entries are added
    if updates_on_host and (gradients := model.gradients_on_host()):
        host["gradients"] = gradients
    excess = 0 if cluster.device == "cpu" else sum(map(excess_when_pinned, model.pinned()))
    between = sum(base.values())
    norm = 4 * min(CACHED_ELEMENTS, trained_inventory.largest_trained) if cluster.device == "cpu" else 0
    whole = OPTIMIZERS.get(workload.optimizer).whole_matrices
    extra = orthogonalizing(trained_inventory, choice, cluster.device == "cuda") if whole else 0
    step = max(model.step() + extra, flow.held.total + norm)
    phases = {
        "load": _load(trained_inventory, workload, choice, cluster, base, host),
        "forward": between + walk.forward.total,
        "backward": between + walk.backward.total,
        "optimizer": between + (extra if updates_on_host else step),
        "evaluation": between + walk.evaluation.total,
        "checkpoint": between,
    }
    if moved != "nothing":
        host["activations"] = sum(block.kept if moved == "everything" else block.output for block in parts.blocks)
        excess += sum(
            block.excess if moved == "everything" else excess_when_pinned(block.output) for block in parts.blocks
        )
    if excess:
        host["rounding of pinned memory"] = excess
    if workload.copies_state:
        elements = trained_inventory.trained + optimizer_state(trained_inventory, workload.optimizer)
        host[COPY] = -(-4 * elements // choice.num_processes)
    optimizer = Peak()
    optimizer.note(Allocated(gradients=step), 0, 0)
    fullest = max((walk.forward, walk.backward, optimizer), key=lambda peak: peak.total)
    moment = fullest.parts()
    held_then = {name: base.get(name, 0) + moment.get(name, 0) for name in {**base, **moment}}
    temporary = max(phases.values()) - between
    if cluster.device == "cpu":
        # Freed memory is kept (machine/allocator.py), and a block of the next size does not fit where the largest was;
        # with gathered parameters that happens twice in a step. Measured on the CPU.
        gathered = choice.width * trained_inventory.largest if choice.spec.shards_parameters else 0
        largest = max(walk.forward.working_set, 4 * trained_inventory.largest_trained, gathered)
        slack = min(temporary, largest) * (1 + choice.spec.shards_parameters)
    else:
        slack = int(_CUDA_SLACK * temporary)
    return Memory(held_then, phases, _overhead(choice, cluster, workload, slack), host)


def _moved(choice: Choice, cluster: Cluster) -> Moved:
    if not choice.activation_offload or cluster.device == "cpu":
        return "nothing"
    return "inputs" if choice.activation_checkpointing == "selective" else "everything"


def _cached(setting: PassSettings) -> int:
    """Return the bytes of a block's keys and values if the program caches them as for generation."""
    each = 2 * setting.architecture.key_value_width * setting.width
    return setting.batch.tokens * each if setting.stack.caches_keys else 0


def _returned(setting: PassSettings) -> int:
    """Return the bytes of what a forward pass returns if the program keeps it until the next one has returned."""
    if not setting.stack.keeps_outputs:
        return 0
    a, stack = setting.architecture, setting.stack
    each = {"full": 4, "narrow": setting.width}.get(stack.loss, 0)
    return setting.batch.tokens * a.vocabulary * each + a.layers * _cached(setting)


def _recomputed(choice: Choice, cluster: Cluster) -> str | int:
    compiled = cluster.device == "cuda" and choice.compile
    return "compiled" if compiled and choice.activation_checkpointing == "none" else choice.activation_checkpointing


def _lasting(model: StrategyMemory, workload: Workload) -> Mapping[str, int]:
    """Return the bytes that stay from step to step, by purpose."""
    trained_inventory, setting, choice = model.held, model.setting, model.choice
    base = dict(model.lasting())
    if trained_inventory.buffers:
        cut = choice.shards if setting.stack.cuts_scales else 1
        base["quantized base's scales"] = -(-trained_inventory.buffers // cut)
    if workload.reference is not None and workload.reference.copied:
        copied = first_blocks(inventory(workload.architecture, setting.width, False), workload.reference.blocks)
        shards = choice.shards if choice.spec.shards_parameters else 1
        base["reference"] = -(-copied // shards) * setting.width
    return base


def _drawing(workload: Workload, choice: Choice) -> int:
    """Return the additional bytes of a fresh model: all of it is fp32 before it is cast, quantized and adapted."""
    a = workload.architecture
    embedding = a.vocabulary * a.hidden
    head = 4 * embedding if a.tied else 0  # separate until it is tied
    if workload.quantization != "none":
        return max(head, _QUANTIZING * min(_QUANTIZED, a.hidden * a.intermediate))
    return head if workload.adapter is None else max(head, (4 - choice.width) * embedding)


def _load(
    inventory: Inventory,
    workload: Workload,
    choice: Choice,
    cluster: Cluster,
    base: Mapping[str, int],
    host: dict[str, int],
) -> int:
    """Return the bytes on a device while weights are loaded; on a GPU machine they pass through the host's memory."""
    if cluster.device == "cpu":
        if not workload.fresh:
            return 4 * inventory.numel
        return 4 * max(inventory.numel, workload.architecture.parameters().total) + _drawing(workload, choice)
    host[LOADING] = max(0, _loading(choice, inventory.numel) - sum(host.values()))
    return base.get("parameters", 0)


def _overhead(choice: Choice, cluster: Cluster, workload: Workload, unused: int) -> dict[str, int]:
    """Return the overhead by name. ``unused``: bytes of freed blocks that the allocator holds."""
    slack = {"allocator slack": unused}
    if cluster.device == "cpu":
        library = choice.spec.library
        others = _PEFT * (workload.adapter is not None) + (library.process_bytes if library else 0)
        process = {"process and libraries": _PROCESS + others, **slack}
        return {**process, "code of products": CACHED_PRODUCTS * PRODUCT_BYTES} if choice.width == 2 else process
    several = choice.num_processes > 1
    between = choice.num_processes > cluster.devices_per_node
    nccl = _NCCL_IN_NODE * several + _NCCL_BETWEEN_NODES * between
    workspaces = _WORKSPACES if (cluster.card.capability or (0, 0)) >= (9, 0) else _WORKSPACES_BEFORE_HOPPER
    libraries = {"CUDA context": _CUDA_CONTEXT - workspaces, WORKSPACES: workspaces}
    return {**libraries, **({"NCCL buffers": nccl} if nccl else {}), **slack}


def _divided(choice: Choice, cluster: Cluster, base: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Divide ``base``, the memory kept between steps, into device and host memory according to the strategy."""
    if cluster.device == "cpu":
        return dict(base), {}
    moved = choice.offloaded
    host = {name: count for name, count in base.items() if name in moved and count}
    return {name: 0 if name in moved else count for name, count in base.items()}, host


def _loading(choice: Choice, numel: int) -> int:
    """Return the host bytes while a process reads its weights: fp32, in full or its own shard."""
    return -(-4 * numel // choice.shards) if choice.spec.shards_parameters else 4 * numel
