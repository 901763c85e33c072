"""Memory of a model of which only some parameters are trained, so that most gradients never arrive."""

from __future__ import annotations

from trainwright.planning.memory.inventory import Inventory
from trainwright.planning.memory.walk import Allocated, Flow


class PartlyTrained(Flow):
    """``flow`` for a model of which only ``trained``, by unit and name of its inventory, have gradients."""

    def __init__(self, flow: Flow, trained: frozenset[tuple[int, str]], inventory: Inventory) -> None:
        self._flow = flow
        self._trained = trained
        self._of_unit: dict[int, int] = {}
        for weight in inventory.weights:
            if weight.trainable:
                self._of_unit[weight.unit] = self._of_unit.get(weight.unit, 0) + weight.numel

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        return self._flow.held

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._flow.begin(first, last)

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit`` and return the most memory that was held."""
        return self._flow.forward(unit)

    def head(self) -> Allocated:
        """Return the memory held while the head runs."""
        return self._flow.head()

    def forward_ended(self) -> None:
        """End the forward passes."""
        self._flow.forward_ended()

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the most memory that was held."""
        return self._flow.backward(unit)

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the most memory that was held."""
        if name:
            return self._flow.arrive(unit, name, numel) if (unit, name) in self._trained else self.held
        own = self._of_unit.get(unit, 0)
        return self._flow.arrive(unit, name, own) if own else self.held

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit`` and return the most memory that was held."""
        return self._flow.unit_ended(unit)

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        return self._flow.end()
