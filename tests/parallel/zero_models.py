"""A small model with everything that is awkward to shard, trained by DeepSpeed and by plain torch."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.engine.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.optimizer import optimizer_factory
from trainwright.errors import RequestError
from trainwright.models.recompute import save_activation_memory
from trainwright.parallel.build import build_strategy
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.schema import OptimizerSection, ParallelSection

STEPS, WIDTH, RATE = 5, 6, 1e-2


class Block(nn.Module):
    """Branches that are not taken in every step, a vector of one, a frozen matrix, a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return x + torch.tanh(self.branches[branch](x)) * self.scale + self.frozen(x)


class Odd(nn.Module):
    """Blocks between an embedding and a head that share a matrix, whose weight is used from outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("made", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, branch)
        logits = nn.functional.linear(x, self.head.weight).float()
        return nn.functional.cross_entropy(logits, tokens, reduction="sum")


def build() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int) -> list[torch.Tensor]:
    """As many micro-batches as the step is not like the one before."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, (4,), generator=generator) for _ in range(2 + 3 * (step % 2))]


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and the parameters they lead to. What no loss reached has a gradient of zero."""
    model, norms = build(), []
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(tokens, step % 3) for tokens in batch(step)).backward()
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in trainable)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def strategy_over(world: World, model: nn.Module, strategy: str, offload: bool = False, **more: Any) -> Strategy:
    if offload:
        more |= {"offload_optimizer": True, "offload_parameters": strategy == "zero3"}
    section = ParallelSection.model_validate({"strategy": strategy, "num_processes": world.size, **more})
    make = optimizer_factory(OptimizerSection(learning_rate=RATE))
    return build_strategy(section, world, model, [], make, torch.float32)


def advance(strategy: Strategy, steps: range) -> list[float]:
    world, norms = strategy.world, []
    for step in steps:
        tokens = batch(step)
        passes = math.ceil(len(tokens) / world.size)
        for number in range(passes):
            index = number * world.size + world.rank
            loss = strategy.module(tokens[index % len(tokens)], step % 3) * float(index < len(tokens))
            strategy.backward(loss, last=number == passes - 1)
        norms.append(strategy.gradient_norm())
        strategy.step(RATE, 1.0)
    return norms


def check_end(strategy: Strategy) -> None:
    expected = plain()[1]
    found = {name: tensor.clone() for name, tensor in strategy.parameters()}
    assert set(found) == {*expected, "kept"}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name} differs")


def train_as_plain_torch(cases: list[tuple[str, bool, bool, bool]]) -> None:
    """Each case in turn: a strategy, offloaded, recomputed, after gradients that were discarded."""
    world = join("cpu")
    for name, offload, recompute, discard in cases:
        print(f"{name} offload={offload} recompute={recompute} discard={discard}", file=sys.stderr)
        model = build()
        save_activation_memory(list(model.layers), "full" if recompute else "none")
        strategy = strategy_over(world, model, name, offload)
        if discard:
            for last in (False, True):
                strategy.backward(strategy.module(batch(7)[0], 2) * float("inf"), last=last)
            assert not math.isfinite(strategy.gradient_norm())
            strategy.discard_gradients()
        norms = advance(strategy, range(STEPS))
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain()[0]), rtol=1e-5, atol=0)
        check_end(strategy)
        if name == "zero3":
            gathered = [key for key, p in model.named_parameters() if p.numel() and not p.ds_persist]
            assert not gathered, f"left gathered: {gathered}"
    leave()


def continue_from_checkpoints(names: list[str], directory: str, read: bool) -> None:
    """Writes a checkpoint half way, or goes on from it to where plain torch comes."""
    world = join("cpu")
    for name in names:
        strategy = strategy_over(world, build(), name)
        checkpoints = Checkpoints(Path(directory, name), keep_last=1, keep_best=False)
        if read:
            strategy.module(batch(0)[0], 0)  # what it gathers here is not what is trained
            with Checkpoint.open(checkpoints.path(2)).reader() as reader:
                strategy.load_state(reader)
            advance(strategy, range(2, STEPS))
            check_end(strategy)
        else:
            advance(strategy, range(2))
            checkpoints.save(world, 2, strategy.state(), {}, "")
    leave()


def give_the_whole_model_to_each_rank_alone(names: list[str]) -> None:
    """Ranks run it as often as they like, before and after anything else has run."""
    world = join("cpu")
    for name in names:
        _use_the_whole_model(strategy_over(world, build(), name))
    leave()


def _use_the_whole_model(strategy: Strategy) -> None:
    norms: list[float] = []
    for steps in (range(0), range(2), range(2, STEPS)):
        norms += advance(strategy, steps)
        with strategy.whole() as module, torch.no_grad():
            assert isinstance(module, Odd)
            full = {key: parameter.clone() for key, parameter in module.named_parameters()}
            outputs = [module.layers[index](torch.ones(1, WIDTH), 0) for index in range(1 + strategy.world.rank)]
            assert all(output.isfinite().all() for output in outputs)
        found = dict(strategy.parameters())
        assert all(torch.equal(full[key], found[key]) for key in full)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain()[0]), rtol=1e-5, atol=0)


def weigh(names: list[str], path: str) -> None:
    """Write the bytes of parameters, masters and optimizer state that this rank has in memory."""
    world = join("cpu")
    for name in names:
        Path(path, f"{name}-{world.rank}").write_text(str(_weight(world, name)))
    leave()


def _weight(world: World, strategy_name: str) -> int:
    model = nn.Sequential(*(nn.Linear(64, 65, bias=False) if n % 2 else nn.Linear(65, 64) for n in range(8)))
    strategy = strategy_over(world, model, strategy_name)
    loss = strategy.module(torch.ones(1, 65)).sum()
    strategy.backward(loss, last=True)
    strategy.gradient_norm()
    strategy.step(RATE, 1.0)
    tensors: list[torch.Tensor] = [*model.parameters()]
    tensors += [p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")]
    optimizer: Any = strategy._optimizer  # type: ignore[attr-defined]
    for state_of, state in optimizer.state.items():
        tensors += [state_of, *state.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def refuses_scalars() -> None:
    world = join("cpu")
    model = build()
    model.layers[0].scale = nn.Parameter(torch.tensor(0.5))
    try:
        strategy_over(world, model, "zero2")
    except RequestError as error:
        assert "layers.0.scale" in str(error), error
    else:
        raise AssertionError("not refused")
