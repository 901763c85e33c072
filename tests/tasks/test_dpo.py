"""Preference tuning as a run does it: the same on any machine, against the model it started from."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.preferences import TINY_DPO, labelled, pairs, write
from tests.support.runs import Runs, column, difference, events
from tests.support.slow import slow_but

DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'deepspeed==0.19.*'"
)
LOSSES = ("dpo", "ipo", "kto", "simpo", "orpo")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "pairs.jsonl", pairs())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "labelled.jsonl", labelled())


def processes(count: int) -> str:
    return f"parallel.num_processes={count}"


def settings(data: Path, steps: int = 8) -> tuple[str, ...]:
    return (
        f"data.train={data}",
        "data.limit=null",
        "data.validation=12",
        f"train.max_steps={steps}",
        "evaluate.every=4",
        "checkpoint.every=null",
        "optimizer.learning_rate=2e-3",
    )


def run_of(runs: Runs, data: Path, *overrides: str, steps: int = 8) -> Path:
    return runs.trained(*settings(data, steps), *overrides, recipe=TINY_DPO)


def metrics(run: Path) -> list[dict[str, float]]:
    return [event["metrics"] for event in events(run, "evaluate")]


def notices(run: Path) -> list[str]:
    return [event["message"] for event in events(run, "notice")]


def assert_same(found: Path, expected: Path) -> None:
    for name in ("tokens", "target_tokens"):
        assert column(found, name) == column(expected, name)
    assert difference(column(found, "loss"), column(expected, "loss")) < 1e-5
    assert difference(column(found, "grad_norm"), column(expected, "grad_norm")) < 1e-4
    for one, other in zip(column(found, "metrics")[1:], column(expected, "metrics")[1:], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert len(metrics(found)) == len(metrics(expected)) == 3
    for step, (one, other) in enumerate(zip(metrics(found), metrics(expected), strict=True)):
        if not step:  # nothing is preferred yet but by rounding
            one, other = ({**each, "reward_accuracy": 0.5} for each in (one, other))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_but("dpo", among=LOSSES))
@pytest.mark.parametrize(
    "overrides",
    [
        (processes(2),),
        pytest.param(
            (processes(1), "data.pack_length=null", "train.micro_batch_size=1"), id="padded", marks=pytest.mark.slow
        ),
        pytest.param(
            (processes(2), "parallel.strategy=fsdp", "train.micro_batch_size=1"), id="fsdp", marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_losses_do_not_depend_on_how_they_are_computed(
    runs: Runs, data: Path, loss: str, overrides: tuple[str, ...]
) -> None:
    reference = run_of(runs, data, f"dpo.loss={loss}", processes(1))
    assert_same(run_of(runs, data, f"dpo.loss={loss}", *overrides), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (processes(3), "data.pack_length=null", "train.micro_batch_size=1"),
        (processes(2), "data.pack_length=null", "train.micro_batch_size=3"),
        (processes(1), "train.micro_batch_size=8"),
        (processes(2), "train.micro_batch_size=auto", "train.gradient_accumulation_steps=2"),
        (processes(2), "parallel.strategy=fsdp", "data.pack_length=null", "train.activation_checkpointing=full"),
        pytest.param((processes(2), "parallel.strategy=zero2"), marks=DEEPSPEED),
        pytest.param((processes(2), "parallel.strategy=zero3", "data.pack_length=null"), marks=DEEPSPEED),
    ],
    ids=" ".join,
)
def test_nor_does_dpo_on_further_layouts(runs: Runs, data: Path, overrides: tuple[str, ...]) -> None:
    assert_same(run_of(runs, data, *overrides), run_of(runs, data, "dpo.loss=dpo", processes(1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (processes(3), "data.pack_length=null", "train.micro_batch_size=1"),
        (processes(2), "parallel.strategy=fsdp", "train.micro_batch_size=3"),
        pytest.param((processes(2), "parallel.strategy=zero2"), marks=DEEPSPEED),
    ],
    ids=" ".join,
)
def test_nor_does_kto_on_labelled_answers(runs: Runs, answers: Path, overrides: tuple[str, ...]) -> None:
    kto = ("dpo.loss=kto", "dpo.undesirable_weight=1.5")
    assert_same(run_of(runs, answers, *kto, *overrides), run_of(runs, answers, *kto, processes(1)))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", slow_but("none", among=("none", "lora", "dora")))
def test_the_first_loss_of_dpo_is_ln_2(runs: Runs, data: Path, adapter: str) -> None:
    run = run_of(runs, data, f"model.adapter={adapter}", processes(1))
    assert column(run, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(run)[0]["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert column(run, "loss")[-1] < 0.68  # and it learns


@pytest.mark.slow
def test_the_first_losses_of_ipo_and_kto(runs: Runs, data: Path) -> None:
    ipo = run_of(runs, data, "dpo.loss=ipo", processes(1))
    assert column(ipo, "loss")[0] == pytest.approx(25.0, abs=1e-4)
    kto = run_of(runs, data, "dpo.loss=kto", processes(1))
    assert column(kto, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert metrics(kto)[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "first"),
    [
        ("dpo", math.log(2)),
        pytest.param("ipo", 25.0, marks=pytest.mark.slow),
        pytest.param("kto", 0.5, marks=pytest.mark.slow),
    ],
)
def test_the_reference_is_computed_without_dropout(runs: Runs, data: Path, loss: str, first: float) -> None:
    """What is evaluated drops nothing either, so before the first step the two are the same model."""
    run = run_of(runs, data, f"dpo.loss={loss}", "model.dropout=0.3", processes(1), steps=1)
    assert metrics(run)[0]["loss"] == pytest.approx(first, rel=1e-5)
    assert metrics(run)[0]["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert column(run, "loss")[0] != pytest.approx(first, rel=1e-5)  # a training step does drop


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_but("kto", among=LOSSES))
def test_pairs_that_can_be_told_apart_are(runs: Runs, data: Path, loss: str) -> None:
    faster = "optimizer.learning_rate=5e-3"
    run = run_of(runs, data, f"dpo.loss={loss}", faster, processes(1), steps=16)
    before, *_, after = metrics(run)
    assert after["reward_accuracy"] == 1.0
    assert after["loss"] < before["loss"]
    assert column(run, "metrics")[-1]["reward_accuracy"] == 1.0
    assert after["reward_margin"] > 0
    assert after["reward_margin"] == pytest.approx(after["chosen_reward"] - after["rejected_reward"])


@pytest.mark.slow
def test_label_smoothing_and_beta_change_what_is_minimized(runs: Runs, data: Path) -> None:
    plain = run_of(runs, data, processes(1), "dpo.loss=dpo")
    for override in ("dpo.label_smoothing=0.2", "dpo.beta=0.5"):
        other = run_of(runs, data, processes(1), override)
        assert column(other, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
        assert difference(column(other, "loss"), column(plain, "loss")) > 1e-3


# What a run measured, once more without any of its code: row by row, whole logits, plain transformers.


def log_probability(model: Any, tokenizer: Any, prompt: str, answer: str) -> tuple[float, int]:
    """Of the answer and its stop token; and how many tokens these are."""
    question = [{"role": "user", "content": prompt}]
    whole = [*question, {"role": "assistant", "content": answer}]
    begin = len(tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False))
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    end = max(i for i, token in enumerate(ids) if token == tokenizer.eos_token_id) + 1
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, begin - 1 : end - 1].double()
    wanted = torch.tensor(ids[begin:end])
    return -float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")), len(wanted)


def log_ratios(run: Path, start: Path, rows: list[tuple[str, str]]) -> list[tuple[float, int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (run / "final", start)]
    found = []
    for row in rows:
        (now, count), (then, _) = (log_probability(model, tokenizer, *row) for model in models)
        found.append((now - then, count))
    return found


@pytest.fixture(scope="module")
def start(runs: Runs, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model to start from, whose weights are known: what one step at a tiny rate leaves of a fresh one."""
    run = run_of(runs, data, processes(1), "optimizer.learning_rate=1e-9", "train.seed=7", steps=1)
    yield Path(shutil.copytree(run / "final", tmp_path_factory.mktemp("models") / "start"))


