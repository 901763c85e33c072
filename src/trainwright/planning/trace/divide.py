"""Run a traced model unit by unit: of equal blocks a few run, the others copy their input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.models import linear_losses
from trainwright.planning.trace.build import BatchSample
from trainwright.planning.trace.record import EMBEDDING, Direction, Recorder
from trainwright.planning.trace.values import tensors_in

# Bytes that the state of the CPU's random numbers takes, which recomputation keeps.
_RANDOM_STATE = 5056


class Division:
    """The blocks of a model, each of which begins a segment of a recorder.

    The first two of a kind run: the first one is special, as it is the last to release what its kind shares, such as
    masks.

    Args:
        last: the last block that runs; None: all do.

    Attributes:
        stand_in: for each block the one that runs in its place.
        recorder: of the current trace.
    """

    def __init__(self, blocks: list[nn.Module], last: int | None, *, on_gpu: bool) -> None:
        self._last = len(blocks) - 1 if last is None else last
        equal: dict[tuple[str, bool], list[int]] = {}
        for number, block in enumerate(blocks):
            equal.setdefault((_signature(block), number <= self._last), []).append(number)
        self.stand_in = list(range(len(blocks)))
        for numbers in equal.values():
            for number in numbers[1:]:
                self.stand_in[number] = numbers[1]
        self.recorder: Recorder | None = None
        self._state = [0 if on_gpu or "forward" not in vars(block) else _RANDOM_STATE for block in blocks]
        self._rest: dict[int, int | None] = {}  # how many values a block returns beside its output; None: no tuple
        for number, block in enumerate(blocks):
            block.forward = partial(self._run, number, block.forward)

    def begin(self, unit: int, direction: Direction) -> None:
        """Begin a segment."""
        assert self.recorder is not None
        self.recorder.begin(unit, direction)

    def _ended(self, number: int, state: int) -> None:
        assert self.recorder is not None
        self.recorder.change(-state)
        self.begin(number - 1 if number else EMBEDDING, "backward")

    def _run(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.recorder is not None
        direction: Direction = "forward" if torch.is_grad_enabled() else "evaluation"
        hidden = tensors_in((args, kwargs))[0]
        self.begin(number, direction)
        state = self._state[number] if direction == "forward" else 0
        self.recorder.change(state)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._ended(number, state))
        if (other := self.stand_in[number]) != number:
            rest = self._rest[other]
            output = hidden.clone() if rest is None else (hidden.clone(), *[None] * rest)
        else:
            output = forward(*args, **kwargs)
            self._rest[number] = None if isinstance(output, torch.Tensor) else len(output) - 1
        if number == self._last:
            result = tensors_in(output)[0]
            if result.requires_grad:
                result.register_hook(lambda _: self.begin(number, "backward"))
            self.recorder.begin_later(len(self.stand_in), direction)
        return output


def _signature(block: nn.Module) -> str:
    """Describe a block but for its number: its modules' classes and plain attributes, and its parameters."""
    parts: list[Any] = ["forward" in vars(block)]
    for name, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str)) and "layer_i" not in k}
        shapes = [(k, p.shape, p.requires_grad) for k, p in module.named_parameters(recurse=False)]
        parts += [name, type(module).__name__, sorted(plain.items()), shapes]
    return repr(parts)


def to_fake(module: nn.Module, leave: Sequence[nn.Module]) -> dict[int, nn.Parameter]:
    """Replace tensors on the meta device by fake ones on the CPU; tied ones stay tied. Return the new parameters by the
    ``id`` of the old ones.

    Args:
        leave: modules that do not run.
    """
    left = {id(part) for one in leave for part in one.modules()}
    made: dict[int, Any] = {}
    old_ones = []  # so that no identity is used twice
    for part in module.modules():
        if id(part) in left:
            continue
        for name, old in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if not old.is_meta:
                continue
            old_ones.append(old)
            if id(old) not in made:
                new = torch.empty_like(old, device="cpu")
                made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(part, name, made[id(old)])
    return made


@contextmanager
def loops_of_loss(recorder: Recorder, sample: BatchSample, *, on_gpu: bool) -> Iterator[None]:
    """Let the loss take as many chunks and blocks as a sample says, and note the iterations."""

    def chunks(count: int, hidden: Any, weight: Any, *, fused: bool = False) -> Iterator[slice]:
        for number in range(sample.chunks):
            with recorder.scope(f"chunk{number}"):
                yield slice(number * sample.chunk, (number + 1) * sample.chunk)

    def row_blocks(logits: torch.Tensor) -> Iterator[slice]:
        if on_gpu:
            yield slice(None)
            return
        for number in range(sample.blocks):
            with recorder.scope(f"block{number}"):
                yield slice(number * sample.block, (number + 1) * sample.block)

    before = linear_losses.chunks, linear_losses.row_blocks, linear_losses.has_wide_products
    linear_losses.chunks, linear_losses.row_blocks = chunks, row_blocks  # type: ignore[assignment]
    linear_losses.has_wide_products = lambda tensor: on_gpu
    try:
        yield
    finally:
        linear_losses.chunks, linear_losses.row_blocks, linear_losses.has_wide_products = before
