"""The interface of a strategy's memory model, and the lookup of each strategy's model. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from trainwright.errors import RequestError
from trainwright.parallel.constants import CACHED_ELEMENTS
from trainwright.parallel.matrix_owners import assign, rows_of
from trainwright.parallel.replicated.spec import STEP_ELEMENTS
from trainwright.planning.memory.inventory import Inventory, optimizer_state
from trainwright.planning.memory.walk import Allocated, Flow
from trainwright.planning.operations import PassSettings
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.workload import Choice
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.strategy_spec import spec_of


@dataclass(frozen=True)
class StrategyMemory(ABC):
    """The memory of a strategy on the fullest rank, in bytes; the strategy's spec names the class.

    ``held``: the model's parameters. ``setting``: the settings of its passes.
    """

    held: Inventory
    setting: PassSettings
    choice: Choice
    optimizer: str

    @abstractmethod
    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""

    @abstractmethod
    def flow(self) -> Flow:
        """Return the memory flow of a pass, in addition to ``lasting``."""

    @abstractmethod
    def step(self) -> int:
        """Return the most bytes of gradients, and of tensors made from them, in an optimizer step."""

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory if the rest of ``lasting`` is there."""
        return 0

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of every tensor that stays in pinned memory on the host."""
        yield from ()

    @property
    def width(self) -> int:
        """Bytes per element in computation."""
        return self.setting.width

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return not self.setting.device.is_gpu


@cache
def memory_model(strategy: str) -> type[StrategyMemory]:
    """Return the class that the strategy's spec names.

    Raises:
        RequestError: it cannot be imported, or is not such a class.
    """
    entry_point = spec_of(strategy).memory
    described = f"{STRATEGIES.describe(strategy)}: its memory model {entry_point}"
    model = load(entry_point, described)
    if not (isinstance(model, type) and issubclass(model, StrategyMemory)):
        raise RequestError(f"{described} is no {StrategyMemory.__module__}.{StrategyMemory.__name__}")
    if missing := sorted(model.__abstractmethods__):
        raise RequestError(f"{described} lacks {', '.join(missing)}")
    return model


class ReplicatedMemory(StrategyMemory):
    """Memory of a full model on every rank, with fp32 master weights if it computes in a lower precision."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        inventory, width, stack = self.held, self.width, self.setting.stack
        master_width = max(width, stack.kept)
        return {
            "parameters": inventory.numel * width,
            "master weights": inventory.trained * master_width if width < master_width else 0,
            "optimizer state": int(stack.state_bytes * optimizer_state(inventory, self.optimizer)),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gradients through a step."""
        bucket_bytes = self.choice.spec.bucket_bytes
        return ReplicatedFlow(self.held, self.width, self._exchanges, self.setting.stack, bucket_bytes)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        width, stack, total, largest = self.width, self.setting.stack, self.held.trained, self.held.largest_trained
        master_width = max(width, stack.kept)
        if stack.updates_in_backward:
            return width * largest
        if stack.foreach:
            return (width + master_width) * total
        if width == master_width or self._exchanges or self.choice.gradient_accumulation_steps > 1:
            return master_width * total
        part = min(total, STEP_ELEMENTS)
        return width * (total - part) + master_width * part + width * largest

    @property
    def _exchanges(self) -> bool:
        return self.choice.num_processes > 1


class ReplicatedFlow(Flow):
    """Gradients of a full model: ``width`` bytes per element as autograd makes them, fp32 once they are accumulated."""

    def __init__(
        self, inventory: Inventory, width: int, exchange: bool, stack: Stack = OWN, bucket_bytes: int | None = None
    ) -> None:
        self._inventory = inventory
        self._width = width
        self._kept = max(width, stack.kept)
        self._one_by_one = stack.updates_in_backward
        self._ends = _bucket_ends(inventory, self._kept, bucket_bytes) if exchange else ()
        self._own = 0  # bytes in the parameters' own gradients
        self._sums = 0  # bytes in sums over earlier micro-batches or over the ranks
        self._arrived = self._started = 0  # elements whose gradients are ready; buckets that are exchanged
        self._first = self._last = True

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        return Allocated(self._own + self._sums)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last = first, last
        self._arrived = self._started = 0
        if first:
            self._own = self._sums = 0

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the most memory that was held."""
        if self._one_by_one:  # freed as soon as the weight is updated
            return Allocated(self._width * min(numel, self._inventory.largest_trained))
        exchanged = self._last and bool(self._ends)
        if self._width < self._kept and not exchanged and not (self._first and self._last):
            return self._add(numel)
        if self._width < self._kept or self._first:
            self._own += self._width * numel
        self._arrived += numel
        return self._exchange() if exchanged else self.held

    def _add(self, numel: int) -> Allocated:
        """Add gradients to their sums one by one, and free them."""
        largest = min(numel, self._inventory.largest_trained)
        if self._first:
            self._sums += self._kept * numel
        copied = 0 if self._first else self._kept * min(largest, CACHED_ELEMENTS)
        return Allocated(self._sums + self._width * largest + copied)

    def _exchange(self) -> Allocated:
        """Copy the gradients of every full bucket into one tensor, and free them."""
        full = bisect_right(self._ends, self._arrived, lo=self._started)
        if full == self._started:
            return self.held
        begin = self._ends[self._started - 1] if self._started else 0
        numel, first = self._ends[full - 1] - begin, self._ends[self._started] - begin
        highest = Allocated(self._own + self._sums, buckets=self._kept * first)
        self._own -= self._width * numel
        if self._width == self._kept or self._first:
            self._sums += self._kept * numel
        self._started = full
        return highest


@lru_cache(maxsize=64)
def _bucket_ends(inventory: Inventory, master_width: int, bucket_bytes: int | None) -> tuple[int, ...]:
    """Return the end of each bucket in elements from the last parameter, about the order in which gradients arrive."""
    if bucket_bytes is None:
        return (inventory.trained,)
    ends: list[int] = []
    bucket_left = 0
    for weight in reversed(inventory.weights):
        if weight.trainable:
            size = master_width * weight.numel
            if size > bucket_left:
                ends.append(ends[-1] if ends else 0)
                bucket_left = bucket_bytes
            ends[-1] += weight.numel
            bucket_left -= size
    return tuple(ends)


_FP32 = 4

Shape = tuple[int, int]


@lru_cache(maxsize=64)
def orthogonalized(inventory: Inventory) -> tuple[Shape, ...]:
    """Return the shapes of the matrices that Muon updates, in the model's order."""
    return tuple((w.rows, w.columns) for w in inventory.weights if w.trainable and w.is_orthogonalized)


def exchanged_width(on_gpu: bool) -> int:
    """Return the bytes of an element in which matrices are orthogonalized and exchanged."""
    return 2 if on_gpu else 4


def orthogonalizing(inventory: Inventory, choice: Choice, on_gpu: bool) -> int:
    """Return the most bytes while Muon updates matrices, in addition to weights, gradients and optimizer state."""
    width, shapes = exchanged_width(on_gpu), orthogonalized(inventory)
    if choice.num_processes == 1:  # the momentum is there in fp32
        return max((_FP32 * rows * columns + _iterations(rows, columns, width) for rows, columns in shapes), default=0)
    return _of_rounds(shapes, choice.num_processes, choice.shards, width)


@lru_cache(maxsize=64)
def _of_rounds(shapes: tuple[Shape, ...], ranks: int, shards: int, width: int) -> int:
    highest = 0
    for one in assign(shapes, ranks):
        owned = [[shapes[index] for index in indices] for indices in one]
        for begin in range(0, ranks, shards):
            highest = max(highest, _round(owned[begin : begin + shards], width))
    return highest


def _round(owned: Sequence[Sequence[Shape]], width: int) -> int:
    """Return the bytes on the fullest rank of a replica. ``owned``: the matrices of each of its ranks."""
    everything = [shape for shapes in owned for shape in shapes]
    # An update is converted to fp32 as it is added to the weights.
    added = _FP32 * max((_share(shape, len(owned)) for shape in everything), default=0) if width < _FP32 else 0
    if len(owned) == 1:
        updated = highest = 0
        for rows, columns in everything:
            highest = max(highest, updated + width * rows * columns + _iterations(rows, columns, width))
            updated += width * rows * columns
        return max(highest, 2 * updated + added)  # this rank's updates in a row, and those of another
    given_bytes = width * sum(_share(shape, len(owned)) for shape in everything)
    taken = width * max(sum(rows * columns for rows, columns in shapes) for shapes in owned)
    alone = max((width * rows * columns + _iterations(rows, columns, width) for rows, columns in everything), default=0)
    return max(2 * given_bytes + added, given_bytes + taken, taken + alone)


def _share(shape: Shape, shards: int) -> int:
    rows, columns = shape
    return rows_of(rows, shards, 0) * columns


def _iterations(rows: int, columns: int, width: int) -> int:
    """Return the most bytes of the iterations: at the end of one, or within it."""
    numel, square = rows * columns, min(rows, columns) ** 2
    return width * max(4 * numel + square, 2 * numel + 4 * square)
