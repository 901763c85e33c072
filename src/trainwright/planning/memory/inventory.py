"""The parameters of a traced model one by one, as strategies distribute them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from trainwright.parallel.matrix_owners import is_matrix
from trainwright.planning.trace.units import ModelTrace, TracedParameter
from trainwright.planning.workload import OptimizerState
from trainwright.recipe.optimizer_spec import StatePart
from trainwright.recipe.registries import OPTIMIZERS

_FP32 = 4


class Weight(NamedTuple):
    """A parameter of a unit: 0 is the embedding, then come the blocks, and the last one is the head.

    ``rows``: its first dimension, along which it is sharded; ``columns``: the elements of a row. ``packed``: a
    quantized parameter, counted as elements of the model's width that use the same bytes.
    """

    unit: int
    name: str
    shape: tuple[int, ...]
    trainable: bool
    packed: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The size of the first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """The number of elements of a row."""
        return prod(self.shape[1:])

    @property
    def is_vector(self) -> bool:
        """Whether it has no weight decay (engine/optimizer.py)."""
        return len(self.shape) < 2

    @property
    def is_matrix(self) -> bool:
        """Whether an optimizer of whole matrices updates it as one (engine/optimizers/muon.py)."""
        return is_matrix(self.name, len(self.shape))

    def local(self, shards: int) -> int:
        """Return the elements of the rank with most rows."""
        return -(-self.rows // shards) * self.columns


@dataclass(frozen=True, eq=False)
class Inventory:
    """``weights``: the parameters in the model's order. ``units``: their number. ``width``: bytes per element in
    computation. ``scales``: bytes of the scales of quantized parameters. ``experts``: elements of quantized weights of
    experts.
    """

    weights: tuple[Weight, ...]
    units: int
    width: int
    scales: int = 0
    experts: int = 0

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return sum(w.numel for w in self.weights)

    @cached_property
    def trainable(self) -> tuple[Weight, ...]:
        """The trained parameters."""
        return tuple(w for w in self.weights if w.trainable)

    @cached_property
    def trained(self) -> int:
        """The number of trained elements."""
        return sum(w.numel for w in self.trainable)

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest weight."""
        return max((w.numel for w in self.weights), default=0)

    @cached_property
    def largest_trained(self) -> int:
        """The number of elements of the largest trained weight."""
        return max((w.numel for w in self.trainable), default=0)

    @cached_property
    def by_unit(self) -> tuple[tuple[int, int], ...]:
        """The numbers of elements and of trained elements of each unit."""
        sums = [[0, 0] for _ in range(self.units)]
        for weight in self.weights:
            sums[weight.unit][0] += weight.numel
            sums[weight.unit][1] += weight.numel * weight.trainable
        return tuple((every, trained_elements) for every, trained_elements in sums)

    @cached_property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The numbers of elements of the trained parameters of each unit, by name."""
        sizes: tuple[dict[str, int], ...] = tuple({} for _ in range(self.units))
        for weight in self.trainable:
            sizes[weight.unit][weight.name] = weight.numel
        return sizes

    @cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the matrices that Muon and SOAP update."""
        return tuple((w.rows, w.columns) for w in self.trainable if w.is_matrix)


@lru_cache(maxsize=256)
def sum_optimizer_state(inventory: Inventory, optimizer: OptimizerState, shards: int = 1) -> int:
    """Return the bytes of optimizer state on the fullest of ``shards`` ranks that share each parameter's rows."""
    spec, total = OPTIMIZERS.get(optimizer.name), 0
    for weight in inventory.trainable:
        local, shape = weight.local(shards), weight.shape or (1,)
        if callable(spec.state):
            total += spec.state(StatePart(shape, local // weight.columns, optimizer.momentum, weight.is_matrix))
        elif spec.whole_matrices and weight.is_matrix:
            total += _FP32 * local
        else:
            total += _FP32 * (spec.state * local + 1)  # AdamW also has a count of steps of each parameter
        total += _FP32 * local * optimizer.average
    return total


def count_slots(optimizer: OptimizerState) -> int:
    """Return the fp32 elements of state for each element of a parameter that is divided anywhere."""
    spec = OPTIMIZERS.get(optimizer.name)
    state = spec.state(StatePart((1,), 1, optimizer.momentum)) // _FP32 if callable(spec.state) else spec.state
    return state + optimizer.average


def build_inventory(trace: ModelTrace[Any], width: int) -> Inventory:
    """Return the parameters of a model that computes in elements of ``width`` bytes."""
    units = tuple(unit.parameters for unit in trace.units)
    return _build_inventory_of_units(units, trace.order, width)  # the same for all batches


@lru_cache(maxsize=64)
def _build_inventory_of_units(
    units: tuple[tuple[TracedParameter, ...], ...], order: tuple[int, ...], width: int
) -> Inventory:
    weights, scales, experts = [], 0, 0
    for number, parameters in enumerate(units[index] for index in order):
        for p in parameters:
            shape = (-(-p.packed // width),) if p.packed else p.shape
            weights.append(Weight(number, p.name, shape, p.trainable, bool(p.packed)))
            scales += p.buffers
            experts += prod(p.shape) if p.packed and len(p.shape) > 2 else 0
    return Inventory(tuple(weights), len(order), width, scales, experts)


def count_reference_elements(trace: ModelTrace[Any]) -> int:
    """Return the number of elements of the reference model."""
    return sum(p.numel for index in trace.reference for p in trace.units[index].parameters)
