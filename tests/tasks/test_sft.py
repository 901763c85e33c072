"""Supervised fine-tuning as a run does it: what it measures, what it writes, what it leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import ROWS, Runs, column, events
from tests.support.slow import slow_but
from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.parallel.layout import Shard

MAX_LENGTH = 96  # shorter than some of the rows
PROMPTS = ("What is 7 times 8?", "Count 5 numbers from 3.", "Spell lamp backwards.")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation rows of their own: which of them are held out is then known here too."""
    path = tmp_path_factory.mktemp("data") / "validation.jsonl"
    path.write_text("".join(line + "\n" for line in ROWS.read_text().splitlines()[-37:]))
    return path


def settings(held_out: Path) -> tuple[str, ...]:
    return (
        f"data.train={ROWS}",
        "data.limit=150",
        f"data.validation={held_out}",
        f"data.max_length={MAX_LENGTH}",
        f"evaluate.prompts={json.dumps(PROMPTS)}",
        "evaluate.max_new_tokens=12",
        "evaluate.every=5",
        "checkpoint.every=5",
        "train.max_steps=10",
        "optimizer.learning_rate=5e-3",
    )


@pytest.fixture(params=slow_but(1, 2, among=(1, 2, 3)))
def run(request: pytest.FixtureRequest, runs: Runs, held_out: Path) -> Path:
    return runs.trained(f"parallel.num_processes={request.param}", *settings(held_out))


@pytest.fixture
def reference(runs: Runs, held_out: Path) -> Path:
    return runs.trained("parallel.num_processes=1", *settings(held_out))


def load(run: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(run / "final"), AutoTokenizer.from_pretrained(run / "final")


def examples(tokenizer: Any, file: Path) -> Iterator[tuple[list[int], int, int]]:
    """Tokens of every row, and where the assistant's begin and end, with nothing but the chat template."""
    for line in file.read_text().splitlines():
        row = json.loads(line)
        question = [{"role": "user", "content": row["question"]}]
        whole = [*question, {"role": "assistant", "content": row["answer"]}]
        before = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(whole, return_dict=False)
        end = max(i for i, token in enumerate(ids) if token == tokenizer.eos_token_id) + 1
        assert ids[: len(before)] == before
        yield ids[:MAX_LENGTH], len(before), min(end, MAX_LENGTH)


def plain_metrics(run: Path, file: Path) -> dict[str, float]:
    """Loss and accuracy row by row: no padding, no packing, whole logits."""
    model, tokenizer = load(run)
    loss, correct, targets = 0.0, 0, 0
    for ids, begin, end in examples(tokenizer, file):
        if begin >= end:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, begin - 1 : end - 1].double()
        wanted = torch.tensor(ids[begin:end])
        loss += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        correct += int((logits.argmax(-1) == wanted).sum())
        targets += len(wanted)
    return {
        "loss": loss / targets,
        "perplexity": math.exp(loss / targets),
        "token_accuracy": correct / targets,
    }


def test_metrics_are_the_same_on_any_number_of_processes(run: Path, reference: Path) -> None:
    # The weights before training are the same to the bit; after it they differ in the order of sums.
    for found, expected, precision in zip(
        events(run, "evaluate"), events(reference, "evaluate"), (1e-12, 1e-5, 1e-5), strict=True
    ):
        assert found["step"] == expected["step"]
        assert found["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=precision)
        assert found["metrics"]["token_accuracy"] == pytest.approx(
            expected["metrics"]["token_accuracy"], abs=1e-12 if found["step"] == 0 else 2e-3
        )


def test_metrics_are_those_of_plain_transformers(run: Path, held_out: Path) -> None:
    measured = events(run, "evaluate")[-1]["metrics"]
    plain = plain_metrics(run, held_out)
    assert measured["loss"] < 5 and measured["token_accuracy"] > 0.05  # it has learned something
    assert measured["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert measured["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-5)
    assert measured["token_accuracy"] == pytest.approx(plain["token_accuracy"], abs=1.5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("data.pack_length=null",), ("train.micro_batch_size=5",)], ids=" ".join)
