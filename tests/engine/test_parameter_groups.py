"""Rates and weight decays by pattern, by layer and of LoRA, as each parameter moves by them; and averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.runs import ON_ROWS, Runs, difference, events
from tests.support.slow import slow_but
from tests.support.training import Case, train
from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.engine.optimizer import build_optimizer_factory, build_parameter_groups
from trainwright.errors import RequestError
from trainwright.parallel.layout import Shard
from trainwright.parallel.strategy import check_averages, set_learning_rate
from trainwright.recipe.schema import OptimizerSection

NAMES = (
    "model.model.embed_tokens.weight",
    "model.model.layers.0.mlp.up_proj.weight",
    "model.model.layers.0.norm.weight",
    "model.model.layers.1.mlp.up_proj.weight",
    "model.lm_head.weight",
)
RATE, DECAY = 0.1, 0.5


def parameters(names: tuple[str, ...] = NAMES) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(4) if "norm" in name else torch.ones(4, 4)) for name in names}


def rates_and_decays(names: tuple[str, ...] = NAMES, **settings: Any) -> dict[str, tuple[float, float]]:
    section = OptimizerSection.model_validate({"learning_rate": RATE, "weight_decay": DECAY, **settings})
    made = parameters(names)
    key = {id(parameter): name for name, parameter in made.items()}
    optimizer = torch.optim.SGD(build_parameter_groups(made.items(), section), RATE)
    set_learning_rate(optimizer, RATE)
    return {key[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_the_last_group_that_matches_counts_for_each_of_its_keys() -> None:
    groups = [
        {"pattern": ".*embed_tokens.*", "learning_rate": 0.01},
        {"pattern": "model.layers.0.*", "learning_rate": 0.02, "weight_decay": 0.25},
        {"pattern": ".*norm.*", "weight_decay": 0.75},
    ]
    found = rates_and_decays(groups=groups)
    expected = [(0.01, DECAY), (0.02, 0.25), (0.02, 0.75), (RATE, DECAY), (RATE, DECAY)]
    assert [found[name] for name in NAMES] == [pytest.approx(pair) for pair in expected]


def test_layers_before_have_lower_rates() -> None:
    """As of BEiT and ELECTRA: a factor for each layer below the head, the embeddings the lowest."""
    found = rates_and_decays(layer_decay=0.5)
    assert [found[name][0] / RATE for name in NAMES] == pytest.approx([0.125, 0.25, 0.25, 0.5, 1.0])


def test_loraplus_has_the_rates_of_peft() -> None:
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), peft.LoraConfig(r=2, target_modules=["0", "1"])
    )
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=16)
    rate_of = {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    section = OptimizerSection.model_validate({"learning_rate": RATE, "loraplus_ratio": 16})
    optimizer = build_optimizer_factory(section)(trained.items())
    set_learning_rate(optimizer, RATE)
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert found == pytest.approx(rate_of)
    assert set(found.values()) == {RATE, 16 * RATE}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"groups": [{"pattern": ".*nowhere.*", "learning_rate": 1.0}]},
            "optimizer.groups.0.pattern: .*nowhere.* matches",
        ),
        ({"loraplus_ratio": 16}, "optimizer.loraplus_ratio: has no effect without LoRA"),
    ],
)
def test_what_matches_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rates_and_decays(**settings)


SMALL = ("data.validation=8", "train.max_steps=4", "train.micro_batch_size=1", "train.mixed_precision=no")
SMALL += ("model.dropout=0", "optimizer.weight_decay=0.1")
GROUPS = ('optimizer.groups=[{pattern: ".*mlp.*", learning_rate: 1e-4, weight_decay: 0}]', "optimizer.layer_decay=0.8")
AVERAGED = ("optimizer.ema_decay=0.7",)


def using(strategy: str, *more: str) -> Case:
    return Case((*SMALL, f"parallel.strategy={strategy}", *more))


@pytest.mark.slow
@pytest.mark.parametrize("strategies", slow_but(("ddp", "fsdp"), among=(("ddp", "fsdp"), ("zero1", "zero2", "zero3"))))
@pytest.mark.parametrize("settings", [GROUPS, AVERAGED], ids=["groups", "averaged"])
def test_every_strategy_has_the_same_rates_and_averages(
    runs: Runs, strategies: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    if "zero1" in strategies:
        pytest.importorskip("deepspeed")
    cases = {"plain": using("single"), "one": using("single", *settings)}
    alone = train(runs, cases, 1)
    single, plain = alone["one"], alone["plain"]
    if settings == AVERAGED:
        assert single.column("loss") == plain.column("loss")
        assert single.metrics()[0] == plain.metrics()[0]  # before the first step there is no average
    else:
        assert difference(single.column("loss"), plain.column("loss")) > 1e-3
    assert single.metrics()[-1] != plain.metrics()[-1]
    for strategy, trained in train(runs, {s: using(s, *settings) for s in strategies}, 2).items():
        assert difference(trained.column("loss"), single.column("loss")) < 1e-5, strategy
        assert trained.metrics()[-1] == pytest.approx(single.metrics()[-1], rel=1e-5), strategy


@pytest.mark.slow
@pytest.mark.parametrize("precision", slow_but("bf16", among=("no", "bf16")))
def test_averages_are_resumed_to_the_bit_and_exported(runs: Runs, tmp_path: Path, precision: str) -> None:
    from safetensors.torch import load_file

    settings = (*SMALL, *AVERAGED, f"train.mixed_precision={precision}", "evaluate.every=1", "parallel.strategy=ddp")
    whole = train(runs, {"whole": Case(settings)}, 2)["whole"]
    plain = train(runs, {"plain": Case((*settings, "optimizer.ema_decay=null"))}, 2)["plain"]
    assert whole.column("loss") == plain.column("loss")
    assert whole.metrics()[-1] != plain.metrics()[-1]
    parts = train(runs, {part: Case(settings, part, str(tmp_path)) for part in (2, None)}, 2)
    assert parts[2].column("loss") + parts[None].column("loss") == whole.column("loss")
    assert parts[2].metrics() + parts[None].metrics() == whole.metrics()
    run = runs.trained(ON_ROWS, *settings, "parallel.num_processes=2", "checkpoint.every=1", "checkpoint.keep_last=9")
    assert [event["metrics"] for event in events(run, "evaluate")] == whole.metrics()
    average, before, weights = torch.empty(()), torch.empty(()), {}
    for step in range(1, 5):
        with Checkpoint.open(run / "checkpoints" / f"step-{step:08d}").open_reader() as read:
            name, shape = "model.model.layers.0.mlp.up_proj.weight", (128, 64)
            shard = Shard.full(torch.empty(shape, device="meta"))
            weights[step], average = read(f"model.{name}", shard), read(f"optimizer.average.{name}", shard)
            if step > 1:
                torch.testing.assert_close(average, before.lerp(weights[step], 0.3))
            assert torch.equal(read.weights(name, shard), average)
            before = average
    exported = load_file(run / "final" / "model.safetensors")[name.removeprefix("model.")]
    torch.testing.assert_close(exported.float(), average, rtol=0, atol=0)
    assert not torch.equal(average, weights[4])


def test_a_strategy_without_averages_is_refused_with_them() -> None:
    class Plain:
        name = "plain"

    section = OptimizerSection.model_validate({"ema_decay": 0.9})
    with pytest.raises(RequestError, match=r"optimizer\.ema_decay: plain cannot exchange weights"):
        check_averages(Plain(), section)  # type: ignore[arg-type]
    check_averages(Plain(), OptimizerSection())  # type: ignore[arg-type]


def test_averages_begin_at_the_first_weights() -> None:
    section = OptimizerSection.model_validate({"name": "sgd", "momentum": 0.0, "learning_rate": 1.0, "ema_decay": 0.75})
    weight = nn.Parameter(torch.full((3,), 2.0))
    optimizer = build_optimizer_factory(section)([("weight", weight)])
    expected = weight.detach().clone()
    for step in range(3):
        weight.grad = torch.full((3,), -1.0 - step)
        optimizer.step()
        expected = 0.75 * expected + 0.25 * weight.detach()
        torch.testing.assert_close(optimizer.state[weight]["average"], expected)
