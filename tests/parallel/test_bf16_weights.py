"""Weights in bf16 alone: the rounding by its expectation, and runs against one process and against themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.runs import ON_ROWS, TINY, Runs, difference
from tests.support.slow import slow_but
from tests.support.training import Case, train
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.errors import RequestError
from trainwright.parallel.bf16_weights import Bf16Part, Bf16Weights, round_stochastically
from trainwright.parallel.strategy import StrategyConfig, build_strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import OptimizerSection
from trainwright.recipe.sections.parallel import ParallelSection

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
SEED, COUNT = 7, 2**16


def rounded(master: torch.Tensor, step: int = 1, name: str = "weight", seed: int = SEED) -> torch.Tensor:
    weight = torch.zeros(master.shape, dtype=torch.bfloat16)
    weights = Bf16Weights(seed, {name: Bf16Part(weight, 0, weight.numel())})
    weights.expand([name])
    weights.masters[name].data.copy_(master)
    weights.step = step
    weights.round([name])
    return weight


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("part", [0.0, 0.003, 0.25, 0.5, 0.9, 0.9999])
def test_a_number_is_rounded_up_with_the_probability_of_the_part_that_is_cut_off(part: float, sign: float) -> None:
    below, distance = sign * 1.5, sign * 2.0**-7
    weight = rounded(torch.full((COUNT,), below + part * distance)).double()
    assert set(weight.tolist()) <= {below, below + distance}
    up = float((weight != below).double().mean())
    assert up == pytest.approx(part, abs=4 * math.sqrt(part * (1 - part) / COUNT) + 2**-16)


def test_over_steps_positions_and_names_the_rounding_is_that_of_independent_draws() -> None:
    """Each of these pairs agrees as often as two draws of one half do: in half of the cases."""
    half = torch.full((COUNT,), 1 + 2.0**-8)
    draws = [
        rounded(half) == 1,
        rounded(half, step=2) == 1,
        rounded(half, name="other") == 1,
        rounded(half, seed=8) == 1,
    ]
    pairs = [(draws[0], other) for other in draws[1:]] + [(draws[0][:-1], draws[0][1:]), (draws[0][:-2], draws[0][2:])]
    for one, other in pairs:
        assert float((one == other).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(COUNT))


def test_what_bf16_can_hold_is_kept_and_nothing_becomes_a_number() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.140625, 2.0**-126, math.inf, -math.inf]).repeat(COUNT)
    assert torch.equal(rounded(exact), exact.bfloat16())
    not_numbers = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).repeat(COUNT)
    assert rounded(not_numbers.view(torch.float32)).isnan().all()


@pytest.mark.parametrize(("begin", "end"), [(0, 500), (3, 500), (5, 5), (4, 501), (777, 1001)])
def test_a_part_of_a_parameter_is_rounded_as_in_the_whole(begin: int, end: int) -> None:
    master = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    whole, part = (torch.empty(size, dtype=torch.bfloat16) for size in (1001, end - begin))
    round_stochastically(whole, master, (3, 4))
    round_stochastically(part, master[begin:end].clone(), (3, 4), begin)
    assert torch.equal(part, whole[begin:end])


class Net(nn.Module):
    """Parameters whose shards begin at odd positions, a scalar, and one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(15, 5)
        self.up = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.out = nn.Linear(7, 15)
        self.unreached = nn.Linear(3, 1)  # of whose row the second rank has nothing
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.up(self.embed(tokens))).tanh()
        return nn.functional.cross_entropy(self.out(hidden) * self.scale, tokens)


def net_strategy(strategy: str, world: World, name: str = "adamw", **settings: Any) -> Any:
    section = OptimizerSection.model_validate({"name": name, "weight_decay": 0.1, **settings})
    parallel = ParallelSection.model_validate({"strategy": strategy})
    module, make = Net(), build_optimizer_factory(section)
    return build_strategy(
        StrategyConfig(parallel, world, module, make, torch.bfloat16, [module.up], rounding_seed=SEED)
    )


