"""Predict the time of an optimizer step from its kernels, its communication, and their overlap.

On a GPU kernels run back to back while Python launches them faster than they finish; otherwise the launches determine
the time. Collectives overlap with computation; on a CPU only as far as measured. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trainwright.machine.describe import Cluster
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.derived import AdapterShape
from trainwright.planning.memory.matrices import exchanged_width
from trainwright.planning.operations import (
    BlockKind,
    ModelPasses,
    Pass,
    PassSettings,
    block_kinds,
    block_weights,
    passes,
)
from trainwright.planning.operations.inventory import (
    Inventory,
    by_unit,
    experts_by_unit,
    inventory,
    orthogonalized,
    partly_trained,
)
from trainwright.planning.operations.weights import ADAPTED
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.step_time.batch import seen_pairs, typical_batch
from trainwright.planning.step_time.rates import Group, Rates
from trainwright.planning.step_time.update import Exchange, UnitWork, Update
from trainwright.planning.step_time.work import DeviceWork, Pricing
from trainwright.planning.workload import Choice, MixedPrecision, Workload
from trainwright.recipe.registries import OPTIMIZERS

# Matrices of a block: query, key, value, output; gate, up and down, or the router.
_ATTENTION_AND_MLP, _ATTENTION_AND_ROUTER = 7, 5
_PEAK: dict[MixedPrecision, tuple[str, ...]] = {"no": ("fp32",), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32")}


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step, without evaluation and checkpoints.

    ``parts``: seconds by purpose, in order; their sum is the step. ``tokens``: tokens of the step over all devices,
    without padding. ``operations``: FLOPs of the model's matrix products and attention for these tokens, forward and
    backward, without recomputation. ``peak``: FLOPs per second of all devices: of a GPU by its datasheet, of dense
    products in the precision of the run; of a CPU, whose flags say little, or a GPU without a datasheet, the fastest
    products that were measured; None if unknown. ``peak_is_nominal``: whether it is from a datasheet. ``watts``: full
    power of all devices.
    """

    parts: Mapping[str, float]
    tokens: float
    operations: float
    peak: float | None
    watts: float
    peak_is_nominal: bool = False

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())

    def times(self, factor: float) -> StepTime:
        """Return the step time multiplied by ``factor``."""
        return replace(self, parts={name: seconds * factor for name, seconds in self.parts.items()})

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (arXiv 2204.02311, appendix B); None if the peak is unknown."""
        return self.operations / self.seconds / self.peak if self.peak else None

    @property
    def joules(self) -> float:
        """Energy of the devices at full power: an upper bound."""
        return self.watts * self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the step time as JSON values."""
        return {
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "operations": self.operations,
            "mfu": self.mfu,
            "peak": self.peak,
            "peak_is_nominal": self.peak_is_nominal,
            "joules": self.joules,
        }


def step_time(workload: Workload, choice: Choice, cluster: Cluster, rates: Rates, stack: Stack = OWN) -> StepTime:
    """Predict one step of ``workload`` with ``choice`` on ``cluster``; ``stack``: the program that runs it."""
    return _Step(workload, choice, cluster, rates, stack).time()


def least_seconds(workload: Workload, processes: int, precision: MixedPrecision, rates: Rates) -> float:
    """Return a lower bound of the seconds of a step: all operations at the devices' peak rate.

    It is 0 if the peak is unknown, which includes rates measured at only a few sizes.
    """
    if rates.are_measured:
        return 0.0
    peak = _nominal_peak(rates.cluster, processes, _peak_names(precision, workload))
    return model_operations(workload) / peak if peak else 0.0


