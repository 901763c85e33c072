"""The optimizers of the registry against torch's, transformers' and bitsandbytes' own, and against their papers; under
every strategy, resumed, and as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import TINY, Runs, difference
from tests.support.slow import slow_but
from tests.support.training import Case, train
from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.errors import RequestError
from trainwright.parallel.strategy import DividedByRows, RowShards
from trainwright.planning.memory.inventory import Inventory, Weight, sum_optimizer_state
from trainwright.planning.workload import OptimizerState
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import OptimizerSection

NAMES = {"block.up.weight": (80, 64), "block.down.weight": (6, 80), "embed.weight": (40, 8), "block.norm.weight": (64,)}
RATE, DECAY, STEPS = 0.02, 0.3, 4
NEW = (
    "sgd", "rmsprop", "adagrad", "ademamix", "lion", "adafactor", "schedule_free_adamw", "adamw_8bit", "lion_8bit",
    "soap",
)  # fmt: skip

Named = dict[str, nn.Parameter]


def parameters() -> Named:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in NAMES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def step_all(optimizer: torch.optim.Optimizer, made: Named, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            made[name].grad = gradient
        optimizer.step()


def ours(name: str, **settings: Any) -> tuple[Named, torch.optim.Optimizer]:
    made = parameters()
    section = OptimizerSection.model_validate(
        {"name": name, "learning_rate": RATE, "weight_decay": DECAY, "betas": (0.8, 0.7), **settings}
    )
    optimizer = build_optimizer_factory(section)(made.items())
    step_all(optimizer, made)
    return made, optimizer


def peers(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> Named:
    made = parameters()
    matrices, vectors = ([p for p in made.values() if (p.dim() > 1) is many] for many in (True, False))
    step_all(make([{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]), made)
    return made


def assert_equal(found: Named, expected: Named) -> None:
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_that_of_torch(momentum: float, nesterov: bool) -> None:
    found, _ = ours("sgd", momentum=momentum, nesterov=nesterov)
    assert_equal(found, peers(lambda groups: torch.optim.SGD(groups, RATE, momentum, nesterov=nesterov)))


def test_rmsprop_is_that_of_torch() -> None:
    found, _ = ours("rmsprop", eps=1e-6)
    assert_equal(found, peers(lambda groups: torch.optim.RMSprop(groups, RATE, eps=1e-6)))


def test_adagrad_is_that_of_torch() -> None:
    found, _ = ours("adagrad", eps=1e-6)
    assert_equal(found, peers(lambda groups: torch.optim.Adagrad(groups, RATE, eps=1e-6)))


def test_ademamix_is_that_of_bitsandbytes() -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    found, _ = ours("ademamix")
    assert_equal(found, peers(lambda groups: optim.AdEMAMix(groups, RATE, (0.8, 0.7, 0.9999))))


def test_ademamix_follows_its_paper() -> None:
    """Equation 4 of arXiv 2409.03137, whose slow momentum has no correction of its bias."""
    found, _ = ours("ademamix", eps=1e-8)
    for name, weight in parameters().items():
        x, decay = weight.detach().double(), DECAY if weight.dim() > 1 else 0.0
        fast, slow, square = (torch.zeros_like(x) for _ in range(3))
        for step in range(STEPS):
            gradient = gradients(step)[name].double()
            fast, slow = 0.8 * fast + 0.2 * gradient, 0.9999 * slow + 0.0001 * gradient
            square = 0.7 * square + 0.3 * gradient**2
            root = (square / (1 - 0.7 ** (step + 1))).sqrt() + 1e-8
            x = x - RATE * ((fast / (1 - 0.8 ** (step + 1)) + 5 * slow) / root + decay * x)
        torch.testing.assert_close(found[name].double(), x, rtol=1e-5, atol=1e-6, msg=name)


def test_lion_is_that_of_bitsandbytes() -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    found, _ = ours("lion")
    assert_equal(found, peers(lambda groups: optim.Lion32bit(groups, RATE, (0.8, 0.7))))


@pytest.mark.parametrize(("name", "peer"), [("adamw_8bit", "AdamW8bit"), ("lion_8bit", "Lion8bit")])
def test_8_bit_states_are_those_of_bitsandbytes(name: str, peer: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    found, optimizer = ours(name)
    assert_equal(found, peers(lambda groups: getattr(optim, peer)(groups, RATE, (0.8, 0.7))))
    dtypes = {key: optimizer.state[found[key]]["state1"].dtype for key in NAMES}
    assert dtypes["block.up.weight"] == torch.uint8
    assert dtypes["block.norm.weight"] == torch.float32


def test_adafactor_is_that_of_transformers_with_the_settings_of_its_trainer() -> None:
    from transformers.optimization import Adafactor

    found, _ = ours("adafactor", betas=(0.9, 0.999))
    assert_equal(found, peers(lambda groups: Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False)))


def test_adafactor_factors_the_last_two_dimensions_of_experts() -> None:
    """As transformers does: each expert as a matrix of its own."""
    from transformers.optimization import Adafactor

    grads = [torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weights = [nn.Parameter(torch.ones(3, 6, 4)) for _ in range(2)]
    section = OptimizerSection.model_validate({"name": "adafactor", "learning_rate": RATE})
    one = build_optimizer_factory(section)([("experts", weights[0])])
    other = Adafactor([weights[1]], lr=RATE, scale_parameter=False, relative_step=False)
    for grad in grads:
        for weight, optimizer in zip(weights, (one, other), strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_schedule_free_follows_the_algorithm_of_its_paper() -> None:
    """Algorithm 1 of arXiv 2405.15682, with the authors' weights of iterates: the square of the largest rate so far."""
    found, optimizer = ours("schedule_free_adamw", eps=1e-8)
    for name, start in parameters().items():
        decay = DECAY if start.dim() > 1 else 0.0
        x, y, z = (start.detach().double().clone() for _ in range(3))
        square, total = torch.zeros_like(x), 0.0
        for step in range(STEPS):
            gradient = gradients(step)[name].double()
            square = 0.7 * square + 0.3 * gradient**2
            total += RATE**2
            z = z - RATE * (gradient / ((square / (1 - 0.7 ** (step + 1))).sqrt() + 1e-8) + decay * y)
            x = x + RATE**2 / total * (z - x)
            y = 0.2 * z + 0.8 * x
        torch.testing.assert_close(found[name].double(), y, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(optimizer.state[found[name]]["average"].double(), x, rtol=1e-5, atol=1e-6, msg=name)


def test_schedule_free_is_that_of_its_authors() -> None:
    package = pytest.importorskip("schedulefree")

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = package.AdamWScheduleFree(groups, lr=RATE, betas=(0.8, 0.7), foreach=False)
        optimizer.train()
        return optimizer

    assert_equal(ours("schedule_free_adamw")[0], peers(make))


SOAPED = ("block.up.weight", "block.down.weight")


def test_soap_begins_with_the_eigenvectors_of_the_first_gradient_and_moves_nothing_by_it() -> None:
    made, start = parameters(), parameters()
    optimizer = build_optimizer_factory(OptimizerSection(name="soap", betas=(0.8, 0.7)))(made.items())
    step_all(optimizer, made, [0])
    for name in SOAPED:
        gradient, state = gradients(0)[name].double(), optimizer.state[made[name]]
        assert torch.equal(made[name], start[name])
        for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            torch.testing.assert_close(state[side].double(), 0.3 * product, rtol=1e-5, atol=1e-4)
            basis = state[f"{side}_basis"].double()
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)).double(), rtol=0, atol=1e-5)
            turned = basis.T @ product @ basis
            torch.testing.assert_close(turned, turned.diag().diag(), rtol=0, atol=1e-3)


