"""Track the live bytes of an optimizer step through the forward and backward pass of a model's parts.

Live bytes are the activations and working memory of the parts (``operations.Pass``) plus the parameters and gradients
of the strategy at that moment (``Flow``). The walk iterates over blocks, not operations: equal blocks are simulated
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainwright.planning.operations import ModelPasses, Pass

_ENDS = 5
Moved = Literal["nothing", "everything", "inputs"]


class Allocated(NamedTuple):
    """Bytes that a strategy holds in addition to those held between steps."""

    gradients: int = 0
    gathered: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.gradients + self.gathered + self.buckets


class Flow:
    """The memory of a strategy in the course of a pass. The base class holds nothing; strategies override it.

    Units are the block numbers, and -1 for everything outside the blocks. ``held``: memory that is held now. Methods
    return the most memory that is held while they run.
    """

    held = Allocated()

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit``, which runs with ``held`` afterwards."""
        return self.held

    def head(self) -> Allocated:
        """Return the memory held before the loss is computed, after the blocks have run."""
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
    """The most bytes of a phase, and their composition."""

    def __init__(self) -> None:
        self.total = 0
        self._what = (Allocated(), 0, 0, False)

    def note(self, allocated: Allocated, activations: int, work: int, loss: bool = False) -> None:
        """Record the moment if it needs the most memory so far."""
        total = allocated.gradients + allocated.gathered + allocated.buckets + activations + work
        if total > self.total:
            self.total = total
            self._what = (allocated, activations, work, loss)

    @property
    def working_set(self) -> int:
        """The bytes that the operation in progress needs besides activations and the strategy's memory."""
        return self._what[2]

    def parts(self) -> dict[str, int]:
        """Return the bytes by purpose."""
        allocated, activations, work, loss = self._what
        return {
            "gradients": allocated.gradients,
            "gathered parameters": allocated.gathered,
            "gradient buckets": allocated.buckets,
            "activations kept": activations,
            "loss working set" if loss else "activations worked on": work,
        }


