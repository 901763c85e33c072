"""A small model with everything that is awkward to spread over devices, trained by a strategy and by plain torch."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.engine.checkpoints.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.errors import RequestError
from trainwright.models.recompute import save_activation_memory
from trainwright.parallel.strategy import Strategy, StrategyConfig, build_strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.parallel import ParallelSection

STEPS, WIDTH, RATE = 5, 6, 1e-2
LIMIT = 2.0  # of the norm of gradients


class Block(nn.Module):
    """Experts that only some inputs reach, a number, a vector of one, frozen matrices, a parameter nobody uses."""

    def __init__(self, has_number: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(0.5) if has_number else torch.tensor([0.5]))
        self.shift = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.randn(2, WIDTH), requires_grad=False)
        self.frozen_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        turned = torch.tanh(self.experts[expert](x)) * self.scale + self.frozen_layer(x)
        return x + turned + self.shift + self.frozen.sum(0)


class Odd(nn.Module):
    """Blocks between an embedding and a head that share a matrix with fewer rows than there may be ranks.

    Args:
        has_number: each block has a parameter without dimensions.
        tied_blocks: two blocks share a parameter.
        by_input: inputs choose their experts, so that ranks use different ones; otherwise the step does.
    """

    def __init__(self, has_number: bool = False, tied_blocks: bool = False, by_input: bool = False) -> None:
        super().__init__()
        self.by_input = by_input
        self.embedding = nn.Embedding(3, WIDTH)
        self.layers = nn.ModuleList([Block(has_number) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.head.weight = self.embedding.weight
        if tied_blocks:
            self.layers[2].shift = self.layers[0].shift
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("made", torch.arange(4.0), persistent=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, (int(tokens[0]) + index if self.by_input else step) % 3)
        logits = nn.functional.linear(x, self.head.weight).float()
        return nn.functional.cross_entropy(logits, tokens, reduction="sum")


# What each strategy can have in a model and what ranks may do differently.
KINDS: dict[str, dict[str, bool]] = {
    "fsdp": {"has_number": True, "by_input": True},
    "zero1": {},
    "zero2": {},
    "zero3": {},
}


def build(strategy: str, **options: bool) -> Odd:
    torch.manual_seed(0)
    return Odd(**{**KINDS[strategy], **options})


def batch(step: int) -> list[torch.Tensor]:
    """As many micro-batches as the step is not like the one before."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, (4,), generator=generator) for _ in range(2 + 3 * (step % 2))]