def test_soap_is_adam_in_a_basis_that_follows_its_preconditioners() -> None:
    """Algorithms 3 and 4 of arXiv 2409.11321 in fp64, through a refresh of the bases."""
    steps, first, second, eps = 12, 0.8, 0.7, 1e-8
    made, start = parameters(), parameters()
    section = OptimizerSection(name="soap", learning_rate=RATE, weight_decay=DECAY, betas=(first, second), eps=eps)
    optimizer = build_optimizer_factory(section)(made.items())
    step_all(optimizer, made, [0])
    bases = {
        name: [optimizer.state[made[name]][f"{side}_basis"].double() for side in ("left", "right")] for name in SOAPED
    }
    step_all(optimizer, made, range(1, steps))
    for name, (left, right) in bases.items():
        x, g = start[name].detach().double(), gradients(0)[name].double()
        rows, columns, mean, square = 0.3 * g @ g.T, 0.3 * g.T @ g, torch.zeros_like(x), torch.zeros_like(x)
        for step in range(1, steps):
            g = gradients(step)[name].double()
            mean, square = first * mean + 0.2 * g, second * square + 0.3 * (left.T @ g @ right) ** 2
            root = (square / (1 - second**step)).sqrt() + eps
            update = left @ ((left.T @ mean @ right) / (1 - first**step) / root) @ right.T
            x = x - RATE * (update + DECAY * x)
            rows, columns = second * rows + 0.3 * g @ g.T, second * columns + 0.3 * g.T @ g
            if step == 10:
                left, right = (
                    torch.linalg.qr((of + 1e-5 * of.trace() * torch.eye(len(of))) @ q).Q
                    for of, q in ((rows, left), (columns, right))
                )
        torch.testing.assert_close(made[name].double(), x, rtol=1e-4, atol=1e-4, msg=name)
        assert (left - bases[name][0]).abs().max() > 0.01


