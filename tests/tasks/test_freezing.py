"""Parameters frozen by pattern: they stay as they are, are not planned for, and are exported as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ON_ROWS, Runs, column, difference
from tests.support.slow import slow_but
from tests.support.training import Case, train

SMALL = ("data.validation=8", "train.max_steps=3", "train.micro_batch_size=1", "model.dropout=0")
FROZEN = 'model.frozen=[".*embed_tokens.*", ".*layers.0.*"]'
TRAINED = r'model.trainable=["model\\.layers\\..*", ".*norm.weight"]'


def tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def base(runs: Runs) -> Path:
    """A model of one step, in fp32."""
    return runs.trained(ON_ROWS, "train.max_steps=1", "model.dropout=0", "data.validation=8") / "final"


def changed(start: Path, final: Path) -> set[str]:
    before, after = tensors(start), tensors(final)
    assert before.keys() == after.keys()
    return {name for name in before if not (before[name] == after[name]).all()}


@pytest.mark.parametrize("strategy", slow_but("fsdp", among=("ddp", "fsdp", "zero2", "zero3")))
def test_only_what_is_not_frozen_changes_and_the_rest_is_written_as_it_was(
    runs: Runs, base: Path, strategy: str
) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    run = runs.trained(
        ON_ROWS, f"model.name={base}", "model.config=null", "model.tokenizer=bytes", *SMALL, FROZEN, TRAINED,
        f"parallel.strategy={strategy}", "parallel.num_processes=2", "train.mixed_precision=bf16",
        "model.save_dtype=fp32",
    )  # fmt: skip
    assert changed(base, run / "final") == {
        name for name in tensors(base) if name == "model.norm.weight" or name.startswith("model.layers.1.")
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategies", slow_but(("ddp", "fsdp"), among=(("ddp", "fsdp"), ("zero1", "zero2", "zero3"))))
def test_every_strategy_trains_as_one_process(runs: Runs, strategies: tuple[str, ...]) -> None:
    if "zero1" in strategies:
        pytest.importorskip("deepspeed")
    settings = (*SMALL, FROZEN, "train.mixed_precision=no")
    alone = train(runs, {"some": Case((*settings, "parallel.strategy=single")), "all": Case(SMALL)}, 1)
    assert difference(alone["some"].column("loss"), alone["all"].column("loss")) > 1e-3
    for strategy, trained in train(
        runs, {s: Case((*settings, f"parallel.strategy={s}")) for s in strategies}, 2
    ).items():
        assert difference(trained.column("loss"), alone["some"].column("loss")) < 1e-5, strategy


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_its_checkpoint_answers(runs: Runs, base: Path) -> None:
    settings = (ON_ROWS, f"model.name={base}", "model.config=null", *SMALL, FROZEN, "model.tokenizer=bytes")
    whole = runs.trained(*settings)
    stopped = runs.train(*settings, "--until", "step 2")
    assert stopped.wait().code == 75
    assert stopped.run is not None
    answered = runs.command("generate", str(stopped.run), "--prompt", "Hi").wait()
    assert answered.code == 0, answered.stderr
    runs.resumed(stopped.run)
    assert column(stopped.run, "loss") == column(whole, "loss")
    assert {name: tensor.tolist() for name, tensor in tensors(stopped.run / "final").items()} == {
        name: tensor.tolist() for name, tensor in tensors(whole / "final").items()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (('model.frozen=[".*nowhere.*"]',), "model.frozen: .*nowhere.* matches none of the"),
        (('model.frozen=[".*"]',), "model.frozen: nothing is left to train"),
        (('model.frozen=["("]',), "expected a regular expression"),
        (
            ("model.frozen=['.*embed.*']", "model.adapter=lora", "model.name=some/model", "model.config=null"),
            "model.frozen: an adapter",
        ),
    ],
)
def test_what_freezes_nothing_or_all_is_refused(runs: Runs, words: tuple[str, ...], message: str) -> None:
    ended = runs.train(ON_ROWS, *words).wait()
    assert ended.code == 2
    assert message in ended.stderr
