"""Predict the memory of a run on the fullest device, by part and by phase. Imports no torch.

The live bytes of tensors follow from the trace of the model and the strategy's tensors at each moment; the memory of
the process, the driver and the libraries is listed separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import CACHED_ELEMENTS, SHARD_BYTES, SUMMED_ELEMENTS, USABLE
from trainwright.planning.memory.inventory import (
    Inventory,
    build_inventory,
    count_reference_elements,
    sum_optimizer_state,
)
from trainwright.planning.memory.matrices import estimate_orthogonalization, estimate_preconditioning
from trainwright.planning.memory.micro_batch import compute_batch_shape
from trainwright.planning.memory.process import SLACK, WORKSPACES, estimate_libraries, estimate_overhead
from trainwright.planning.memory.strategies import FP32, StrategyMemory, load_memory_model
from trainwright.planning.memory.walk import Allocated, Order, Peak, Route, Walk
from trainwright.planning.trace.traced import trace_modules
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.registries import OPTIMIZERS

_STORED = 2  # bytes of an element in most files
# models/quantization.py: number of elements that are quantized at once, and the approximate bytes that each needs.
_QUANTIZED, _QUANTIZING = 2**20, 23
LOADING = "weights while loading"
COPY = "copy of the state for checkpoints"
_OF_STEPS = ("load", "forward", "backward", "optimizer", "evaluation")


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that needs most.

    ``parts``: live tensors at the peak of the run, by purpose. ``phases``: the peak of live tensors in each phase:
    load, forward, backward, optimizer, evaluation, generation (of answers), checkpoint, export. ``overhead``: memory
    that is not in tensors of the run.
    ``host``: memory on the host, for a process that computes on a GPU. ``untraced``: why activations are a bound, as
    the model could not be traced; "" if they are exact.
    """

    parts: Mapping[str, int]
    phases: Mapping[str, int]
    overhead: Mapping[str, int]
    host: Mapping[str, int]
    untraced: str = ""

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