def plain(model: Odd, muon: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and the parameters they lead to. What no loss reached has a gradient of zero."""
    norms = []
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trainable = [p for _, p in named]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.0)
    if muon:
        optimizer = build_optimizer_factory(_section(muon))(named)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(tokens, step) for tokens in batch(step)).backward()
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in trainable)))
        for parameter in trainable:
            parameter.grad.mul_(min(1.0, LIMIT / norms[-1]))
        optimizer.step()
    assert max(norms) > LIMIT, "nothing was clipped"
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def _section(muon: bool) -> OptimizerSection:
    return OptimizerSection(name="muon" if muon else "adamw", learning_rate=RATE)


def strategy_over(world: World, model: nn.Module, strategy: str, muon: bool = False, **parallel: Any) -> Strategy:
    section = ParallelSection.model_validate({"strategy": strategy, "num_processes": world.size, **parallel})
    make = build_optimizer_factory(_section(muon))
    return build_strategy(
        StrategyConfig(section, world, model, make, torch.float32, list(getattr(model, "layers", [])))
    )


def advance(strategy: Strategy, steps: range) -> list[float]:
    world, norms = strategy.world, []
    for step in steps:
        tokens = batch(step)
        passes = math.ceil(len(tokens) / world.size)
        for number in range(passes):
            index = number * world.size + world.rank
            loss = strategy.module(tokens[index % len(tokens)], step) * float(index < len(tokens))
            strategy.backward(loss, last=number == passes - 1)
        norms.append(float(strategy.gradient_norm()))
        strategy.step(RATE, min(1.0, LIMIT / norms[-1]))
    return norms


def check_end(strategy: Strategy, expected: dict[str, torch.Tensor]) -> None:
    found = {name: tensor.clone() for name, tensor in strategy.parameters()}
    assert set(found) == {*expected, "kept"}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name} differs")


def train_as_plain_torch(cases: list[tuple[str, dict[str, Any], dict[str, bool]]]) -> None:
    """Each case in turn: a strategy, its settings, and of `muon`, `recomputed`, `discarded` and the model's what is so.

    discarded: after a step whose gradients were forgotten.
    """
    world = join("cpu")
    os.environ.pop(
        "LOCAL_RANK"
    )  # which not every launcher gives, and which tells of no device where one is all there is
    for name, settings, so in cases:
        print(name, settings, so, file=sys.stderr)
        options = {key: value for key, value in so.items() if key not in ("muon", "recomputed", "discarded")}
        model = build(name, **options)
        save_activation_memory(list(model.layers), "full" if so.get("recomputed") else "none")
        muon = so.get("muon", False)
        strategy = strategy_over(world, model, name, muon, **settings)
        if so.get("discarded"):
            for last in (False, True):
                strategy.backward(strategy.module(batch(7)[0], 2) * float("inf"), last=last)
            assert not math.isfinite(strategy.gradient_norm())
            strategy.discard_gradients()
        norms = advance(strategy, range(STEPS))
        expected_norms, expected = plain(build(name, **options), muon)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
        check_end(strategy, expected)
        if name == "zero3":
            gathered = [key for key, p in model.named_parameters() if p.numel() and not p.ds_persist]
            assert not gathered, f"left gathered: {gathered}"
    leave()


def continue_from_checkpoints(names: list[str], directory: str, read: bool) -> None:
    """Writes a checkpoint half way, or goes on from it to where plain torch comes."""
    world = join("cpu")
    for name in names:
        strategy = strategy_over(world, build(name), name)
        checkpoints = Checkpoints(Path(directory, name), keep_last=1, keep_best=False)
        if read:
            strategy.module(batch(0)[0], 0)  # what it gathers here is not what is trained
            with Checkpoint.open(checkpoints.path(2)).open_reader() as reader:
                strategy.load_state(reader)
            advance(strategy, range(2, STEPS))
            check_end(strategy, plain(build(name))[1])
        else:
            advance(strategy, range(2))
            checkpoints.save(world, 2, strategy.state(), {}, "")
    leave()


def give_the_whole_model_to_each_rank_alone(names: list[str]) -> None:
    """Ranks run it as often as they like, before and after anything else has run."""
    world = join("cpu")
    for name in names:
        strategy, again = (strategy_over(world, build(name), name) for _ in range(2))
        norms = []
        for steps in (range(0), range(2), range(2, STEPS)):
            norms += advance(strategy, steps)
            _use_the_whole_model(strategy)
        assert advance(again, range(STEPS)) == norms
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(strategy.parameters(), again.parameters(), strict=True))
    leave()


def _use_the_whole_model(strategy: Strategy) -> None:
    with strategy.full_parameters() as (module, in_step), torch.no_grad():
        assert isinstance(module, Odd) and in_step is None
        full = {key: parameter.clone() for key, parameter in module.named_parameters()}
        outputs = [module.layers[index](torch.ones(1, WIDTH), 0) for index in range(1 + strategy.world.rank)]
        assert all(output.isfinite().all() for output in outputs)
    found = dict(strategy.parameters())
    assert all(torch.equal(full[key], found[key]) for key in full)


def refuse(name: str, settings: dict[str, Any], options: dict[str, bool], words: list[str]) -> None:
    """The strategy over the model is refused in these words."""
    world = join("cpu")
    try:
        strategy_over(world, build(name, **options), name, **settings)
    except RequestError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("not refused")
    finally:
        leave()


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
