"""The whole model on every rank, against training written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.operations import Operations
from tests.support.runs import Runs
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.parallel.replicated.replicated import Replicated
from trainwright.parallel.strategy import StrategyConfig
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.parallel import ParallelSection

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
STEPS = 10


class Net(nn.Module):
    """Matrices, vectors, a frozen layer, and a layer that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.norm = nn.LayerNorm(24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.out = nn.Linear(24, 16)
        self.unreached = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy."""
        hidden = self.norm(self.frozen(self.embed(tokens)).tanh())
        return nn.functional.cross_entropy(self.out(hidden), wanted, reduction="sum")


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four micro-batches of unequal sizes."""
    generator = torch.Generator().manual_seed(step)
    sizes = (3, 8, 1, 6)
    return [tuple(torch.randint(16, (2, n), generator=generator)) for n in sizes]  # type: ignore[misc]


def section(**settings: Any) -> OptimizerSection:
    return OptimizerSection(**{"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-6, **settings})


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def trained(strategy: Replicated, steps: range, limit: float = 0.5) -> list[float]:
    """Train as the engine does; the gradient norms."""
    norms = []
    rank, size = strategy.world.rank, strategy.world.size
    for step in steps:
        batch = micro_batches(step)
        weight = sum(len(tokens) for tokens, _ in batch)
        share = batch[rank::size]
        for position, (tokens, wanted) in enumerate(share, 1):
            strategy.backward(strategy.module(tokens, wanted) / weight, last=position == len(share))
        norm = float(strategy.gradient_norm())
        norms.append(norm)
        strategy.step(rate(step), min(1.0, limit / norm))
    return norms


def by_hand(module: nn.Module, steps: range, limit: float = 0.5) -> list[float]:
    """The same with torch alone: whole batches, AdamW, clip_grad_norm_."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, eps=1e-6)
    norms = []
    for step in steps:
        batch = micro_batches(step)
        tokens, wanted = torch.cat([t for t, _ in batch]), torch.cat([w for _, w in batch])
        (module(tokens, wanted) / len(tokens)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def make(module: nn.Module, world: World = ALONE, dtype: torch.dtype = torch.float32, **settings: Any) -> Replicated:
    parallel = ParallelSection(strategy="single")
    return Replicated(StrategyConfig(parallel, world, module, build_optimizer_factory(section(**settings)), dtype))


def reached(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p.detach()) for name, p in module.named_parameters() if "unreached" not in name)


def test_it_trains_as_plain_torch_does() -> None:
    strategy, plain = make(net()), net()
    norms = trained(strategy, range(STEPS))
    assert norms == pytest.approx(by_hand(plain, range(STEPS)), rel=1e-6)
    assert any(norm > 0.5 for norm in norms), "nothing was clipped"
    for (name, found), (_, expected) in zip(reached(strategy.module), reached(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=name)
    assert torch.equal(strategy.module.frozen.weight, net().frozen.weight)  # type: ignore[union-attr]


def test_only_matrices_are_decayed() -> None:
    module = net()
    with torch.no_grad():
        module.norm.weight.fill_(2.0)
    optimizer = build_optimizer_factory(section())((n, p) for n, p in module.named_parameters() if p.requires_grad)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {n: decay[id(p)] for n, p in module.named_parameters() if p.requires_grad} == {
        "embed.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "out.weight": 0.1,
        "out.bias": 0.0,
        "unreached.weight": 0.1,
        "unreached.bias": 0.0,
    }
    assert id(module.frozen.weight) not in decay


def test_bf16_keeps_updates_that_bf16_cannot_hold() -> None:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    strategy = make(module, dtype=torch.bfloat16, weight_decay=0.0)
    assert module.weight.dtype == torch.bfloat16
    for _ in range(20):  # each an update of 1e-3; next to 1.0 bfloat16 has steps of 4e-3 and 8e-3
        strategy.backward(module(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum(), last=True)
        strategy.step(1e-3, 1.0)
    ((_, master),) = strategy.parameters()
    assert master.dtype == torch.float32
    assert master.item() == pytest.approx(0.98, abs=1e-4)
    assert module.weight.item() == pytest.approx(0.98, abs=4e-3) and module.weight.item() != 1.0


def test_bf16_sums_micro_batches_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False)
    strategy = make(module, dtype=torch.bfloat16)
    for position in range(1, 258):  # in bfloat16 the sum would stop at 256
        strategy.backward(module(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum(), last=position == 257)
    assert strategy.gradient_norm() == 257.0
    strategy.discard_gradients()
    assert strategy.gradient_norm() == 0.0


def test_bf16_gradients_of_a_micro_batch_are_not_held_together() -> None:
    module = net()
    strategy = make(module, dtype=torch.bfloat16)
    held: list[int] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _: held.append(sum(p.grad is not None for p in module.parameters()))
            )
    for position, (tokens, wanted) in enumerate(micro_batches(0), 1):
        strategy.backward(module(tokens, wanted), last=position == 4)
    assert held == [0] * len(held) and len(held) == 4 * 5


def test_bf16_stays_near_fp32() -> None:
    wide, narrow = make(net()), make(net(), dtype=torch.bfloat16)
    one, other = trained(wide, range(STEPS)), trained(narrow, range(STEPS))
    assert other == pytest.approx(one, rel=3e-2)
    before = dict(net().named_parameters())
    for (name, expected), (_, found) in zip(wide.parameters(), narrow.parameters(), strict=True):
        if before[name].requires_grad:
            assert found.dtype == torch.float32
            assert (found - expected).norm() <= 0.1 * (expected - before[name]).norm(), name


def test_gradients_can_be_discarded() -> None:
    strategy = make(net())
    before = copy.deepcopy(strategy.module.state_dict())
    (tokens, wanted), *_ = micro_batches(0)
    strategy.backward(strategy.module(tokens, wanted) * float("nan"), last=True)
    strategy.discard_gradients()
    assert all(torch.equal(before[name], value) for name, value in strategy.module.state_dict().items())
    assert trained(strategy, range(2)) == trained(make(net()), range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 4])
def test_state_is_all_there_is_to_a_run(dtype: torch.dtype, before: int) -> None:
    whole, first = make(net(), dtype=dtype), make(net(), dtype=dtype)
    trained(whole, range(before)), trained(first, range(before))
    saved = {name: shard.local.clone() for name, shard in first.state().items()}
    torch.manual_seed(8)
    other = Net()
    other.frozen.load_state_dict(net().frozen.state_dict())  # does not change, and so is no part of the state
    second = make(other, dtype=dtype)
    assert not any("frozen" in name for name in saved)
    if before:
        second.load_state(lambda name, shard: saved[name])
        assert trained(second, range(before, STEPS)) == trained(whole, range(before, STEPS))
        for (name, found), (_, expected) in zip(second.parameters(), whole.parameters(), strict=True):
            assert torch.equal(found, expected), name
    else:
        assert all(name.startswith("model.") for name in saved), "an optimizer that did nothing has no state"


def work(directory: str) -> None:
    """What one of several processes does in the test below."""
    world = join("cpu")
    try:
        strategy = make(net(), world)
        norms = trained(strategy, range(4))
        saved = {name: shard.local.clone() for name, shard in strategy.state().items()}
        strategy = make(net(), world)
        strategy.load_state(lambda name, shard: saved[name])
        norms += trained(strategy, range(4, STEPS))
        tensors = {name: tensor.clone() for name, tensor in strategy.parameters()}
        save_file({**tensors, "norms": torch.tensor(norms)}, Path(directory) / f"{world.rank}.safetensors")
    finally:
        leave()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_several_processes_train_as_one_does(runs: Runs, tmp_path: Path, processes: int) -> None:
    runs.function("tests.parallel.test_replicated:work", tmp_path, processes=processes)
    alone = make(net())
    norms = trained(alone, range(STEPS))
    results = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(processes)]
    for result in results:
        assert result.pop("norms").tolist() == pytest.approx(norms, rel=1e-5)
        for name, expected in alone.parameters():
            torch.testing.assert_close(result[name], expected, rtol=1e-5, atol=1e-6, msg=name)
            assert torch.equal(result[name], results[0][name]), "ranks have drifted apart"


def bf16_step(device: str, layers: int) -> Replicated:
    """Return the strategy of a net of equal layers in bf16 on a device, with a gradient of every weight."""
    module = nn.Module()
    for number in range(layers):
        weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)) if device == "cpu" else None
        weight = torch.empty(8, 4, device=device) if weight is None else weight
        module.register_parameter(f"weight_{number}", nn.Parameter(weight))
    module.to = lambda *_: module  # type: ignore[method-assign]  # tensors without data cannot be moved
    world = World(0, 1, 0, 1, torch.device(device))
    make = build_optimizer_factory(section())
    strategy = Replicated(StrategyConfig(ParallelSection(strategy="single"), world, module, make, torch.bfloat16))
    for number, parameter in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(100 + number)
        grad = torch.randn(8, 4, generator=generator) if device == "cpu" else torch.empty(8, 4, device=device)
        parameter.grad = grad.to(parameter.dtype)
    return strategy


def test_a_step_on_a_gpu_calls_the_same_operators_for_any_number_of_weights() -> None:
    called = []
    for layers in (2, 9):
        with FakeTensorMode():
            strategy = bf16_step("cuda:0", layers)
            with Operations() as operations:
                strategy.step(1e-2, 0.5)
        fixed = {"device", "empty_like", "zeros", "zeros_like", "detach"}  # memory, and state at the first step
        called.append([name for name in operations.names if name not in fixed])
    assert called[0] == called[1]
    assert called[0].count("_foreach_copy_") == 2  # gradients to fp32, and weights to bf16
    assert called[0].count("_fused_adamw_") == 1


def test_a_bf16_step_has_the_masters_of_gradients_converted_one_by_one() -> None:
    strategy = bf16_step("cpu", 3)
    masters = {name: parameter.detach().clone() for name, parameter in strategy.parameters()}
    for name, parameter in strategy.module.named_parameters():
        assert parameter.grad is not None
        master = nn.Parameter(masters[name])
        master.grad = parameter.grad.float() * 0.5
        decay = section().weight_decay
        torch.optim.AdamW([master], lr=1e-2, betas=section().betas, eps=1e-6, weight_decay=decay, fused=True).step()
        masters[name] = master.detach()
    strategy.step(1e-2, 0.5)
    for name, parameter in strategy.parameters():
        assert torch.equal(parameter, masters[name]), name
    for name, parameter in strategy.module.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16()), name
        assert parameter.grad is None
