"""A small model with everything that is awkward to shard, trained by a strategy and by plain torch."""

from __future__ import annotations

import math
from pathlib import Path

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

STEPS, MICRO_BATCHES, WIDTH = 4, 5, 6
RATE = 1e-2


class Block(nn.Module):
    """Experts that only some inputs reach, a scalar, a vector of one, a frozen matrix, a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.randn(2, WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[expert](x)) * self.scale + self.shift + self.frozen.sum(0)


class Odd(nn.Module):
    """Blocks between an embedding and a head that share a matrix with fewer rows than there may be ranks."""

    def __init__(self, tied_blocks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.head.weight = self.embedding.weight
        if tied_blocks:
            self.layers[2].shift = self.layers[0].shift
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("made", torch.arange(4.0), persistent=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, (int(tokens[0]) + index) % 3)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.head.weight), tokens, reduction="sum")


def build(tied_blocks: bool) -> Odd:
    torch.manual_seed(0)
    return Odd(tied_blocks)


def batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, (4,), generator=generator) for _ in range(MICRO_BATCHES)]


def plain(tied_blocks: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and the parameters they lead to."""
    model, norms = build(tied_blocks), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        sum(model(tokens) for tokens in batch(step)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in grads)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def strategy_over(world: World, model: Odd, **parallel: object) -> Strategy:
    section = ParallelSection(strategy="fsdp", num_processes=world.size, **parallel)
    make = optimizer_factory(OptimizerSection(learning_rate=RATE))
    return build_strategy(section, world, model, list(model.layers), make, torch.float32)


def advance(strategy: Strategy, steps: range) -> list[float]:
    world, norms = strategy.world, []
    for step in steps:
        tokens = batch(step)
        passes = math.ceil(len(tokens) / world.size)
        for number in range(passes):
            index = number * world.size + world.rank
            loss = strategy.module(tokens[index % len(tokens)]) * float(index < len(tokens))
            strategy.backward(loss, last=number == passes - 1)
        norms.append(strategy.gradient_norm())
        strategy.step(RATE, 1.0)
    return norms


def trains_as_plain_torch(replicate_size: int, reshard: bool, recompute: bool, tied_blocks: bool) -> None:
    world = join("cpu")
    model = build(tied_blocks)
    save_activation_memory(list(model.layers), "full" if recompute else "none")
    strategy = strategy_over(world, model, replicate_size=replicate_size, reshard_after_forward=reshard)
    norms = advance(strategy, range(STEPS))
    expected_norms, expected = plain(tied_blocks)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
    found = dict(strategy.parameters())
    assert set(found) == {*expected, "kept"}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name} differs")
    leave()


def continues_from_a_checkpoint(directory: str, read: bool) -> None:
    """Writes a checkpoint half way, or goes on from it to where plain torch comes."""
    world = join("cpu")
    strategy = strategy_over(world, build(False))
    checkpoints = Checkpoints(Path(directory), keep_last=1, keep_best=False)
    if read:
        strategy.module(batch(0)[0])  # what it gathers here is not what is trained
        with Checkpoint.open(checkpoints.path(2)).reader() as reader:
            strategy.load_state(reader)
        advance(strategy, range(2, STEPS))
        found = dict(strategy.parameters())
        for name, tensor in plain(False)[1].items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name} differs")
    else:
        advance(strategy, range(2))
        checkpoints.save(world, 2, strategy.state(), {}, "")
    leave()


def discards_gradients() -> None:
    world = join("cpu")
    strategy = strategy_over(world, build(False))
    strategy.backward(strategy.module(batch(7)[0]) * float("nan"), last=True)
    strategy.discard_gradients()
    assert strategy.gradient_norm() == 0.0
    norms = advance(strategy, range(STEPS))
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain(False)[0]), rtol=1e-5, atol=0)
    leave()


def gives_the_whole_model_to_each_rank_alone() -> None:
    """Ranks run it as often as they like, before and after anything else has run."""
    world = join("cpu")
    model = build(False)
    strategy = strategy_over(world, model)
    for steps in (range(0), range(2)):
        advance(strategy, steps)
        with strategy.whole() as module, torch.no_grad():
            assert isinstance(module, Odd)
            full = {name: parameter.clone() for name, parameter in module.named_parameters()}
            outputs = [module.layers[index](torch.ones(1, WIDTH), 0) for index in range(1 + world.rank)]
            assert all(output.isfinite().all() for output in outputs)
        found = dict(strategy.parameters())
        assert all(torch.equal(full[name], found[name]) for name in full)
    assert advance(strategy, range(2, STEPS)) == advance(again := strategy_over(world, build(False)), range(STEPS))[2:]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(strategy.parameters(), again.parameters(), strict=True))
    leave()


def refuses(wrap: list[str], words: list[str]) -> None:
    world = join("cpu")
    try:
        strategy_over(world, build(False), wrap=wrap)
    except RequestError as error:
        assert all(word in str(error) for word in ["parallel.wrap", *words]), error
    else:
        raise AssertionError("not refused")
    finally:
        leave()
