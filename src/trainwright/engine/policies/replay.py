"""Silent corruption: every few steps a micro-batch of each rank is computed on another rank too, and the copies of the
weights are compared.

A run is the same on any rank, so both must be equal to the bit. If they are not, memory or a processor has changed a
number without an error (Dixit et al., arXiv 2102.11245).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from trainwright.data.stream.stream import GlobalBatch, MicroBatch
from trainwright.engine.events import Fault
from trainwright.engine.policies.base import Corrupted, RewindRequested, StepPolicy, TrainingContext
from trainwright.models.files import compute_checksum
from trainwright.utils.text import format_ranks

_FACTOR = 1_000_003  # so that exchanging two tensors changes the checksum of all
_PART, _MAX_PARTS = 4096, 256  # elements; how many are kept for the comparison
_CHECKED = "checked"
_WEIGHTS, _PASS = "corrupted_weights", "corrupted_computation"


class Passes(NamedTuple):
    """Checksums of the forward passes that a rank recorded: each block's output and the loss.

    ``own``: of its first micro-batch. ``other``: of the first micro-batch of the next rank.
    """

    own: list[int]
    other: list[int]


class _Differing(NamedTuple):
    """A part of a weight in which ranks differ. ``values``: [ranks, elements]."""

    name: str
    number: int
    values: torch.Tensor


class Replay(StepPolicy):
    """Compare what ranks compute, and their copies of the weights (faults.replay_every)."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        every = training.recipe.faults.replay_every
        self._every = None if every is None else int(every)
        # Hooks on compiled blocks would compile them again; the loss is compared in any case.
        self._blocks: Sequence[nn.Module] = () if training.recipe.train.compile is True else training.task.blocks()
        self._outputs: list[torch.Tensor] = []
        self._recorded: dict[bool, torch.Tensor] = {}  # by whether it is this rank's own micro-batch
        self._compares_passes = True
        self._first: int | None = None  # step of this launch
        self._suspected: dict[int, list[_Differing]] = {}  # by step, to be compared when it is repeated
        self._failed: Counter[int] = Counter()  # by step

    @property
    def trusted_before(self) -> int | None:
        """Return a step from before which checkpoints are trusted: that of the last check that found nothing, or the
        first one of this launch, which trusts what it begins with. None if nothing is checked.
        """
        if self._every is None or self._first is None:
            return None
        return int(self.state.get(_CHECKED, self._first))

    def is_due(self, step: int) -> bool:
        """Return whether this step is checked. Call it in every step."""
        if self._first is None:
            self._first = step
        return self._every is not None and step % self._every == 0

    def select_neighbor_batch(self, batch: GlobalBatch) -> MicroBatch:
        """Return the micro-batch of the next rank that this rank computes too."""
        world = self.training.world
        return batch.select_for_rank((world.rank + 1) % world.size, world.size)[0]

    @contextmanager
    def record_pass(self, *, own: bool) -> Iterator[list[torch.Tensor]]:
        """Record the forward pass of a micro-batch; the caller appends its loss to the list."""
        hooks = [block.register_forward_hook(self._record) for block in self._blocks]
        loss: list[torch.Tensor] = []
        try:
            yield loss
            self._recorded[own] = torch.stack([compute_checksum(output) for output in (*self._outputs, *loss)])
        finally:
            for hook in hooks:
                hook.remove()
            # Also where the pass has failed: it must keep no memory and is not part of the next one.
            self._outputs = []

    def check(self, step: int, again: Callable[[], None]) -> None:
        """Compare the weights of all ranks and the passes that they have recorded in this step.

        Args:
            again: records the same passes once more.

        Raises:
            RewindRequested: something is wrong, and the run goes back to a checkpoint from before the last check.
            Corrupted: something is wrong, and the run ends.
        """
        world, passes = self.training.world, self._take()
        self.compare_weights(step)
        everyone: list[Passes] = world.gather(passes, Passes)
        if self._compares_passes and (wrong := _find_mismatches(everyone)):
            again()
            second: list[Passes] = world.gather(self._take(), Passes)
            again()
            self._judge(step, wrong, everyone, second, world.gather(self._take(), Passes))
        self.state[_CHECKED] = float(step)

    def compare_weights(self, step: int) -> None:
        """Compare the weights of all ranks, if each has them whole; raise as ``check`` does."""
        world, spec = self.training.world, self.training.recipe.parallel.spec
        if world.size == 1 or (spec is not None and spec.shards_parameters):
            return
        weights: list[tuple[int, int]] = world.gather((self._checksum(frozen=True), self._checksum(frozen=False)))
        if len(set(weights)) > 1:
            ranks = _find_odd_ones(weights) or range(world.size)
            if len({frozen for frozen, _ in weights}) > 1:
                self._end(_WEIGHTS, ranks, f"the frozen weights of the ranks differ at step {step}", step)
            self._suspected[step] = self._find_differing()
            self._fail(_WEIGHTS, ranks, f"the weights of the ranks differ at step {step}", step)
        if ranks := self._find_farthest(self._suspected.pop(step, [])):
            detail = f"the weights of {format_ranks(ranks)} were wrong at step {step}, before the run went back"
            self._report(_WEIGHTS, ranks, detail, "continue", step)

    def _judge(
        self, step: int, wrong: list[int], first: list[Passes], second: list[Passes], third: list[Passes]
    ) -> None:
        """Tell a rank that computed wrongly once from ranks that compute differently.

        Args:
            wrong: the ranks whose micro-batch gave something else on the rank before.
        """
        culprits = [rank for rank, value in enumerate(first) if value != second[rank]]
        if second != third or not culprits:
            suspects = [{rank, (rank - 1) % len(first)} for rank in wrong]
            ranks = sorted(set.intersection(*suspects) or set.union(*suspects))
            why = "again and again" if second == third else "and not the same when repeated"
            detail = f"{format_ranks(ranks)} and another rank compute step {step} differently, {why}"
            if self.training.recipe.faults.on_corruption == "stop":
                self._end(_PASS, ranks, detail, step)
            self._compares_passes = False
            self._report(_PASS, ranks, detail, "continue; only weights are compared from now on", step)
            return
        self._fail(
            _PASS, culprits, f"{format_ranks(culprits)} computed step {step} wrongly: repeated, it is right", step
        )

    def _fail(self, kind: str, ranks: Sequence[int], detail: str, step: int) -> None:
        self._failed[step] += 1
        if self._failed[step] > 1 or self.training.recipe.faults.on_corruption == "stop":
            self._end(kind, ranks, detail + ", again" * (self._failed[step] > 1), step)
        raise RewindRequested(
            kind, ranks[0], f"{detail} ({format_ranks(ranks)})", leave_out=False, before=self.trusted_before
        )

    def _end(self, kind: str, ranks: Sequence[int], detail: str, step: int) -> None:
        """End the run. Frozen weights are in no checkpoint, and loaded again when the run is resumed."""
        unknown = " (one of them, it is not known which)" if len(ranks) > 1 else ""
        self._report(kind, ranks, f"{detail}: {format_ranks(ranks)}{unknown}", "stop", step)
        remove = ""
        if (since := self.trusted_before) is not None:
            remove = f"remove the checkpoints of step {since} and later ones, in checkpoint.copies too, "
        raise Corrupted(
            f"training stopped: {detail}: {format_ranks(ranks)}{unknown}; {remove}test the memory and the processor, "
            "then --resume"
        )

    def _report(self, kind: str, ranks: Sequence[int], detail: str, action: str, step: int) -> None:
        self.training.events.emit(Fault(kind=kind, rank=ranks[0], detail=detail, action=action, step=step))

    def _take(self) -> Passes:
        local_checksums, other_checksums = (self._recorded.pop(is_own).tolist() for is_own in (True, False))
        return Passes(local_checksums, other_checksums)

    def _checksum(self, *, frozen: bool) -> int:
        """Return the checksum of this rank's copy of the frozen or the trained weights."""
        total: torch.Tensor | int = 0  # of no tensor, it is not read from the device, for which the host would wait
        for _, tensor in self._copies(frozen=frozen):
            total = total * _FACTOR + compute_checksum(tensor)
        return int(total)

    def _copies(self, *, frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen or the trained weights that every rank has whole: those that it computes with and, where
        they are others, those that it updates.
        """
        spec, strategy = self.training.recipe.parallel.spec, self.training.strategy
        computing = dict(strategy.module.named_parameters())
        for name, weight in computing.items():
            if weight.requires_grad is not frozen:
                yield name, weight.detach()
        if frozen or (spec is not None and spec.shards):
            return
        for name, tensor in strategy.parameters(frozen=False):  # with buffers
            if name not in computing or tensor.data_ptr() != computing[name].data_ptr():
                yield f"{name}, in master precision", tensor

    def _find_differing(self) -> list[_Differing]:
        """Return the parts of weights in which the ranks differ, with the values of all ranks."""
        world, differences = self.training.world, list[_Differing]()
        weights = dict(self._copies(frozen=False))
        sums: list[list[int]] = world.gather([int(compute_checksum(weight)) for weight in weights.values()])
        for index, (name, weight) in enumerate(weights.items()):
            if len({of_rank[index] for of_rank in sums}) == 1:
                continue
            parts = weight.detach().reshape(-1).split(_PART)
            of_parts: list[list[int]] = world.gather([int(compute_checksum(part)) for part in parts])
            for number, part in enumerate(parts):
                if len({of_rank[number] for of_rank in of_parts}) > 1 and len(differences) < _MAX_PARTS:
                    differences.append(_Differing(name, number, torch.stack(world.gather(part.cpu()))))
        return differences

    def _find_farthest(self, before: Sequence[_Differing]) -> list[int]:
        """Return the ranks whose weights differed most from what they are now, at the same step.

        After a wrong weight the gradients of all ranks are wrong, so the other ranks differ too, by much less.
        """
        if not before:
            return []
        weights = dict(self._copies(frozen=False))
        distances = torch.zeros(self.training.world.size, dtype=torch.float64)
        for name, number, values in before:
            right = weights[name].detach().reshape(-1).split(_PART)[number].cpu().double()
            mask = (values != values[0]).any(0)
            distances += (values[:, mask].double() - right[mask]).abs().sum(1)
        return (distances > distances.min()).nonzero().flatten().tolist()

    def _record(self, module: nn.Module, arguments: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            self._outputs.append(first.detach())


def _find_odd_ones(values: Sequence[Hashable]) -> list[int]:
    """Return the ranks whose value is not that of most ranks; empty without a majority."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, rank_value in enumerate(values) if rank_value != value] if 2 * count > len(values) else []


def _find_mismatches(everyone: Sequence[Passes]) -> list[int]:
    return [rank for rank, passes in enumerate(everyone) if passes.own != everyone[rank - 1].other]