def test_soap_moves_all_other_parameters_by_adamw() -> None:
    found, expected = (ours(name)[0] for name in ("soap", "adamw"))
    for name in NAMES.keys() - SOAPED:
        assert torch.equal(found[name], expected[name])


def test_soap_has_no_preconditioner_of_a_long_side() -> None:
    weight = nn.Parameter(torch.ones(3, 10_001))
    optimizer = build_optimizer_factory(OptimizerSection(name="soap"))([("block.weight", weight)])
    for seed in range(2):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    assert {*optimizer.state[weight]} == {"step", "exp_avg", "exp_avg_sq", "left", "left_basis"}
    planned = sum_optimizer_state(
        Inventory((Weight(0, "block.weight", (3, 10_001), True),), 1, 4), OptimizerState("soap")
    )
    assert planned == sum(4 * tensor.numel() for tensor in optimizer.state[weight].values())


def test_soap_is_refused_where_states_are_sharded() -> None:
    for strategy, said in (("fsdp", "use parallel.strategy ddp or single"), ("zero1", "use parallel.strategy ddp")):
        with pytest.raises(RequestError, match=said):
            load_recipe(TINY, ("optimizer.name=soap", f"parallel.strategy={strategy}"))


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("average", [False, True])
def test_the_state_has_the_bytes_that_are_planned(name: str, average: bool) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    if average and name == "schedule_free_adamw":
        pytest.skip("averages itself")
    made, optimizer = ours(name, **({"betas": (0.9, 0.999)}), **({"ema_decay": 0.9} if average else {}))
    bytes_ = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
    weights = [Weight(0, key, tuple(parameter.shape), True) for key, parameter in made.items()]
    planned = sum_optimizer_state(Inventory(tuple(weights), 1, 4), OptimizerState(name, True, average))
    assert planned == pytest.approx(bytes_, rel=0.02)


def test_sgd_without_momentum_has_no_state_and_none_is_planned() -> None:
    made, optimizer = ours("sgd", momentum=0.0)
    assert not any(value is not None for state in optimizer.state.values() for value in state.values())
    weights = [Weight(0, key, tuple(parameter.shape), True) for key, parameter in made.items()]
    assert sum_optimizer_state(Inventory(tuple(weights), 1, 4), OptimizerState("sgd", momentum=False)) == 0


