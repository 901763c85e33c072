"""Track the live bytes of an optimizer step through the passes of a model's units.

Live bytes are those that the trace of each pass shows (``trace.units.Moment``), plus the parameters and gradients of
the strategy at that moment (``Flow``). Imports no torch.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.trace.units import PassTrace, SizedModel

# Equal units in a row whose backward passes are walked parameter by parameter, at each end of it. In the middle live
# bytes grow or shrink evenly.
_ENDS = 3


class Allocated(NamedTuple):
    """Bytes that a strategy holds in addition to those held between steps."""

    gradients: int = 0
    gathered: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.gradients + self.gathered + self.buckets


def choose_largest(one: Allocated, other: Allocated) -> Allocated:
    """Return the moment with the most bytes."""
    return one if one.total >= other.total else other


class Flow:
    """The memory of a strategy in the course of a pass. The base class holds nothing; strategies override it.

    Units are numbered in the order of the forward pass: 0 is the embedding, then come the blocks, and the last one is
    the head. ``allocated``: what it has allocated now. Methods return the most that is allocated while they run.
    """

    allocated = Allocated()

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit``, which runs with ``allocated`` afterwards."""
        return self.allocated

    def forward_ended(self) -> None:
        """End the forward pass, after the loss is computed."""

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit``."""
        return self.allocated

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter; without a name, those of all parameters of the unit."""
        return self.allocated

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit``, when all its gradients are ready."""
        return self.allocated

    def end(self) -> Allocated:
        """End the backward pass and return the most memory that was held."""
        return self.allocated


class Peak:
    """The most bytes of a phase, and their composition. ``working_set``: bytes of the operation in progress."""

    def __init__(self) -> None:
        self.total = self.working_set = 0
        self._what = (Allocated(), 0, False)

    def note(self, allocated: Allocated, activations: int, work: int = 0, loss: bool = False) -> None:
        """Record the moment if it needs the most memory so far."""
        total = allocated.total + activations + work
        if total > self.total:
            self.total, self.working_set = total, work
            self._what = (allocated, activations, loss)

    def parts(self) -> dict[str, int]:
        """Return the bytes by purpose."""
        allocation, activations, loss = self._what
        return {
            "gradients": allocation.gradients,
            "gathered parameters": allocation.gathered,
            "gradient buckets": allocation.buckets,
            "activations kept": activations,
            "loss working set" if loss else "activations worked on": self.working_set,
        }


class Order(NamedTuple):
    """What decides in which order a pass asks for memory: the units, the gradients of each kind, and the reference."""

    units: tuple[int, ...]
    gradients: tuple[tuple[str, ...], ...]
    reference: tuple[int, ...]

    @classmethod
    def of(cls, model: SizedModel) -> Order:
        """Return the order of a model's passes."""
        gradients = (tuple(moment.gradient for moment in unit.backward.moments) for unit in model.units)
        return cls(model.order, tuple(gradients), model.reference)


_Levels = tuple[list[int], list[int]]  # live bytes, and those of the operation in progress


class _Notes:
    """The moments of a phase: what a strategy has allocated, beside the bytes of a batch at two of `_build_levels`.

    ``later``: whether they are of a micro-batch after the first. ``between``: moments between blocks, by number.
    """

    def __init__(self) -> None:
        self.later = False
        self.between: list[int] = []
        self._notes: list[tuple[int, bool, int, int, bool, Allocated]] = []

    def add(self, allocated: Allocated, live: int, work: int = 0, loss: bool = False, between: bool = False) -> None:
        if between:
            self.between.append(len(self._notes))
        gradients, gathered_bytes, buckets = allocated
        self._notes.append((gradients + gathered_bytes + buckets, self.later, live, work, loss, allocated))

    def find_most_between(self, *levels: _Levels) -> int:
        """Return the most bytes between blocks, for batches as in ``peak``."""
        notes = (self._notes[number] for number in self.between)
        return max((total + levels[later][0][live] for total, later, live, *_ in notes), default=0)

    def peak(self, *levels: _Levels) -> Peak:
        """Return the peak for batches with these bytes, of the first micro-batch and of later ones."""
        highest, peak = 0, Peak()
        for total, later, live, work, loss, allocation in self._notes:
            lives, works = levels[later]
            if total + lives[live] + works[work] > highest:
                peak.note(allocation, lives[live], works[work], loss)
                highest = peak.total
        return peak


