"""The parameters of a model one by one, as strategies distribute them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from trainwright.planning.architectures import traced
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.derived import AdapterShape, Quantization
from trainwright.planning.operations import block_kinds, block_weights, end_weights
from trainwright.planning.operations.tape import Parameter
from trainwright.planning.stack import OWN, Stack
from trainwright.recipe.registries import OPTIMIZERS

OUTSIDE = -1  # the unit of parameters outside the blocks
EXPERTS = "experts."
_FIRST = ("embedding", "positions")
# Modules whose parameters have a dimension more: many matrices in one, and their biases.
_STACKED = frozenset({"experts", "convolution", "conv1d"})


class Weight(NamedTuple):
    """A parameter [rows, columns] of a unit: a block number, or OUTSIDE.

    ``packed``: a quantized matrix, counted as a row of elements that use the same bytes.
    """

    unit: int
    name: str
    rows: int
    columns: int
    trainable: bool
    packed: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.columns

    @property
    def is_orthogonalized(self) -> bool:
        """Whether an optimizer of whole matrices updates it as one (`Muon` in engine/optimizer.py)."""
        return self.unit != OUTSIDE and self.columns > 1 and _STACKED.isdisjoint(self.name.split("."))

    def ranks(self, shards: int, expert_parallel: int) -> int:
        """Return how many of ``shards`` ranks share its rows, if ``expert_parallel`` of them have different experts."""
        return shards // expert_parallel if self.name.startswith(EXPERTS) else shards

    def state(self, optimizer: str, shards: int = 1) -> int:
        """Return this parameter's optimizer-state elements on the fullest of ``shards`` ranks that share its rows."""
        own = -(-self.rows // shards) * self.columns
        spec = OPTIMIZERS.get(optimizer)
        # And a count of steps, as AdamW has.
        return own if spec.whole_matrices and self.is_orthogonalized else spec.state * own + 1


@dataclass(frozen=True, eq=False)
class Inventory:
    """``weights``: the parameters in the model's order. ``buffers``: bytes of the scales of quantized ones."""

    weights: tuple[Weight, ...]
    buffers: int = 0

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return sum(w.numel for w in self.weights)

    @cached_property
    def trained(self) -> int:
        """The number of trained elements."""
        return sum(w.numel for w in self.weights if w.trainable)

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest weight."""
        return max((w.numel for w in self.weights), default=0)

    @cached_property
    def largest_trained(self) -> int:
        """The number of elements of the largest trained weight."""
        return max((w.numel for w in self.weights if w.trainable), default=0)


@lru_cache(maxsize=32)
def inventory(
    a: Architecture,
    width: int,
    trainable: bool,
    adapter: AdapterShape | None = None,
    quantization: Quantization = "none",
    stack: Stack = OWN,
) -> Inventory:
    """Return the inventory of a model that computes in elements of ``width`` bytes.

    A quantized weight counts as the number of elements of that width that use the same bytes (models/quantization.py).
    """
    if a.config and adapter is None:
        listed = traced.layout(a.config)["weights"]
        rows = [Weight(unit, name, n, k, trainable) for unit, name, n, k in listed]
        return Inventory(tuple(sorted(rows, key=lambda w: w.unit == OUTSIDE and w.name not in _FIRST)))
    ends = [
        Weight(OUTSIDE, name, p.n, p.k, p.trainable) for name, p in end_weights(a, width, trainable).parameters.items()
    ]
    first = [w for w in ends if w.name in _FIRST]
    last = [w for w in ends if w not in first]
    blocks, buffers = [], 0
    for unit, kind in enumerate(block_kinds(a)):
        for name, p in block_weights(a, kind, width, trainable, adapter, quantization, stack).parameters.items():
            if p.quantized == "none":
                blocks.append(Weight(unit, name, p.n, p.k, p.trainable))
                continue
            bits = p.numel if p.quantized == "int8" else p.numel // 2
            blocks.append(Weight(unit, name, -(-bits // width), 1, False, packed=True))
            buffers += _scales(p)
    return Inventory((*first, *blocks, *last), buffers)


@lru_cache(maxsize=32)
def partly_trained(full: Inventory, trained: frozenset[tuple[int, str]] | None) -> Inventory:
    """Return the inventory with only ``trained``, by unit and name, of its trainable parameters; None: all of them."""
    if trained is None:
        return full
    weights = (w._replace(trainable=w.trainable and (w.unit, w.name) in trained) for w in full.weights)
    return Inventory(tuple(weights), full.buffers)


@lru_cache(maxsize=64)
def by_unit(inventory: Inventory) -> tuple[tuple[int, int], ...]:
    """Return the numbers of elements and of trained elements outside the blocks, then of each block."""
    sums: dict[int, list[int]] = {}
    for weight in inventory.weights:
        counts = sums.setdefault(weight.unit, [0, 0])
        counts[0] += weight.numel
        counts[1] += weight.numel * weight.trainable
    return tuple((sums[unit][0], sums[unit][1]) for unit in sorted(sums))


@lru_cache(maxsize=64)
def experts_by_unit(inventory: Inventory) -> tuple[tuple[int, int], ...]:
    """Return those of the elements of ``by_unit`` that belong to experts."""
    return by_unit(Inventory(tuple(w if w.name.startswith(EXPERTS) else w._replace(rows=0) for w in inventory.weights)))


@lru_cache(maxsize=64)
def optimizer_state(inventory: Inventory, optimizer: str, shards: int = 1, expert_parallel: int = 1) -> int:
    """Return the optimizer-state elements of all trained parameters on the fullest rank."""
    return sum(w.state(optimizer, w.ranks(shards, expert_parallel)) for w in inventory.weights if w.trainable)


@lru_cache(maxsize=32)
def first_blocks(inventory: Inventory, count: int) -> int:
    """Return the number of elements of the first ``count`` blocks and of the parameters outside the blocks."""
    return sum(w.numel for w in inventory.weights if w.unit < count)


def _scales(weight: Parameter) -> int:
    """Return the bytes of a weight's scales.

    nf4: one byte per 64 elements, one fp32 per 256 of these, and a table of 256; nf4_single: one fp32 per 64; int8: one
    fp32 per row.
    """
    if weight.quantized == "int8":
        return 4 * weight.n
    scales = -(-weight.numel // 64)
    if weight.quantized == "nf4_single":
        return 4 * scales
    return scales + 4 * -(-scales // 256) + 1024 + 4


@lru_cache(maxsize=64)
def orthogonalized(inventory: Inventory) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the matrices that Muon updates, in the model's order."""
    return tuple((w.rows, w.columns) for w in inventory.weights if w.trainable and w.is_orthogonalized)