WIDE = (
    "model.config.hidden_size=128",
    "model.config.num_key_value_heads=1",
    "model.dropout=0",
    "optimizer.learning_rate=1e-3",
    "optimizer.weight_decay=0.1",
)
SMALL = ("data.validation=8", "train.max_steps=4", "train.micro_batch_size=1", "train.mixed_precision=no")


def case(name: str, strategy: str, *more: str) -> tuple[str, ...]:
    steps = ("train.max_steps=16",) if name == "soap" else ()  # through a refresh of its bases
    return (*WIDE, *SMALL, *steps, f"optimizer.name={name}", f"parallel.strategy={strategy}", *more)


def strategies_of(name: str) -> tuple[str, ...]:
    return ("ddp",) if name == "soap" else ("ddp", "fsdp")


@pytest.mark.parametrize("name", slow_but("adafactor", "adamw_8bit", "soap", among=NEW))
def test_two_processes_train_as_one(runs: Runs, name: str) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    single = train(runs, {"one": Case(case(name, "single"))}, 1)["one"]
    for strategy, trained in train(runs, {s: Case(case(name, s)) for s in strategies_of(name)}, 2).items():
        assert difference(trained.column("loss"), single.column("loss")) < 1e-5, strategy
        assert trained.metrics()[-1] == pytest.approx(single.metrics()[-1], rel=1e-5), strategy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adagrad", "ademamix", "lion", "schedule_free_adamw"])
def test_deepspeed_trains_as_one_process(runs: Runs, name: str) -> None:
    pytest.importorskip("deepspeed")
    single = train(runs, {"one": Case(case(name, "single"))}, 1)["one"]
    strategies = ("zero1", "zero2", "zero3")
    for strategy, trained in train(runs, {s: Case(case(name, s)) for s in strategies}, 2).items():
        assert difference(trained.column("loss"), single.column("loss")) < 1e-5, strategy
        assert trained.metrics()[-1] == pytest.approx(single.metrics()[-1], rel=1e-5), strategy


@pytest.mark.parametrize("name", slow_but("adamw_8bit", "soap", among=NEW))
def test_a_resumed_run_is_the_same_to_the_bit_and_moves_between_strategies(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    single = train(runs, {"one": Case(case(name, "single"))}, 1)["one"]
    several = strategies_of(name)[-1]
    cases = {part: Case(case(name, several), part, str(tmp_path)) for part in (2, None)}
    parts = train(runs, cases, 2)
    whole = train(runs, {"whole": Case(case(name, several))}, 2)["whole"]
    assert parts[2].column("loss") + parts[None].column("loss") == whole.column("loss")
    first = train(runs, {"first": Case(case(name, several), 2, str(tmp_path / "moved"))}, 2)["first"]
    then = train(runs, {"then": Case(case(name, "single"), None, str(tmp_path / "moved"))}, 1)["then"]
    assert difference(first.column("loss") + then.column("loss"), single.column("loss")) < 1e-5


def test_whether_a_state_has_8_bits_follows_from_the_whole_parameter() -> None:
    pytest.importorskip("bitsandbytes")
    part = nn.Parameter(torch.ones(16, 128))
    section = OptimizerSection.model_validate({"name": "adamw_8bit"})
    optimizer = build_optimizer_factory(section)([("block.weight", part)])
    assert isinstance(optimizer, DividedByRows)
    optimizer.divide(RowShards(2, lambda parameter: (32, 128), lambda tensor: None))
    part.grad = torch.ones_like(part)
    optimizer.step()
    assert optimizer.state[part]["state1"].dtype == torch.uint8


def test_8_bit_states_that_would_be_divided_within_a_block_are_refused(runs: Runs) -> None:
    pytest.importorskip("bitsandbytes")
    ended = runs.train(
        "optimizer.name=adamw_8bit", "parallel.strategy=fsdp", "parallel.num_processes=2", "train.max_steps=2"
    ).wait()
    assert ended.code == 2
    assert "share a scale of an 8-bit state" in ended.stderr