def test_metrics_do_not_depend_on_batching(
    runs: Runs, held_out: Path, reference: Path, overrides: tuple[str, ...]
) -> None:
    once = tuple(o for o in settings(held_out) if "max_steps" not in o and "every" not in o)
    run = runs.trained("parallel.num_processes=2", *once, "train.max_steps=1", *overrides)
    before, expected = (events(which, "evaluate")[0]["metrics"]["loss"] for which in (run, reference))
    assert before == pytest.approx(expected, rel=1e-6)


def test_samples_are_the_same_on_any_number_of_processes(run: Path, reference: Path) -> None:
    found, expected = events(run, "generate"), events(reference, "generate")
    assert [event["prompt"] for event in found] == list(PROMPTS) * 3
    assert [event["step"] for event in found] == [0, 0, 0, 5, 5, 5, 10, 10, 10]
    assert [event["text"] for event in found] == [event["text"] for event in expected]


def test_the_last_samples_are_what_the_finished_model_says(run: Path) -> None:
    model, tokenizer = load(run)
    for event in events(run, "generate")[-3:]:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": event["prompt"]}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        output = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
        assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip() == event["text"]


def test_the_finished_model_is_the_last_checkpoint(run: Path) -> None:
    model, _ = load(run)
    checkpoint = Checkpoint.open(run / "checkpoints" / "step-00000010")
    assert checkpoint.state["progress"]["tokens"] == column(run, "tokens")[-1]
    with checkpoint.open_reader() as read:
        for name, parameter in model.named_parameters():
            assert torch.equal(read(f"model.model.{name}", Shard.full(parameter)), parameter), name


def test_the_finished_model_has_the_logits_of_the_trained_one(reference: Path) -> None:
    from trainwright.models.load import load_model
    from trainwright.recipe.loading import load_recipe

    model, tokenizer = load(reference)
    assert model.config.dtype == torch.float32
    trained = load_model(load_recipe(reference / "recipe.yaml").model, torch.float32, 0, tokenizer)
    with Checkpoint.open(reference / "checkpoints" / "step-00000010").open_reader() as read, torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(read(f"model.model.{name}", Shard.full(parameter)))
    ids = torch.tensor([tokenizer("What is 7 times 8?")["input_ids"]])
    trained.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trained(input_ids=ids).logits)


def test_the_best_checkpoint_is_kept_and_the_last(runs: Runs, held_out: Path) -> None:
    worse = tuple(o for o in settings(held_out) if not any(n in o for n in ("max_steps", "every", "learning_rate")))
    # A learning rate under which the loss falls at first and then rises.
    run = runs.trained(
        "parallel.num_processes=1",
        *worse,
        "optimizer.learning_rate=0.3",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=6",
        "train.max_steps=8",
        "evaluate.every=1",
        "checkpoint.every=1",
        "checkpoint.keep_last=1",
    )
    losses = {event["step"]: event["metrics"]["loss"] for event in events(run, "evaluate") if event["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 8, "the loss was meant to rise"
    kept = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    assert kept == [best, 8]


def test_the_start_says_what_is_trained(run: Path) -> None:
    (start,) = events(run, "start")
    _, tokenizer = load(run)
    usable = [ids for ids, begin, end in list(examples(tokenizer, ROWS))[:150] if begin < end]
    assert len(usable) < 150
    assert start["parameters"] == start["trainable_parameters"] > 0
    assert start["max_steps"] == 10 and start["global_batch_size"] == 8
    assert start["epoch_examples"] == len(usable)
    assert start["epoch_tokens"] == sum(map(len, usable))
    assert any("150" in line for line in start["data"])
    assert "fresh llama" in start["weights"]
