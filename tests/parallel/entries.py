"""What each of several processes does in the tests of every strategy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.parallel.generation import step
from tests.support.training import DTYPES, built
from trainwright.models import linear_losses
from trainwright.parallel.world import join, leave

TOKENS = [[72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]]


def exported_model_is_the_trained_one(cases: list[list[str]], directory: str) -> None:
    """What plain transformers loads of an export has the trained model's logits."""
    world = join("cpu")
    for number, overrides in enumerate(cases):
        print(overrides, file=sys.stderr)
        recipe, task, strategy = built(world, overrides)
        before = [tensor.clone() for _, tensor in strategy.parameters()]
        for _ in range(3):
            step(task, strategy)
        tensors = strategy.parameters()
        if world.is_main:
            task.export(tensors, Path(directory, str(number)))
        for _ in tensors:
            pass
        world.barrier()
        assert any(not torch.equal(a, b) for a, (_, b) in zip(before, strategy.parameters(), strict=True))
        dtype = DTYPES[str(recipe.train.mixed_precision)]
        plain = AutoModelForCausalLM.from_pretrained(Path(directory, str(number)), dtype=dtype).eval()
        tokens = torch.tensor(TOKENS)
        with strategy.full_parameters() as (module, _), module.open_for_generation() as model, torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-6, atol=1e-6)
    leave()


class _LateCopy:
    """A copy to the host that is done once something waits for it, as one to pinned memory may be."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target, self._source = target, target.clone()
        target.fill_(torch.nan)

    def synchronize(self) -> None:
        self._target.copy_(self._source)


def offloaded_gradients_are_awaited(strategy: str) -> None:
    """The norm is that of the gradients, also if their copies to the host are done late."""
    world = join("cpu")
    _, task, spread = built(world, [f"parallel.strategy={strategy}", "parallel.offload_optimizer=true"])
    micro = task.stream.global_batch(0).select_for_rank(world.rank, world.size)[0]
    spread.backward(task.loss(spread.module, micro, world.device).total, last=True)
    norm = spread.gradient_norm()
    optimizer = spread.module.optimizer
    copies = [_LateCopy(master.grad) for master in optimizer.single_partition_of_fp32_groups]
    optimizer._pending_offload_events.update(enumerate(copies))
    assert spread.gradient_norm() == norm > 0
    leave()


def the_head_is_gathered_once(strategy: str) -> None:
    """In a forward pass over targets that take many chunks, and once more in the backward pass where it is freed."""
    with _counted() as sizes:
        world = join("cpu")
        # So that nothing else has as many elements, nor has the root without it.
        overrides = [
            f"parallel.strategy={strategy}",
            "model.config.tie_word_embeddings=false",
            "train.mixed_precision=no",
        ]
        _, task, spread = built(world, [*overrides, "model.config.vocab_size=311", "train.micro_batch_size=2"])
        micro = task.stream.global_batch(0).select_for_rank(world.rank, world.size)[0]
        found = []
        # The first passes are those in which DeepSpeed sees what is used when. One chunk, and one for eight targets.
        for chunk_bytes in (2**30, 2**30, 2**30, 4 * 311 * 8):
            linear_losses.CHUNK_BYTES = chunk_bytes
            sizes.clear()
            loss = task.loss(spread.module, micro, world.device).total
            forward = list(sizes)
            spread.backward(loss, last=True)
            spread.discard_gradients()
            found.append((_with_head(forward), _with_head(sizes) - _with_head(forward)))
        assert found[2] == found[3] and found[3][0] == 1, found
    leave()


def _with_head(sizes: list[int]) -> int:
    """Gathers that had the head in them: 311 rows of 64, alone or with the embeddings and the last norm."""
    alone, together = 311 * 64, 2 * 311 * 64 + 64
    return sum(any(0 <= size - expected < 256 for expected in (alone, together)) for size in sizes)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The elements of every all-gather of parameters; to be entered before a library takes hold of the function."""
    sizes: list[int] = []
    names = ("all_gather_into_tensor", "all_gather_single")
    real = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            output = arguments[0] if arguments else options.get("output", options.get("output_tensor"))
            sizes.append(output.numel())
            return real[name](*arguments, **options)

        return call

    for name in real:
        setattr(dist, name, counting(name))
    try:
        yield sizes
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