def estimate_memory(workload: Workload, choice: Choice, cluster: Cluster) -> Memory:
    """Return the memory that ``choice`` needs for ``workload`` on a device of ``cluster``."""
    trace = later = workload.trace(choice, cluster, compute_batch_shape(workload, choice, cluster))
    if choice.gradient_accumulation_steps > 1:
        later = workload.trace(choice, cluster, compute_batch_shape(workload, choice, cluster, later=True))
    on_gpu = cluster.device != "cpu"
    parameters = build_inventory(trace, choice.width)
    model = load_memory_model(choice.strategy)(parameters, choice, workload.optimizer_state, on_gpu)
    offloads = choice.activation_offload and on_gpu
    route = _build_route(_generalize_model(model), Order.of(trace), Order.of(later))
    walk = Walk(route, trace, later, offloads)
    reference = count_reference_elements(trace) if trace.reference_copied else 0
    base, host = _estimate_lasting(model, reference)
    between = sum(base.values())
    norm = 0 if on_gpu else _estimate_norm(parameters, choice.shards, route.gradients)
    gathered_bytes = 0 if on_gpu else model.gathered()
    if gathered_bytes > USABLE * (cluster.usable_bytes // choice.num_processes - between):
        gathered_bytes = 0  # as in a GPU's memory if it is short, blocks are gathered one by one (parallel/world.py)
    step = max(_estimate_update(workload, model, offloaded=bool(host)), 0 if host else route.gradients + norm)
    if host and (on_host := model.gradients_on_host()):
        host["gradients"] = on_host
    phases = {
        "load": base.get("parameters", 0) if on_gpu else _estimate_load(parameters, workload),
        "forward": between + walk.forward.total,
        "backward": between + walk.backward.total,
        "optimizer": between + step,
        "evaluation": between + walk.evaluation.total * workload.evaluates,
        "generation": between + gathered_bytes * workload.answers,
        "checkpoint": between,
        "export": between + _estimate_export(model, workload, gathered_bytes),
    }
    reading = 0 if on_gpu or workload.model.adapter else _estimate_reading(parameters, workload.saved_width)
    if reading <= cluster.usable_bytes - choice.num_processes * between:  # otherwise it is not read back
        phases["export"] = max(phases["export"], between + reading + model.outside_blocks() * bool(reading))
    if on_gpu:
        weights = FP32 * parameters.numel
        read = -(-weights // choice.shards) if choice.spec.shards_parameters else weights
        read = max(read, _STORED * parameters.experts)  # of each process, before they are quantized
        host[LOADING] = max(0, read - sum(host.values()))
    pinned_sizes = list(model.pinned()) if on_gpu else []
    if offloads:
        activations = [size for unit in trace.list_units()[1:-1] for size in unit.forward.saved]
        host["activations"] = sum(activations)
        pinned_sizes += activations
    if excess := sum(map(compute_pinned_excess, pinned_sizes)):
        host["rounding of pinned memory"] = excess
    if workload.copies_state:
        width = FP32 if workload.master_weights else parameters.width
        state = width * parameters.trained + sum_optimizer_state(parameters, workload.optimizer_state)
        host[COPY] = -(-state // choice.num_processes)
    optimizer = Peak()
    optimizer.note(Allocated(gradients=step), 0)
    moment = max((walk.forward, walk.backward, optimizer), key=lambda peak: peak.total).parts()
    parts = {name: base.get(name, 0) + moment.get(name, 0) for name in {**base, **moment}}
    temporary = max(phases[name] for name in _OF_STEPS) - between
    extra = estimate_overhead(workload, cluster, model, walk, between, temporary, trace)
    if not on_gpu:  # what steps have freed is used, or returned before the export
        extra[SLACK] = max(0, extra[SLACK] + between + temporary - max(phases.values()))
    return Memory(parts, phases, extra, host, trace.facts.failed)


def _generalize_model(model: StrategyMemory) -> StrategyMemory:
    """Return the model of all micro-batches whose steps ask for memory in the same order."""
    passes = min(3, model.choice.gradient_accumulation_steps)
    alike: dict[str, Any] = {"activation_checkpointing": "none", "activation_offload": False, "threads": None}
    choice = replace(model.choice, micro_batch_size=1, gradient_accumulation_steps=passes, compile=False, **alike)
    return replace(model, choice=choice)


@lru_cache(maxsize=256)
def _build_route(model: StrategyMemory, first: Order, later: Order) -> Route:
    return Route(model.inventory, model.flow(), first, later, model.choice.gradient_accumulation_steps)


def estimate_least_memory(workload: Workload, choice: Choice, cluster: Cluster) -> int:
    """Return a lower bound of ``Memory.total`` that needs no passes: what stays from step to step, the update, and
    libraries.
    """
    on_gpu = cluster.device != "cpu"
    parameters = build_inventory(trace_modules(workload.model), choice.width)
    model = load_memory_model(choice.strategy)(parameters, choice, workload.optimizer_state, on_gpu)
    base, host = _estimate_lasting(model, 0)
    update = _estimate_update(workload, model, offloaded=bool(host))
    return sum(base.values()) + update + sum(estimate_libraries(workload, choice, cluster).values())


def _estimate_lasting(model: StrategyMemory, reference: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that stay from step to step, by purpose, on the device and in a GPU's host.

    Args:
        reference: the elements of a reference model of its own.
    """
    parameters, choice = model.inventory, model.choice
    lasting = dict(model.lasting())
    if parameters.scales:
        lasting["quantized base's scales"] = parameters.scales
    if reference:
        shards = choice.shards if choice.spec.shards_parameters else 1
        lasting["reference"] = -(-reference // shards) * choice.width
    offloaded_names = choice.offloaded if model.on_gpu else frozenset[str]()
    base = {name: 0 if name in offloaded_names else count for name, count in lasting.items()}
    return base, {name: count for name, count in lasting.items() if name in offloaded_names and count}


def _estimate_update(workload: Workload, model: StrategyMemory, *, offloaded: bool) -> int:
    """Return the most bytes on the device of gradients, and of tensors made from them, while weights are updated."""
    spec, matrices = OPTIMIZERS.get(workload.optimizer), 0
    if spec.whole_matrices:
        matrices = estimate_orthogonalization(model.inventory, model.choice, model.on_gpu)
    elif spec.preconditions:
        matrices = estimate_preconditioning(model.inventory)
    return matrices if offloaded else model.step() + matrices


@lru_cache(maxsize=64)
def _estimate_norm(parameters: Inventory, shards: int, gradients: int) -> int:
    """Return the bytes of a norm of ``gradients`` bytes of them on a CPU (parallel/strategy.py).

    It takes the squares of a piece, which is converted if it is not fp32, and may be joined of small gradients.
    """
    sizes = [weight.local(shards) for weight in parameters.trainable]
    narrow = gradients < FP32 * sum(sizes)
    squares, width = FP32 * (2 if narrow else 1), parameters.width if narrow else FP32
    joined_elements = min(CACHED_ELEMENTS, sum(size for size in sizes if size < CACHED_ELEMENTS))
    return max((squares + width) * joined_elements, squares * min(CACHED_ELEMENTS, max(sizes, default=0)))


def _estimate_load(parameters: Inventory, workload: Workload) -> int:
    """Return the bytes on a CPU while weights are loaded, or drawn.

    All of a new model is fp32 before it is cast, quantized and adapted, and its head is separate until it is tied.
    """
    if not workload.fresh:
        return max(FP32 * parameters.numel, _STORED * parameters.experts)
    facts = workload.facts
    embedding = facts.vocabulary * facts.hidden
    temporary_bytes = FP32 * embedding if facts.tied else 0
    if workload.model.quantization != "none":
        temporary_bytes = max(temporary_bytes, _QUANTIZING * min(_QUANTIZED, facts.hidden * facts.intermediate))
    elif workload.model.adapter:
        temporary_bytes = max(temporary_bytes, (FP32 - parameters.width) * embedding)
    return FP32 * max(parameters.numel, facts.total) + temporary_bytes


def _estimate_export(model: StrategyMemory, workload: Workload, gathered: int) -> int:
    """Return the bytes of an export: of an adapter those of the gathered model, or on a CPU of its file and the adapter
    that is read back from it.
    """
    if not workload.model.adapter:
        return _estimate_saving(model, workload)
    return max(gathered, 0 if model.on_gpu else 2 * FP32 * model.inventory.trained)


def _estimate_saving(model: StrategyMemory, workload: Workload) -> int:
    """Return the bytes of the tensors that rank 0 makes to save the model (models/files.py); on a GPU, those on it."""
    parameters, copies, width = model.inventory, model.assembled(), workload.saved_width
    if model.on_gpu:
        return FP32 * copies * parameters.largest
    converts = width != FP32 or (parameters.width < FP32 and not model.optimizer.masters)
    return _sum_saved(parameters, copies, width if copies or converts else 0)


def _estimate_reading(parameters: Inventory, width: int) -> int:
    """Return the bytes of the saved model that rank 0 reads back, and of what its checksums convert."""
    return width * parameters.numel + 8 * min(parameters.largest, SUMMED_ELEMENTS)


@lru_cache(maxsize=64)
def _sum_saved(parameters: Inventory, copies: int, width: int) -> int:
    """Return these bytes, of which ``width`` for each element stay until a file is written."""
    frozen = parameters.numel - parameters.trained
    buffer_bytes = peak = FP32 * parameters.numel if frozen else 0  # saved as they were loaded
    for weight in parameters.weights:
        peak = max(peak, buffer_bytes + FP32 * copies * weight.numel)
        buffer_bytes = min(buffer_bytes + width * weight.numel, SHARD_BYTES)
    return max(peak, buffer_bytes)


def compute_pinned_excess(size: int) -> int:
    """Return the bytes by which pinned memory for ``size`` bytes exceeds them.

    torch rounds it up to a power of two (torch.cuda.memory.host_memory_stats).
    """
    return (1 << (size - 1).bit_length()) - size if size > 1 else 0