def take_steps(strategy: Any, steps: int, share: float = 1.0, rate: float = 1e-2) -> None:
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        for micro in range(4):
            tokens = torch.randint(15, (6,), generator=generator)
            strategy.backward(share * strategy.module(tokens), last=micro == 3)
        strategy.bf16_weights.step = step
        strategy.step(rate, 0.5)


def work(directory: str) -> None:
    """Rank 0 has all gradients, so that sums over the ranks are exact; those over micro-batches are of fp32."""
    torch.set_num_threads(1)
    world = join("cpu")
    for strategy in ("ddp", "fsdp"):
        built = net_strategy(strategy, world)
        take_steps(built, 5, share=float(world.is_main))
        tensors = {name: tensor.clone() for name, tensor in built.parameters()}
        if world.is_main:
            save_file(tensors, Path(directory) / f"{strategy}.safetensors")
    leave()


def test_equal_gradients_make_equal_weights_to_the_bit_on_one_process_and_on_two(runs: Runs, tmp_path: Path) -> None:
    runs.function("tests.parallel.test_bf16_weights:work", str(tmp_path), processes=2)
    alone = net_strategy("single", ALONE)
    take_steps(alone, 5)
    for strategy in ("ddp", "fsdp"):
        found = load_file(tmp_path / f"{strategy}.safetensors")
        for name, expected in alone.parameters():
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], expected), f"{strategy} {name}"


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "rmsprop", "adafactor", "adamw_8bit"])
def test_a_step_is_that_of_the_optimizer_in_fp32_rounded(name: str) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    strategy = net_strategy("single", ALONE, name)
    before = {key: tensor.clone() for key, tensor in strategy.parameters(frozen=False)}
    tokens = torch.arange(15)
    strategy.backward(strategy.module(tokens), last=True)
    masters = {key: nn.Parameter(tensor.float()) for key, tensor in before.items()}
    for key, parameter in strategy.module.named_parameters():
        if parameter.requires_grad:
            masters[key].grad = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.float()
    section = OptimizerSection.model_validate({"name": name, "weight_decay": 0.1, "learning_rate": 1e-2})
    build_optimizer_factory(section)(masters.items()).step()
    strategy.bf16_weights.step = 1
    strategy.step(1e-2, 1.0)
    for key, tensor in strategy.parameters(frozen=False):
        assert torch.equal(tensor, rounded(masters[key].detach(), name=key)), key
        assert strategy.bf16_weights.masters[key].untyped_storage().nbytes() == 4, "masters are freed"


def test_weights_follow_rates_at_which_the_nearest_number_is_always_the_old_one() -> None:
    """AdamW moves every weight by the rate: 400 steps of 2e-5 from 1, below which bf16 has steps of 2^-8."""
    rate, steps, count = 2e-5, 400, 4096
    module = nn.Linear(count, 1, bias=False)
    nn.init.ones_(module.weight)
    make = build_optimizer_factory(OptimizerSection())
    strategy: Any = build_strategy(
        StrategyConfig(ParallelSection(strategy="single"), ALONE, module, make, torch.bfloat16, rounding_seed=SEED)
    )
    for step in range(1, steps + 1):
        strategy.backward(module.weight.sum(), last=True)
        strategy.bf16_weights.step = step
        strategy.step(rate, 1.0)
        assert (torch.tensor(1 - rate)).bfloat16() == 1
    moved = 1 - float(module.weight.detach().double().mean())
    deviation = math.sqrt(steps * rate * 2.0**-8 / count)  # of a mean of sums of draws of 2^-8 with these expectations
    assert moved == pytest.approx(steps * rate, abs=4 * deviation)


SMALL = (
    "data.validation=8",
    "train.max_steps=4",
    "train.micro_batch_size=1",
    "train.mixed_precision=bf16",
    "optimizer.master_weights=false",
    "optimizer.learning_rate=1e-3",
    "model.config.hidden_size=128",
    "model.config.num_key_value_heads=1",
)