class Route:
    """What a strategy has allocated at each moment of a step and of an evaluation, for batches of any size.

    ``gradients``: bytes of gradients after the step.
    """

    def __init__(self, inventory: Inventory, flow: Flow, first: Order, later: Order, micro_batches: int) -> None:
        self.forward, self.backward, self.evaluation = _Notes(), _Notes(), _Notes()
        self._inventory, self._flow = inventory, flow
        for number in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):  # those between are equal
            flow.begin(number == 0, number == micro_batches - 1)
            order = later if number else first
            self.forward.later = self.backward.later = number > 0
            kinds, units = len(order.gradients), len(order.units)
            for position, kind in enumerate(order.reference):  # before the trained model
                self.forward.add(flow.allocated, units + 1 + position, 1 + kinds + kind)
            self._run(self.forward, order, 1)
            self._run_backward(order)
        self.gradients = flow.allocated.total
        flow.begin(True, False)
        self._run(self.evaluation, first, 1 + len(first.gradients))

    def _run(self, notes: _Notes, order: Order, begin: int) -> None:
        flow, last = self._flow, len(order.units) - 1
        for unit, kind in enumerate(order.units):
            notes.add(flow.forward(unit), unit)
            notes.add(flow.allocated, unit, begin + kind, loss=unit == last, between=0 < unit < last)
        flow.forward_ended()

    def _run_backward(self, order: Order) -> None:
        notes, flow, last = self.backward, self._flow, len(order.units) - 1
        ends = _find_end_units(order.units)
        # The indices in `_build_levels` of the first moment of each kind of unit.
        begins = [1 + 2 * begin for begin in accumulate(map(len, order.gradients), initial=0)]
        for unit in range(last, -1, -1):
            notes.add(flow.backward(unit), 2 * unit, loss=unit == last)
            kind = order.units[unit]
            if unit in ends:
                self._moments(unit, order.gradients[kind], begins[kind], loss=unit == last)
            elif trained_elements := self._inventory.by_unit[unit][1]:
                flow.arrive(unit, "", trained_elements)
            notes.add(flow.unit_ended(unit), 2 * unit + 1, between=0 < unit < last)
        notes.add(flow.end(), 1)

    def _moments(self, unit: int, gradients: tuple[str, ...], begin: int, *, loss: bool) -> None:
        """Add the gradients of a unit one by one."""
        notes, flow, sizes = self.backward, self._flow, self._inventory.sizes[unit]
        for number, gradient in enumerate(gradients):
            notes.add(flow.allocated, 2 * unit, begin + 2 * number, loss)
            if gradient:
                allocation = flow.arrive(unit, gradient, sizes[gradient])
                notes.add(allocation, 2 * unit, begin + 2 * number + 1, loss)


class Walk:
    """The peaks of the phases of a step and of an evaluation: ``forward``, ``backward`` and ``evaluation``.

    Args:
        route: what the strategy has allocated.
        first, later: the first micro-batch of a step, and all others.
        offloads: saved activations of blocks are in the host's memory; those of a block are copied back while the block
            after it runs backward.
    """

    def __init__(self, route: Route, first: SizedModel, later: SizedModel, offloads: bool = False) -> None:
        levels = [_build_levels(model, offloads) for model in ((first,) if later is first else (first, later))]
        forward, backward = [level[0] for level in levels], [level[1] for level in levels]
        self.forward = route.forward.peak(*forward, forward[-1])
        self.backward = route.backward.peak(*backward, backward[-1])
        self.evaluation = route.evaluation.peak(levels[0][2])
        self._phases = (route.forward, (*forward, forward[-1])), (route.backward, (*backward, backward[-1]))

    @property
    def most_between_blocks(self) -> int:
        """The most bytes of a step where blocks begin their forward pass or have ended their backward pass."""
        return max(notes.find_most_between(*levels) for notes, levels in self._phases)


def _build_levels(model: SizedModel, offloads: bool) -> tuple[_Levels, _Levels, _Levels]:
    """Return the bytes of a batch in the forward pass, the backward pass and the evaluation.

    Forward: before and after each unit, then of the reference; backward: before and after each unit.
    """
    units, blocks = model.list_units(), range(1, len(model.order) - 1) if offloads else ()
    away = {number: sum(units[number].forward.saved) for number in blocks}
    changes = [_read_bytes_after(unit.forward) - away.get(number, 0) for number, unit in enumerate(units)]
    forward = _accumulate_changes(changes)
    evaluation = _accumulate_changes([_read_bytes_after(unit.evaluation) for unit in units])
    reference = _accumulate_changes([_read_bytes_after(model.units[index].evaluation) for index in model.reference])
    passes = [*(unit.forward for unit in model.units), *(unit.evaluation for unit in model.units)]
    work = [0, *map(_find_peak, passes)]
    live, backward = forward[-1], [0] * (2 * len(units))
    for unit in range(len(units) - 1, -1, -1):
        live += away.pop(unit, 0) + away.pop(unit - 1, 0)
        backward[2 * unit] = live
        live += _read_bytes_after(units[unit].backward)
        backward[2 * unit + 1] = live
    moments = [size for unit in model.units for m in unit.backward.moments for size in (m.live[0], m.after)]
    return ([*forward, *reference], work), (backward, [0, *moments]), (evaluation, work)


def _accumulate_changes(changes: list[int]) -> list[int]:
    return list(accumulate(changes, initial=0))


def _find_peak(part: PassTrace[int]) -> int:
    return max((moment.live[0] for moment in part.moments), default=0)


def _read_bytes_after(part: PassTrace[int]) -> int:
    return part.moments[-1].after if part.moments else 0


def _find_end_units(order: tuple[int, ...]) -> set[int]:
    """Return the units near the first and the last one of their kind."""
    ends: set[int] = set()
    for kind in set(order):
        equal = [unit for unit, index in enumerate(order) if index == kind]
        ends.update(equal[:_ENDS], equal[-_ENDS:])
    return ends