class _Step:
    def __init__(self, workload: Workload, choice: Choice, cluster: Cluster, rates: Rates, stack: Stack) -> None:
        self.workload, self.choice, self.cluster, self.rates = workload, choice, cluster, rates
        self.stack = stack
        self.on_gpu = cluster.device == "cuda"
        here = cluster.devices_per_node if self.on_gpu else -(-choice.num_processes // cluster.nodes)
        self.per_node = min(choice.num_processes, here)
        self.speeds = rates.setting(self.per_node, choice.threads)
        self.batch = typical_batch(workload, choice, stack.sorted_rows)
        self.width = choice.width
        self.shapes = PassSettings.of(workload, choice, self.batch, cluster, stack)
        self.pricing = Pricing(self.speeds, self.batch, choice.mixed_precision, self.on_gpu, stack, workload.tf32)

    def time(self) -> StepTime:
        choice, passes_a_step = self.choice, self.choice.gradient_accumulation_steps
        run, plain = passes(self.shapes, choice.activation_checkpointing), passes(self.shapes)
        some = slice(self.workload.first_blocks)
        forward = [self._work(part, backward=False) for part in run.blocks[some]]
        backward = [self._work(part, backward=True) for part in run.blocks[some]]
        once = [self._work(part, backward=True) for part in plain.blocks[some]]
        ends = self._ends(run) if self.workload.first_blocks is None else DeviceWork()
        reference = self._reference()
        again = sum((both - plainly for both, plainly in zip(backward, once, strict=True)), DeviceWork())
        passed = sum((*forward, *once), DeviceWork())
        update = self._update()
        computed = (passed + again + ends + reference) * passes_a_step
        stack = self.stack
        hidden = self.speeds.overlap
        exchange = Exchange(
            choice,
            self.rates,
            self.width,
            self.per_node,
            hidden,
            stack.exchanged,
            stack.sums_unsharded,
            self._matrices(),
            stack.expert_parallel,
            self._rows_to_experts() + self._heads(),
        )
        units = self._units(run, forward, backward)
        activations = sum(part.kept for part in run.blocks)
        parts = {
            "matrix products": passes_a_step * passed.products,
            "attention": passes_a_step * passed.attention,
            "memory-bound operations": passes_a_step * passed.traffic + update.keeping(),
            "recomputation": passes_a_step * again.seconds,
            "loss and head": passes_a_step * ends.seconds,
            **({"reference": passes_a_step * reference.seconds} if self.workload.reference is not None else {}),
            "optimizer": update.optimizer(),
            "communication": exchange.exposed(units)
            + exchange.of_updates(update.orthogonalized, exchanged_width(self.on_gpu)),
            "offload": update.offload(
                activations,
                sum(work.seconds for work in forward),
                sum(work.seconds for work in backward),
                len(run.blocks),
            ),
            "launches": self._launches(computed) if self.on_gpu else passes_a_step * passed.host,
            "data": self._data(),
        }
        peak, is_nominal = self._peak()
        return StepTime(
            parts=parts,
            tokens=self.workload.tokens,
            operations=model_operations(self.workload),
            peak=peak,
            peak_is_nominal=is_nominal,
            watts=self.cluster.card.watts * (choice.num_processes if self.on_gpu else self.cluster.nodes),
        )

    def _peak(self) -> tuple[float | None, bool]:
        """Return the FLOPs per second of all devices, and whether they are from a datasheet.

        What was measured on a GPU, at the sizes of a quick measurement, is less than its peak, and is no share of it.
        """
        names = _peak_names(self.choice.mixed_precision, self.workload)
        nominal = _nominal_peak(self.cluster, self.choice.num_processes, names) if self.on_gpu else None
        if nominal is not None:
            return nominal, True
        devices = self.choice.num_processes if self.on_gpu else self.cluster.nodes
        rates = (self.rates.peak(devices, name) for name in names)
        return next((rate for rate in rates if rate is not None), None), False

    def _launches(self, computed: DeviceWork) -> float:
        """Return the seconds in which a GPU waits for Python."""
        return max(0.0, computed.launches * self.stack.launch * self.speeds.launch - computed.seconds)

    def _work(self, part: Pass, *, backward: bool) -> DeviceWork:
        """Return the work of a block's forward or backward pass."""
        compiled = self.choice.compile
        key = (id(part), self.per_node, self.choice.threads, self.pricing.precision, backward, compiled)
        # The cached value holds the part, so that its id is not reused.
        cached: tuple[Pass, DeviceWork] | None = self.rates.known.get(key)
        if cached is None:
            kernels = part.backward if backward else part.forward
            cached = part, self.pricing.work(kernels, backward=backward, compiled=compiled)
            self.rates.known[key] = cached
        return cached[1]

    def _reference(self) -> DeviceWork:
        """Return the forward pass of the model that runs in addition, which has no adapter."""
        reference = self.workload.reference
        if reference is None:
            return DeviceWork()
        plain = passes(replace(self.shapes, adapter=None))
        work = sum((self._work(part, backward=False) for part in plain.blocks[: reference.blocks]), DeviceWork())
        if reference.blocks == len(plain.blocks):
            work += self.pricing.work(plain.head.forward, backward=False)
        return work * reference.share

    def _ends(self, run: ModelPasses) -> DeviceWork:
        """Return the work of embedding, final norm, head and loss, forward and backward."""
        logits = self._logits_rows() * self.workload.architecture.vocabulary
        work = DeviceWork(loss=self.pricing.logits(logits) if logits else 0.0)
        for part in (run.embedding, run.head):
            work += self.pricing.pass_and_back(part)
        return work

    def _logits_rows(self) -> int:
        return self.batch.targets if self.stack.loss == "chunked" else self.batch.tokens

    def _units(self, run: ModelPasses, forward: Sequence[DeviceWork], backward: Sequence[DeviceWork]) -> list[UnitWork]:
        """Return a unit for the parts outside the blocks, then one per block."""
        counts = self._counts()
        embedding = (
            self.pricing.work(run.embedding.forward, backward=False),
            self.pricing.work(run.embedding.backward, backward=True),
        )
        times = [embedding, *zip(forward, backward, strict=True)]
        experts = experts_by_unit(self._inventory()) if self.stack.expert_parallel > 1 else ((0, 0),) * len(counts)
        run_through = zip(counts[: len(times)], times, experts[: len(times)], strict=True)
        return [UnitWork(*count, there.seconds, back.seconds, *own) for count, (there, back), own in run_through]

    def _rows_to_experts(self) -> float:
        """Return the seconds of a micro-batch in which rows go to the experts of other ranks, and back."""
        a, ranks = self.workload.architecture, self.stack.expert_parallel
        rows = float(a.experts_per_token)
        if self.stack.experts == "fused":  # to each rank that has any of a token's experts
            rows = ranks * (1 - (1 - 1 / ranks) ** rows)
        blocks = sum(kind.sparse for kind in block_kinds(a)[: self.workload.first_blocks])
        return 2 * blocks * self._passed(rows * self.batch.tokens * a.hidden * self.width, ranks)

    def _heads(self) -> float:
        """Return the seconds of a micro-batch in which ranks exchange positions for heads: q, k, v and the output."""
        a = self.workload.architecture
        size = 2 * self.batch.tokens * (a.query_width + a.key_value_width) * self.width
        return len(block_kinds(a)[: self.workload.first_blocks]) * self._passed(size, self.stack.sequence_parallel)

    def _passed(self, size: float, ranks: int) -> float:
        """Return the seconds in which ``size`` bytes of a block go round in each of its passes."""
        if ranks == 1:
            return 0.0
        passes = 2 if self.choice.activation_checkpointing == "none" else 3
        inside = min(ranks, self.per_node)
        return passes * self.rates.all_to_all(size, Group(-(-ranks // inside), inside))

    def _counts(self) -> tuple[tuple[int, int], ...]:
        """Return the numbers of parameters and of trained parameters, outside the blocks and of each block."""
        return by_unit(self._inventory())

    def _matrices(self) -> int:
        """Return the number of matrices of a block that are modules' own: of an expert three, if it has its own."""
        a = self.workload.architecture
        return (
            _ATTENTION_AND_MLP
            if not (self.stack.expert_linears and a.experts)
            else _ATTENTION_AND_ROUTER + 3 * a.experts
        )

    def _inventory(self) -> Inventory:
        w = self.workload
        full = inventory(w.architecture, self.width, w.adapter is None, w.adapter, w.quantization, self.stack)
        return partly_trained(full, w.trained)

    def _update(self) -> Update:
        counts = self._counts()
        a = self.workload.architecture
        trained = self.workload.adapter is None
        weights = block_weights(a, block_kinds(a)[0], self.width, trained, self.workload.adapter)
        each = sum(weight.trainable for weight in weights.parameters.values())
        return Update(
            choice=self.choice,
            pricing=self.pricing,
            parameters=sum(count for count, _ in counts),
            trainable=sum(trained for _, trained in counts),
            matrices=each * a.layers + 2,
            width=self.width,
            orthogonalized=self._orthogonalized(),
            stack=self.stack,
        )

    def _orthogonalized(self) -> tuple[tuple[int, int], ...]:
        return orthogonalized(self._inventory()) if OPTIMIZERS.get(self.workload.optimizer).whole_matrices else ()

    def _data(self) -> float:
        """Return the seconds for preparing data; on a GPU only those of a step's first batch, as others overlap."""
        sequences = sum(count for _, count in self.batch.sequences)
        times = 1 if self.on_gpu else self.choice.gradient_accumulation_steps
        return times * self.speeds.curves["data"].seconds(sequences, self.batch.tokens)


def _peak_names(precision: MixedPrecision, workload: Workload) -> tuple[str, ...]:
    """Return the precisions whose peak rate applies, the first that a device has."""
    return ("tf32", *_PEAK["no"]) if workload.tf32 and precision == "no" else _PEAK[precision]


def _nominal_peak(cluster: Cluster, processes: int, names: tuple[str, ...]) -> float | None:
    """Return the FLOPs per second of all devices by their datasheet, in the first of these precisions it has."""
    rates = cluster.card.rates
    rate = next((rates[name] for name in names if name in rates), None)
    return None if rate is None else rate * (processes if cluster.device == "cuda" else cluster.nodes)


@lru_cache(maxsize=8)
def model_operations(workload: Workload) -> float:
    """Return the FLOPs of a step that the model needs, on any hardware.

    A matrix takes 2 per element and token forward and 4 backward (2 if it is frozen); attention takes 12 per channel,
    block and pair of positions. Padding, masked positions and recomputation are not counted.
    """
    a, adapter, tokens = workload.architecture, workload.adapter, workload.tokens
    targets = tokens * workload.target_fraction
    base = 6 if adapter is None and workload.trained is None else 4
    total = base * targets * a.vocabulary * a.hidden if workload.first_blocks is None else 0.0
    if workload.trained is not None:
        weights = inventory(a, 4, True).weights
        total += 2 * tokens * sum(w.numel for w in weights if w.columns > 1 and (w.unit, w.name) in workload.trained)
    for kind in block_kinds(a)[: workload.first_blocks]:
        total += base * tokens * _matrices(a, kind)
        if adapter is not None:
            total += 6 * tokens * adapter_parameters(a, kind, adapter)
        pairs = tokens * seen_pairs(workload, a.window if kind.windowed else None)
        total += 12 * a.query_width * pairs
    return total


def adapter_parameters(a: Architecture, kind: BlockKind, adapter: AdapterShape) -> int:
    """Return the number of parameters that an adapter adds to a block."""
    weights = block_weights(a, kind, 4, True).parameters
    total = 0
    for name, weight in weights.items():
        if weight.k > 1 and ADAPTED.get(name, frozenset()) & set(adapter.targets):
            total += adapter.rank * (weight.n + weight.k) + (weight.n if adapter.kind == "dora" else 0)
    return total


def _matrices(a: Architecture, kind: BlockKind) -> float:
    """Return the number of matrix elements of a block that one token uses."""
    weights = block_weights(a, kind, 4, True).parameters
    active = a.experts_per_token / a.experts if a.experts else 1.0
    return sum(
        weight.numel * (active if name.startswith("experts.") else 1.0)
        for name, weight in weights.items()
        if weight.k > 1
    )
