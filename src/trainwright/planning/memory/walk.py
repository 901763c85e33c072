"""Track the live bytes of an optimizer step through the passes of a model's units.

Live bytes are those that the trace of each pass shows (``trace.units.Moment``), plus the parameters and gradients of
the strategy at that moment (``Flow``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.trace.units import PassTrace, SizedModel

# Equal units in a row whose backward passes are walked parameter by parameter, at each end of it. In the middle live
# bytes grow or shrink evenly.
_ENDS = 5


class Allocated(NamedTuple):
    """Bytes that a strategy holds in addition to those held between steps."""

    gradients: int = 0
    gathered: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.gradients + self.gathered + self.buckets


def most(*moments: Allocated) -> Allocated:
    """Return the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


class Flow:
    """The memory of a strategy in the course of a pass. The base class holds nothing; strategies override it.

    Units are numbered in the order of the forward pass: 0 is the embedding, then come the blocks, and the last one is
    the head. ``held``: memory that is held now. Methods return the most memory that is held while they run.
    """

    held = Allocated()

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit``, which runs with ``held`` afterwards."""
        return self.held

    def forward_ended(self) -> None:
        """End the forward pass, after the loss is computed."""

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit``."""
        return self.held

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter; without a name, those of all parameters of the unit."""
        return self.held

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit``, when all its gradients are ready."""
        return self.held

    def end(self) -> Allocated:
        """End the backward pass and return the most memory that was held."""
        return self.held


class Peak:
    """The most bytes of a phase, and their composition. ``working_set``: bytes of the operation in progress."""

    def __init__(self) -> None:
        self.total = self.working_set = 0
        self._what = (Allocated(), 0, False)

    def note(self, allocated: Allocated, activations: int, work: int = 0, loss: bool = False) -> None:
        """Record the moment if it needs the most memory so far."""
        total = allocated.gradients + allocated.gathered + allocated.buckets + activations + work
        if total > self.total:
            self.total, self.working_set = total, work
            self._what = (allocated, activations, loss)

    def parts(self) -> dict[str, int]:
        """Return the bytes by purpose."""
        allocated, activations, loss = self._what
        return {
            "gradients": allocated.gradients,
            "gathered parameters": allocated.gathered,
            "gradient buckets": allocated.buckets,
            "activations kept": activations,
            "loss working set" if loss else "activations worked on": self.working_set,
        }


class Walk:
    """The peaks of the phases of a step: ``forward``, ``backward`` and ``evaluation``.

    ``offloads``: saved activations of blocks are in the host's memory; those of a block are copied back while the block
    after it runs backward.
    """

    def __init__(self, inventory: Inventory, flow: Flow, offloads: bool = False) -> None:
        self.forward, self.backward, self.evaluation = Peak(), Peak(), Peak()
        self._inventory, self._flow, self._offloads = inventory, flow, offloads

    def step(self, first: SizedModel, later: SizedModel, micro_batches: int) -> None:
        """Run the passes of a step over its ``first`` micro-batch and all ``later`` ones.

        Those in the middle are equal and run once.
        """
        for number in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
            self._flow.begin(number == 0, number == micro_batches - 1)
            model = later if number else first
            self._refer(model)
            self._backwards(model, *self._forwards(model))

    def evaluate(self, model: SizedModel) -> None:
        """Run a forward-only pass."""
        self._flow.begin(True, False)
        self._run(self.evaluation, (unit.evaluation for unit in model.in_order()))

    def _refer(self, model: SizedModel) -> None:
        """Run the reference model forward, before the trained one."""
        live = 0
        for part in (model.units[index].evaluation for index in model.reference):
            self.forward.note(self._flow.held, live, _peak(part))
            live += _after(part)

    def _forwards(self, model: SizedModel) -> tuple[int, dict[int, int]]:
        """Return the live bytes after a forward pass, and those that are in the host's memory, by unit."""
        units = model.in_order()
        blocks = range(1, len(units) - 1) if self._offloads else ()
        away = {number: sum(units[number].forward.saved) for number in blocks}
        return self._run(self.forward, (unit.forward for unit in units), away), away

    def _run(self, peak: Peak, parts: Iterable[PassTrace[int]], away: dict[int, int] | None = None) -> int:
        live, flow, last = 0, self._flow, self._inventory.units - 1
        for unit, part in enumerate(parts):
            peak.note(flow.forward(unit), live)
            peak.note(flow.held, live, _peak(part), loss=unit == last)
            live += _after(part) - (away or {}).get(unit, 0)
        flow.forward_ended()
        return live

    def _backwards(self, model: SizedModel, live: int, away: dict[int, int]) -> None:
        peak, flow, last = self.backward, self._flow, self._inventory.units - 1
        ends = _ends(model.order)
        for unit in range(last, -1, -1):
            part = model.units[model.order[unit]].backward
            live += away.pop(unit, 0) + away.pop(unit - 1, 0)
            peak.note(flow.backward(unit), live, loss=unit == last)
            if unit in ends:
                self._moments(unit, part, live)
            elif trained := self._inventory.by_unit[unit][1]:
                flow.arrive(unit, "", trained)
            live += _after(part)
            peak.note(flow.unit_ended(unit), live)
        peak.note(flow.end(), live)

    def _moments(self, unit: int, part: PassTrace[int], live: int) -> None:
        """Add the gradients of a unit one by one."""
        peak, flow, sizes = self.backward, self._flow, self._inventory.sizes[unit]
        loss = unit == self._inventory.units - 1
        for moment in part.moments:
            peak.note(flow.held, live, moment.live[0], loss)
            if moment.gradient:
                peak.note(flow.arrive(unit, moment.gradient, sizes[moment.gradient]), live, moment.after, loss)


def _peak(part: PassTrace[int]) -> int:
    return max((moment.live[0] for moment in part.moments), default=0)


def _after(part: PassTrace[int]) -> int:
    return part.moments[-1].after if part.moments else 0


def _ends(order: tuple[int, ...]) -> set[int]:
    """Return the units near the first and the last one of their kind."""
    ends: set[int] = set()
    for kind in set(order):
        equal = [unit for unit, index in enumerate(order) if index == kind]
        ends.update(equal[:_ENDS], equal[-_ENDS:])
    return ends
