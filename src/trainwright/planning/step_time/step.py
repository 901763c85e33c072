"""Predict the time of an optimizer step from its kernels, its communication, and their overlap.

On a GPU kernels run back to back while Python launches them faster than they finish; otherwise the launches determine
the time. Collectives overlap with computation; on a CPU only as far as measured. The micro-batch of the busiest process
counts. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from trainwright.machine.describe import Cluster
from trainwright.parallel.constants import compute_padded_size
from trainwright.planning.memory.inventory import build_inventory
from trainwright.planning.memory.matrices import choose_exchanged_width
from trainwright.planning.memory.micro_batch import build_sequences
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.update import Exchange, UnitWork, Update
from trainwright.planning.step_time.work import LOSS, DeviceWork, Pricing
from trainwright.planning.trace.traced import list_parameters
from trainwright.planning.trace.units import BatchShape, PassTrace, TracedParameter, UnitTrace
from trainwright.planning.workload import Choice, MixedPrecision, Workload
from trainwright.recipe.registries import OPTIMIZERS

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
        derived_fields = ("seconds", "tokens_per_second", "mfu", "joules")
        return {**asdict(self), **{name: getattr(self, name) for name in derived_fields}}


def estimate_step_time(workload: Workload, choice: Choice, cluster: Cluster, rates: Rates) -> StepTime:
    """Predict one step of ``workload`` with ``choice`` on ``cluster``."""
    return _Step(workload, choice, cluster, rates).time()


def compute_least_seconds(workload: Workload, processes: int, precision: MixedPrecision, rates: Rates) -> float:
    """Return a lower bound of the seconds of a step: all operations at the devices' peak rate.

    It is 0 if the peak is unknown, which includes rates measured at only a few sizes.
    """
    if rates.are_measured:
        return 0.0
    peak = _look_up_nominal_peak(rates.cluster, processes, _list_peak_names(precision, workload))
    return count_model_operations(workload) / peak if peak else 0.0


# Of an average of the weights, relative to AdamW, as the times of optimizers are.
_AVERAGE, _AVERAGE_ON_CPU = 12 / 28, 0.7
_ROUNDING, _ROUNDING_ON_CPU = 94 / 28, 0.5  # of weights without masters (parallel/bf16_weights.py)


class _Step:
    def __init__(self, workload: Workload, choice: Choice, cluster: Cluster, rates: Rates) -> None:
        self.workload, self.choice, self.cluster, self.rates = workload, choice, cluster, rates
        self.on_gpu = cluster.has_gpus
        ranks_per_node = cluster.devices_per_node if self.on_gpu else -(-choice.num_processes // cluster.nodes)
        self.per_node = min(choice.num_processes, ranks_per_node)
        self.speeds = rates.setting(self.per_node, choice.threads)
        batch = build_typical_batch(workload, choice)
        if not self.on_gpu and choice.width == 2:  # models/linear_losses.py
            batch = replace(batch, length=compute_padded_size(batch.length))
        self.batch = batch
        self.trace = workload.trace(choice, cluster, batch)
        self.parameters = build_inventory(self.trace, choice.width)
        seen_ratio = (
            _average_seen_pairs(workload) / count_seen_pairs(workload, None) if self.on_gpu and batch.packed else 1.0
        )
        vocabulary, tf32 = workload.facts.vocabulary, workload.tf32
        self.pricing = Pricing(self.speeds, batch, choice.mixed_precision, self.on_gpu, vocabulary, tf32, seen_ratio)

    def time(self) -> StepTime:
        choice, passes_a_step = self.choice, self.choice.gradient_accumulation_steps
        _, *blocks, _ = units = self.trace.list_units()
        plain = units
        if choice.activation_checkpointing != "none":
            without = replace(choice, activation_checkpointing="none")
            plain = self.workload.trace(without, self.cluster, self.batch).list_units()
        forward = [self._work(unit.forward, backward=False) for unit in blocks]
        backward = [self._work(unit.backward, backward=True) for unit in blocks]
        once = [self._work(unit.backward, backward=True) for unit in plain[1:-1]]
        first = units[0]
        embedding = (self._work(first.forward, backward=False), self._work(first.backward, backward=True))
        ends = sum((*embedding, self._head(units[-1])), DeviceWork())
        reference = self._reference()
        pass_work = sum((*forward, *once), DeviceWork())
        recomputation = sum(backward, DeviceWork()) - sum(once, DeviceWork())
        update = self._update()
        total_work = (pass_work + recomputation + ends + reference) * passes_a_step
        matrices = max((sum(len(p.shape) > 1 for p in unit.parameters) for unit in blocks), default=1)
        exchange = Exchange(choice, self.rates, choice.width, self.per_node, self.speeds.overlap, matrices)
        waiting_seconds = max(0.0, total_work.launches * self.speeds.launch - total_work.seconds)
        saved_bytes = sum(size for unit in blocks for size in unit.forward.saved)
        forward_seconds, backward_seconds = (sum(work.seconds for work in works) for works in (forward, backward))
        parts = {
            "matrix products": passes_a_step * pass_work.products,
            "attention": passes_a_step * pass_work.attention,
            "memory-bound operations": passes_a_step * pass_work.traffic + update.estimate_accumulation(),
            "recomputation": passes_a_step * recomputation.seconds,
            "loss and head": passes_a_step * ends.seconds,
            **({"reference": passes_a_step * reference.seconds} if self.trace.reference else {}),
            "optimizer": update.optimizer(),
            "communication": exchange.estimate_exposed(self._units([embedding[0], *forward], [embedding[1], *backward]))
            + exchange.estimate_updates(update.orthogonalized, choose_exchanged_width(self.on_gpu)),
            "offload": update.offload(saved_bytes, forward_seconds, backward_seconds, len(blocks)),
            "launches": waiting_seconds if self.on_gpu else passes_a_step * pass_work.host,
            "data": self._estimate_data(total_work),
        }
        peak, is_nominal = self._peak()
        return StepTime(
            parts=parts,
            tokens=self.workload.tokens,
            operations=count_model_operations(self.workload),
            peak=peak,
            peak_is_nominal=is_nominal,
            watts=self.cluster.card.watts * (choice.num_processes if self.on_gpu else self.cluster.nodes),
        )

    def _peak(self) -> tuple[float | None, bool]:
        """Return the FLOPs per second of all devices, and whether they are from a datasheet.

        What was measured on a GPU, at the sizes of a quick measurement, is less than its peak, and is no share of it.
        """
        names = _list_peak_names(self.choice.mixed_precision, self.workload)
        nominal = _look_up_nominal_peak(self.cluster, self.choice.num_processes, names) if self.on_gpu else None
        if nominal is not None:
            return nominal, True
        devices = self.choice.num_processes if self.on_gpu else self.cluster.nodes
        rates = (self.rates.peak(devices, name) for name in names)
        return next((rate for rate in rates if rate is not None), None), False

    def _work(self, part: PassTrace[int], *, backward: bool) -> DeviceWork:
        """Return the work of a pass over a block."""
        compiled = self.choice.compile
        key = (id(part), self.per_node, self.choice.threads, self.pricing.precision, backward, compiled)
        # The cached value holds the pass, so that its id is not reused.
        entry: tuple[PassTrace[int], DeviceWork] | None = self.rates.cache.get(key)
        if entry is None:
            entry = part, self.pricing.work(part.operations, backward=backward, compiled=compiled)
            self.rates.cache[key] = entry
        return entry[1]

    def _head(self, unit: UnitTrace[int]) -> DeviceWork:
        """Return the work of the final norm, head and loss, forward and backward."""
        has_logits = any(operation.name == LOSS for operation in unit.forward.operations)
        logits = self.batch.targets * self.pricing.vocabulary if has_logits else 0
        loss = DeviceWork(loss=self.pricing.logits(logits)) if logits else DeviceWork()
        return self.pricing.price_unit(unit) + loss

    def _reference(self) -> DeviceWork:
        """Return the forward pass of the frozen model that runs in addition."""
        units = [self.trace.units[index] for index in self.trace.reference]
        work = sum((self._work(unit.evaluation, backward=False) for unit in units), DeviceWork())
        return work * self.workload.model.reference_share

    def _units(self, forward: Sequence[DeviceWork], backward: Sequence[DeviceWork]) -> list[UnitWork]:
        """Return a unit for the parts outside the blocks, then one per block."""
        first, *blocks, last = self.parameters.by_unit
        counts = [(first[0] + last[0], first[1] + last[1]), *blocks]
        return [
            UnitWork(*count, before.seconds, after.seconds)
            for count, before, after in zip(counts, forward, backward, strict=True)
        ]

    def _update(self) -> Update:
        spec = OPTIMIZERS.get(self.workload.optimizer)
        relative, average, rounding = spec.time, _AVERAGE, _ROUNDING
        if not self.on_gpu or "optimizer state" in self.choice.offloaded:
            relative, average, rounding = spec.time_on_cpu or spec.time, _AVERAGE_ON_CPU, _ROUNDING_ON_CPU
        return Update(
            choice=self.choice,
            pricing=self.pricing,
            parameters=self.parameters.numel,
            trainable=self.parameters.trained,
            matrices=max(1, len(self.parameters.trainable)),
            width=self.choice.width,
            orthogonalized=self.parameters.matrices if spec.whole_matrices else (),
            bases=self.parameters.matrices if spec.preconditions else (),
            relative=relative + average * self.workload.averages + rounding * (not self.workload.master_weights),
        )

    def _estimate_data(self, computed: DeviceWork) -> float:
        """Return the seconds for preparing data; on a GPU only those of a step's first batch, as others overlap.

        Of texts that one is prepared while the GPU computes the step before.
        """
        sequences = sum(count for _, count in self.batch.sequences)
        times = 1 if self.on_gpu else self.choice.gradient_accumulation_steps
        seconds = times * self.speeds.curves["data"].seconds(sequences, self.batch.tokens)
        return max(0.0, seconds - computed.seconds) if self.on_gpu and self.workload.texts else seconds


def _list_peak_names(precision: MixedPrecision, workload: Workload) -> tuple[str, ...]:
    """Return the precisions whose peak rate applies, the first that a device has."""
    return ("tf32", *_PEAK["no"]) if workload.tf32 and precision == "no" else _PEAK[precision]


def _look_up_nominal_peak(cluster: Cluster, processes: int, names: tuple[str, ...]) -> float | None:
    """Return the FLOPs per second of all devices by their datasheet, in the first of these precisions it has."""
    rates = cluster.card.rates
    rate = next((rates[name] for name in names if name in rates), None)
    return None if rate is None else rate * (processes if cluster.has_gpus else cluster.nodes)


@lru_cache(maxsize=8)
def count_model_operations(workload: Workload) -> float:
    """Return the FLOPs of a step that the model needs, on any hardware.

    A matrix takes 2 per element and token forward and 4 backward (2 if it is frozen); attention takes 12 per channel,
    block and pair of positions. Padding, masked positions and recomputation are not counted.
    """
    facts, tokens = workload.facts, workload.tokens
    targets = tokens * workload.target_fraction
    (embedding, *blocks, head), last = list_parameters(workload.model), workload.model.last_block
    total = 0.0
    if last is None:
        table = embedding[:1] if facts.tied else ()
        total += targets * sum(_count_operations(p) * p.numel for p in (*table, *head) if len(p.shape) > 1)
    blocks = blocks[: None if last is None else last + 1]
    active = facts.experts_per_token / facts.experts if facts.experts else 1.0
    for parameter in (parameter for block in blocks for parameter in block):
        if len(parameter.shape) > 1 and "original_module" not in parameter.name:
            share = active if _EXPERT.search(parameter.name) else 1.0
            total += share * tokens * _count_operations(parameter) * parameter.numel
    return total + 12 * len(blocks) * facts.heads * facts.head_dim * tokens * _average_seen_pairs(workload)


def _average_seen_pairs(workload: Workload) -> float:
    """Return the mean number of positions that a token attends to, over all blocks."""
    facts = workload.facts
    positions = (1 - facts.windowed) * count_seen_pairs(workload, None)
    return positions + facts.windowed * count_seen_pairs(workload, facts.window) if facts.windowed else positions


_EXPERT = re.compile(r"(^|\.)experts\.")


def _count_operations(parameter: TracedParameter) -> int:
    return 6 if parameter.trainable else 4


_PLACES = 64  # micro-batches whose lengths are read


def build_typical_batch(workload: Workload, choice: Choice) -> BatchShape:
    """Return a micro-batch of mean size of the busiest process."""
    limit = choice.micro_batch_size * workload.row_tokens
    if workload.packed:
        tokens = round(min(limit, _count_process_tokens(workload, choice) / choice.gradient_accumulation_steps))
        sequences = build_sequences(max(1, tokens), workload)
        targets = workload.targets(tokens, sum(count for _, count in sequences))
        return BatchShape(1, max(1, tokens), sequences, targets, packed=True, masked=False)
    rows = max(1, min(choice.micro_batch_size, math.ceil(workload.global_batch_rows / choice.num_processes)))
    length = round(_estimate_padded_length(workload, rows))
    targets = workload.targets(round(rows * workload.mean_length), rows)
    masked = rows > 1 and workload.longest > workload.mean_length
    return BatchShape(rows, length, ((length, rows),), targets, packed=False, masked=masked)


def _count_process_tokens(workload: Workload, choice: Choice) -> float:
    """Return the tokens of the busiest process in a step: packs are not divided, and the last may be partly empty."""
    mean = workload.tokens / choice.num_processes
    packs = choice.gradient_accumulation_steps * choice.micro_batch_size
    return min(workload.tokens, max(mean, packs * workload.row_tokens))


def _estimate_padded_length(workload: Workload, rows: int) -> float:
    """Return the mean length that rows are padded to: a micro-batch has rows of similar length, padded to the longest.

    If only the mean is known, lengths are assumed to be exponentially distributed; their order statistics are sums of 1
    / k (Renyi, Acta Mathematica Hungarica 4, 1953).
    """
    total = max(rows, round(workload.global_batch_rows))
    firsts = range(0, total, rows)
    firsts = firsts if len(firsts) <= _PLACES else range(0, total, rows * -(-len(firsts) // _PLACES))
    data_lengths = [workload.find_length(first) for first in firsts]
    if data_lengths[0] is not None:
        return sum(length or 0 for length in data_lengths) / len(data_lengths)
    harmonic = _sum_harmonic(total)
    longest = [workload.mean_length * (harmonic - _sum_harmonic(first)) for first in firsts]
    return min(workload.row_tokens, max(workload.mean_length, sum(longest) / len(longest)))


def _sum_harmonic(count: int) -> float:
    """Return the sum of 1 / k up to ``count``."""
    return math.log(count) + 0.5772156649 + 1 / (2 * count) if count else 0.0


def count_seen_pairs(workload: Workload, window: int | None) -> float:
    """Return the mean number of positions that a token attends to, itself included, within its sequence or window."""
    if workload.lengths:
        pairs = (length * _count_pairs_of_length(length, window) for length in workload.lengths)
        return sum(pairs) / sum(workload.lengths)
    return _count_pairs_of_length(workload.mean_length, window)


def _count_pairs_of_length(length: float, window: int | None) -> float:
    if window is None or window >= length:
        return (length + 1) / 2
    return window * (1 - (window - 1) / (2 * length))