def from_start(start: Path) -> tuple[str, ...]:
    return ("model.config=null", "model.tokenizer=null", f"model.name={start}", processes(1))


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "validation.jsonl", pairs()[::5])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("loss", slow_but("dpo", among=("dpo", "ipo")))
def test_metrics_are_those_of_plain_transformers(
    runs: Runs, data: Path, start: Path, validation: Path, loss: str
) -> None:
    run = run_of(runs, data, *from_start(start), f"data.validation={validation}", f"dpo.loss={loss}")
    measured = metrics(run)[-1]
    rows = pairs()[::5]
    by_side = [log_ratios(run, start, [(row["prompt"], row[side]) for row in rows]) for side in ("chosen", "rejected")]
    scores = [[ratio / count if loss == "ipo" else ratio for ratio, count in side] for side in by_side]
    margins = [chosen - rejected for chosen, rejected in zip(*scores, strict=True)]
    each = [(m - 5) ** 2 if loss == "ipo" else -math.log(sigmoid(0.1 * m)) for m in margins]
    assert measured["loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert measured["reward_margin"] == pytest.approx(0.1 * sum(margins) / len(margins), rel=1e-4)
    assert measured["chosen_reward"] == pytest.approx(0.1 * sum(scores[0]) / len(rows), rel=1e-3)
    assert measured["reward_accuracy"] == sum(m > 0 for m in margins) / len(margins)


@pytest.mark.slow
def test_the_metrics_of_kto_are_those_of_plain_transformers(
    runs: Runs, answers: Path, start: Path, tmp_path: Path
) -> None:
    rows = labelled()[::7]
    held = write(tmp_path / "held.jsonl", rows)
    run = run_of(runs, answers, *from_start(start), f"data.validation={held}", "dpo.loss=kto", "dpo.desirable_weight=2")
    measured = metrics(run)[-1]
    ratios = [ratio for ratio, _ in log_ratios(run, start, [(row["prompt"], row["completion"]) for row in rows])]
    # No two neighbors have the same prompt, so each has the answer of the next.
    assert all(a["prompt"] != b["prompt"] for a, b in pairwise([*rows, rows[0]]))
    others = [row["completion"] for row in [*rows[1:], rows[0]]]
    strangers = [
        r for r, _ in log_ratios(run, start, [(row["prompt"], o) for row, o in zip(rows, others, strict=True)])
    ]
    loss, kl = 0.0, 0.0
    for begin in range(0, len(rows), 8):
        part = range(begin, min(begin + 8, len(rows)))
        z = max(0.0, sum(strangers[i] for i in part) / len(part))
        kl += z * len(part)
        for i in part:
            gain = 0.1 * (ratios[i] - z)
            loss += 2 * (1 - sigmoid(gain)) if rows[i]["label"] else 1 - sigmoid(-gain)
    assert measured["loss"] == pytest.approx(loss / len(rows), rel=1e-5)
    assert measured["kl"] == pytest.approx(kl / len(rows), rel=1e-4, abs=1e-5)


# The reference


@pytest.mark.slow
def test_the_reference_is_computed_once_for_all_runs_from_a_model_on_some_data(runs: Runs, tmp_path: Path) -> None:
    rows = [{**row, "prompt": f"{row['prompt']} (one)"} for row in pairs()]
    data = write(tmp_path / "pairs.jsonl", rows)
    first, longer, again = (
        run_of(runs, data, processes(count), f"optimizer.learning_rate={rate}", steps=steps)
        for count, rate, steps in ((1, 1e-3, 4), (2, 2e-3, 6), (1, 3e-3, 6))
    )
    computed = [[line for line in notices(run) if line.startswith("computing")] for run in (first, longer, again)]
    assert [
        line.endswith(end) for line, end in zip(computed[0], ("of 32 examples", "of 12 examples"), strict=True)
    ] == [
        True,
        True,
    ]
    # All of what it sees, and not what the first did not see alone: it is divided in another way.
    assert len(computed[1]) == 1 and computed[1][0].endswith("of 48 examples")
    assert computed[2] == []
    assert len([line for line in notices(again) if "are in" in line]) == 2


@pytest.mark.slow
def test_other_weights_have_another_reference(runs: Runs, data: Path) -> None:
    run = run_of(runs, data, processes(1), "train.seed=3")
    assert column(run, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
def test_without_a_reference_none_is_computed_and_a_killed_run_goes_on(runs: Runs, data: Path) -> None:
    settled = (*settings(data, 8), processes(2), "dpo.loss=orpo", "checkpoint.every=3")
    uninterrupted = runs.trained(*settled, recipe=TINY_DPO)
    assert not any("reference" in line for line in notices(uninterrupted))
    assert [event["sft_loss"] for event in metrics(uninterrupted)] == sorted(
        (event["sft_loss"] for event in metrics(uninterrupted)), reverse=True
    )
    started = runs.train(*settled, recipe=TINY_DPO)
    started.wait_for_step(4)
    started.kill(signal.SIGKILL)
    assert started.run is not None
    runs.resumed(started.run)
    assert column(started.run, "loss") == column(uninterrupted, "loss")
    assert metrics(started.run)[-1] == metrics(uninterrupted)[-1]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(runs: Runs, data: Path) -> None:
    settled = (*settings(data, 12), processes(2), "dpo.loss=kto", "checkpoint.every=3")
    run_of(runs, data, processes(2), "dpo.loss=kto", steps=4)  # knows the reference of some of what this one sees
    uninterrupted = runs.trained(*settled, recipe=TINY_DPO)
    started = runs.train(*settled, recipe=TINY_DPO)
    started.wait_for_step(7)
    started.kill(signal.SIGKILL)
    assert started.run is not None
    copy = runs.copied(started.run)
    runs.resumed(started.run)
    shutil.rmtree(runs.directory / "cache" / "references")
    runs.resumed(copy)
    assert any(line.startswith("computing") for line in notices(copy))
    for run in (started.run, copy):
        assert events(run, "start")[-1]["resumed_from"] == 6
        for name in ("loss", "grad_norm", "tokens"):
            assert column(run, name) == column(uninterrupted, name), name
        assert metrics(run)[-1] == metrics(uninterrupted)[-1]


@pytest.mark.slow
def test_a_run_is_not_resumed_against_another_reference(runs: Runs, data: Path, start: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(start, tmp_path / "model"))
    run = runs.copied(run_of(runs, data, *from_start(model)))
    other = run_of(runs, data, processes(1), "train.seed=9", "optimizer.learning_rate=1e-9", steps=1)
    shutil.copy(other / "final" / "model.safetensors", model / "model.safetensors")
    refused = runs.resume(run, "train.max_steps=9").wait()
    assert refused.code == 2
    assert "the initial weights are not those" in refused.stderr


@pytest.mark.slow
def test_an_adapter_goes_on_from_itself_or_from_its_base(runs: Runs, data: Path, start: Path) -> None:
    model = from_start(start)
    adapted = run_of(runs, data, *model, "model.adapter=lora", "optimizer.learning_rate=2e-2")
    further = (*model, "model.adapter=lora", f"model.adapter.start_from={adapted}")
    itself, base = (run_of(runs, data, *further, f"dpo.reference={name}") for name in ("start", "base"))
    assert column(itself, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    # The reference is what it was, so the run goes on where the first one ended.
    assert metrics(base)[0]["loss"] == pytest.approx(metrics(adapted)[-1]["loss"], rel=1e-5)
    assert metrics(base)[0]["loss"] < 0.65


# What is refused


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "Why?", "chosen": "So."}, "the field rejected is missing; it has prompt, chosen"),
        ({"prompt": "Why?", "chosen": 3, "rejected": "b"}, "chosen is a number here and text at"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "the field prompt is empty"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(runs: Runs, tmp_path: Path, row: dict[str, Any], says: str) -> None:
    data = write(tmp_path / "pairs.jsonl", [*pairs()[:20], row])
    ended = runs.train(f"data.train={data}", "data.limit=null", recipe=TINY_DPO).wait()
    assert ended.code == 2
    assert f"{data}:21: {says}" in ended.stderr, ended.stderr


def test_labelled_rows_need_kto_and_pairs_need_room(runs: Runs, data: Path, answers: Path) -> None:
    one = runs.train(*settings(answers), recipe=TINY_DPO).wait()
    assert one.code == 2 and "labelled rows, for task: dpo with dpo.loss: kto" in one.stderr
    two = runs.train(*settings(data), "dpo.loss=kto", "data.pack_length=200", recipe=TINY_DPO).wait()
    assert two.code == 2 and "data.pack_length: 200 is too small for 2 answers" in two.stderr
    three = runs.train(f"data.train={data}").wait()
    assert three.code == 2 and "preference rows, for task: dpo" in three.stderr


@pytest.mark.slow
def test_kto_needs_more_than_one_prompt(runs: Runs, tmp_path: Path) -> None:
    rows = [{"prompt": "Well?", "completion": f"{n}", "label": n % 2 == 0} for n in range(30)]
    data = write(tmp_path / "rows.jsonl", rows)
    ended = runs.train(*settings(data), "dpo.loss=kto", processes(1), recipe=TINY_DPO).wait()
    assert ended.code == 2 and "at least two different prompts" in ended.stderr


@pytest.mark.slow
def test_the_finished_model_says_what_it_prefers(runs: Runs, data: Path) -> None:
    question = "What is 7 plus 35?"
    prompts = f"evaluate.prompts={json.dumps([question])}"
    run = run_of(runs, data, processes(1), prompts, "evaluate.max_new_tokens=4")
    assert [event["prompt"] for event in events(run, "generate")] == [question] * 3