@dataclass
class Walk:
    """Iterate over the passes of a step.

    ``parts``: passes of its first micro-batch, ``later``: of all others. ``width``: bytes per element of the gradients
    that autograd makes. ``moved``: saved activations of blocks are in the host's memory, except the results that
    selective recomputation keeps (models/recompute.py). ``trained``: unit and name of the parameters that have
    gradients; None: of all. ``counts``: numbers of elements and of trained elements of each unit, from -1. ``before``:
    bytes of what the previous pass returned, which stay until the forward pass is over.
    """

    parts: ModelPasses
    later: ModelPasses
    tied: bool
    width: int
    moved: Moved = "nothing"
    holds: bool = False
    fetches_ahead: bool = True
    cached: int = 0
    trained: frozenset[tuple[int, str]] | None = None
    counts: tuple[tuple[int, int], ...] = ()
    before: int = 0
    forward: Peak = field(default_factory=Peak)
    backward: Peak = field(default_factory=Peak)
    evaluation: Peak = field(default_factory=Peak)

    def step(self, flow: Flow, micro_batches: int) -> None:
        """Run all passes of a step; those in the middle are equal and run once."""
        numbers = [0, 1, micro_batches - 1] if micro_batches > 2 else range(micro_batches)
        for number in numbers:
            flow.begin(number == 0, number == micro_batches - 1)
            parts = self.later if number else self.parts
            self._forwards(flow, parts)
            self._backwards(flow, parts)

    def evaluate(self, flow: Flow) -> None:
        """Run a forward-only pass."""
        embedding, head, peak = self.parts.embedding, self.parts.head, self.evaluation
        flow.begin(True, False)
        peak.note(flow.forward(-1), 0, 0)
        peak.note(flow.held, 0, embedding.evaluation_peak)
        tables = embedding.kept + embedding.held + (embedding.output if embedding.holds_output else 0)
        looked_at = set(self._looked_at())
        for unit, block in enumerate(self.parts.blocks):
            highest = flow.forward(unit)
            if unit in looked_at:
                peak.note(highest, tables, block.output)
                peak.note(flow.held, tables, block.evaluation_peak)
        peak.note(flow.head(), tables, head.evaluation_peak, loss=True)
        flow.forward_ended()

    def _looked_at(self) -> range | list[int]:
        """Return the indices of the blocks that are recorded.

        In the middle of many blocks live bytes grow or shrink evenly, so the peak is at one of the ends.
        """
        count = len(self.parts.blocks)
        if count <= 3 * _ENDS:
            return range(count)
        return [*range(_ENDS), *range(count - _ENDS, count)]

    def _stays(self, block: Pass) -> int:
        """Return the saved bytes of ``block`` that stay on the device while others run."""
        if self.moved == "nothing":
            return block.kept
        return 0 if self.moved == "everything" else max(0, block.kept - block.output)

    def _fetched(self, block: Pass) -> int:
        """Return the saved bytes of ``block`` that are copied back while the block after it runs backward."""
        return block.kept - self._stays(block) if self.fetches_ahead else 0

    def _forwards(self, flow: Flow, parts: ModelPasses) -> None:
        peak = self.forward
        embedding = parts.embedding
        peak.note(flow.forward(-1), self.before, 0)
        peak.note(flow.held, self.before, embedding.forward_peak)
        activations = self.before + embedding.kept
        embedding_bytes = embedding.held
        if embedding.holds_output and parts.blocks and not parts.blocks[0].keeps_input:
            embedding_bytes += embedding.output
        looked_at = set(self._looked_at())
        for unit, block in enumerate(parts.blocks):
            highest = flow.forward(unit)
            if unit in looked_at:
                # The first block's input is already held.
                work = (
                    embedding_bytes - embedding.output
                    if unit == 0 and embedding_bytes >= embedding.output
                    else embedding_bytes
                )
                peak.note(highest, activations, embedding_bytes + block.output)
                peak.note(flow.held, activations, work + block.forward_peak)
            activations += self._stays(block) + self.cached
        peak.note(flow.head(), activations, parts.head.forward_peak, loss=True)
        flow.forward_ended()

    def _backwards(self, flow: Flow, parts: ModelPasses) -> None:
        peak = self.backward
        activations = parts.embedding.kept + sum(self._stays(block) + self.cached for block in parts.blocks)
        peak.note(flow.backward(-1), activations, parts.head.kept, loss=True)
        waiting = self._moments(flow, -1, parts.head, activations, 0, loss=True)
        looked_at = set(self._looked_at())
        ahead = 0
        for unit in range(len(parts.blocks) - 1, -1, -1):
            block = parts.blocks[unit]
            activations -= self._stays(block) + ahead
            ahead = self._fetched(parts.blocks[unit - 1]) if unit else 0
            activations += ahead
            before, activations = activations, activations + (2 * block.output if self.holds else 0)
            if unit not in looked_at:
                flow.backward(unit)
                self._arrive(flow, unit, "", block.gradients)
                flow.unit_ended(unit)
                activations += block.left
                continue
            peak.note(_with(flow.backward(unit), waiting), before, block.kept + block.output)
            self._moments(flow, unit, block, before, waiting)
            activations += block.left
            peak.note(_with(flow.unit_ended(unit), waiting), before + block.left, block.output)
        activations -= parts.embedding.kept
        self._moments(flow, -1, parts.embedding, activations, waiting)
        peak.note(flow.unit_ended(-1), 0, 0)
        peak.note(flow.end(), 0, 0)

    def _moments(self, flow: Flow, unit: int, part: Pass, activations: int, waiting: int, loss: bool = False) -> int:
        """Add the gradients of a part one by one, and return the bytes that wait to be added to another gradient."""
        peak = self.backward
        for moment in part.moments:
            peak.note(_with(flow.held, waiting), activations, moment.peak, loss)
            if loss and self.tied and moment.name == "embedding":
                waiting = moment.numel * self.width
                continue
            if unit == -1 and moment.name == "embedding":
                waiting = 0
            arrived = self._arrive(flow, unit, moment.name, moment.numel)
            peak.note(_with(arrived, waiting), activations, moment.live, loss)
        peak.note(_with(flow.held, waiting), activations, part.backward_peak, loss)
        return waiting

    def _arrive(self, flow: Flow, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter, or without a name those of a unit; return the most memory that was held."""
        if self.trained is not None:
            if not name:
                numel = self.counts[unit + 1][1]
            if not numel or (name and (unit, name) not in self.trained):
                return flow.held
        return flow.arrive(unit, name, numel)


def _with(allocated: Allocated, waiting: int) -> Allocated:
    return allocated._replace(gradients=allocated.gradients + waiting) if waiting else allocated