def case(strategy: str, *more: str) -> tuple[str, ...]:
    return (*SMALL, f"parallel.strategy={strategy}", *more)


@pytest.mark.parametrize(
    "name", slow_but("adamw", among=("adamw", "adamw_8bit", "adafactor", "lion", "sgd", "rmsprop"))
)
def test_two_processes_train_as_one(runs: Runs, name: str) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    single = train(runs, {"one": Case(case("single", f"optimizer.name={name}"))}, 1)["one"]
    cases = {strategy: Case(case(strategy, f"optimizer.name={name}")) for strategy in ("ddp", "fsdp")}
    cases["gathered"] = Case(case("fsdp", f"optimizer.name={name}", "parallel.reshard_after_forward=false"))
    for strategy, trained in train(runs, cases, 2).items():
        assert difference(trained.column("loss"), single.column("loss")) < 5e-4, strategy
        assert trained.metrics()[-1] == pytest.approx(single.metrics()[-1], rel=5e-4), strategy


@pytest.mark.parametrize("strategy", slow_but("fsdp", among=("fsdp", "ddp")))
def test_a_resumed_run_is_the_same_to_the_bit_and_moves_between_strategies(
    runs: Runs, tmp_path: Path, strategy: str
) -> None:
    cases = {part: Case(case(strategy), part, str(tmp_path / "parts")) for part in (2, None)}
    parts = train(runs, cases, 2)
    whole, first = train(
        runs, {0: Case(case(strategy)), 1: Case(case(strategy), 2, str(tmp_path / "moved"))}, 2
    ).values()
    assert parts[2].column("loss") + parts[None].column("loss") == whole.column("loss")
    then = train(runs, {"then": Case(case("single"), None, str(tmp_path / "moved"))}, 1)["then"]
    assert difference(first.column("loss") + then.column("loss"), whole.column("loss")) < 5e-4


def test_what_is_saved_has_the_weights_and_loads(runs: Runs) -> None:
    """A precision that is left open is bf16; the plan has no masters."""
    from transformers import AutoModelForCausalLM

    run = runs.trained(
        ON_ROWS, *case("single", "train.mixed_precision=auto", "parallel.num_processes=1", "train.max_steps=2")
    )
    plan = json.loads((run / "plan.json").read_text())
    assert "train.mixed_precision bf16: required by optimizer.master_weights false" in json.dumps(plan)
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype="auto")
    checkpoint = max((run / "checkpoints").glob("step-*"))
    saved = {key: tensor for file in checkpoint.glob("*.safetensors") for key, tensor in load_file(file).items()}
    weights = {key: tensor for key, tensor in saved.items() if key.startswith("model.")}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for key, tensor in model.named_parameters():
        [stored] = [value for name, value in weights.items() if name.endswith(f".{key}")]
        assert torch.equal(tensor.bfloat16(), stored), key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.mixed_precision=no", "in which they then compute; set train.mixed_precision to bf16 or auto"),
        ("optimizer.ema_decay=0.9", "the average is of fp32 weights"),
        ("optimizer.name=muon", "muon updates whole matrices"),
        ("optimizer.name=soap", "soap updates whole matrices"),
        ("optimizer.name=schedule_free_adamw", "schedule_free_adamw averages the weights in fp32"),
        ("parallel.strategy=zero2", "DeepSpeed keeps fp32 master weights; set it to true, or use"),
        ("parallel.offload_parameters=true", "false keeps weights and their updates on the device"),
    ],
)
def test_what_has_to_keep_fp32_weights_is_refused(override: str, message: str) -> None:
    with pytest.raises(RequestError, match="optimizer.master_weights: .*" + message):
        load_recipe(TINY, ["train.mixed_precision=bf16", "optimizer.master_weights=false", override])
