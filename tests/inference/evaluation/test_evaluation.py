"""``trainwright eval`` on rows: on any number of processes the numbers of a plain loop and of the usual packages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from tests.inference.evaluation.unlearning.benchmark import write_model
from tests.inference.models import TOKENIZER, model_of
from tests.support.runs import ROWS, TINY, Finished, Runs, events

NEW_TOKENS = 12
QUESTIONS = [
    {"question": "What is 7 times 8?", "answer": "7 times 8 is 56.\n#### 56"},
    {"question": "Spell lamp backwards.", "answer": "pmal\n#### 4"},
    {"question": "Who?", "answer": "Me. #### 1"},
    {"question": "Count to three, please, and do not stop before you are there.", "answer": "1 2 3 #### 3"},
    {"question": "Is it?", "answer": "It is. #### 0"},
]
USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}

Evaluate = Callable[..., Finished]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def model(place: Path) -> str:
    return write_model(place / "model")


@pytest.fixture(scope="module")
def evaluate(runs: Runs, place: Path) -> Evaluate:
    """Run ``eval`` to its end; ``out`` is made below the module's directory."""

    def run(*arguments: str, out: str) -> Finished:
        likelihoods = "--metrics" in arguments and "rouge" not in arguments[arguments.index("--metrics") + 1]
        short = () if likelihoods else ("--max-new-tokens", str(NEW_TOKENS))
        return runs.command("eval", *arguments, *short, "--out", str(place / out)).wait()

    return run


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def found(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What ``metrics.json`` and ``samples.jsonl`` hold."""
    lines = (directory / "samples.jsonl").read_text().splitlines()
    return json.loads((directory / "metrics.json").read_text()), [json.loads(line) for line in lines]


def values(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: each["value"] for name, each in metrics["metrics"].items()}


@pytest.fixture(scope="module")
def alone(evaluate: Evaluate, model: str, place: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    data = write(place / "rows.jsonl", QUESTIONS)
    ended = evaluate(model, "--data", data, "--answer-pattern", "gsm8k", "--num-processes", "1", out="alone")
    assert ended.code == 0, ended.stderr
    return found(place / "alone")


def chat(row: dict[str, str], *, answered: bool) -> tuple[list[int], int]:
    """The tokens of a row by the template alone, and where its answer begins."""
    turns = [{"role": "user", "content": row["question"]}]
    before = TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    if not answered:
        return list(before), len(before)
    whole = TOKENIZER.apply_chat_template([*turns, {"role": "assistant", "content": row["answer"]}], return_dict=False)
    end = max(place for place, token in enumerate(whole) if token == TOKENIZER.eos_token_id) + 1
    return list(whole[:end]), len(before)


def test_likelihoods_are_those_of_a_plain_loop(alone: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    plain = model_of("llama", positions=512)
    losses, right = [], []
    for row in QUESTIONS:
        ids, begin = chat(row, answered=True)
        with torch.no_grad():
            logs = plain(torch.tensor([ids])).logits[0, begin - 1 : -1].double().log_softmax(-1)
        wanted = torch.tensor(ids[begin:])
        losses += (-logs[torch.arange(len(wanted)), wanted]).tolist()
        right += (logs.argmax(-1) == wanted).tolist()
    metrics = values(alone[0])
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(sum(right) / len(right), rel=1e-9)


def test_answers_are_the_greedy_ones_and_nothing_of_the_question_is_judged(
    alone: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    plain = model_of("llama", positions=512)
    metrics, samples = alone
    for row, sample in zip(QUESTIONS, samples, strict=True):
        prompt, _ = chat(row, answered=False)
        ids = torch.tensor([prompt])
        written = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert sample["prompt"] == TOKENIZER.decode(prompt)
        assert sample["reference"] == row["answer"]
        said = written[0, len(prompt) :]
        assert sample["answer"] == TOKENIZER.decode(said, skip_special_tokens=True).strip()
        assert sample["complete"] is (TOKENIZER.eos_token_id in said.tolist())
        assert sample["row"] == QUESTIONS.index(row) + 1
    scorer = RougeScorer(["rougeL"])
    rouge = [scorer.score(sample["reference"], sample["answer"])["rougeL"].fmeasure for sample in samples]
    assert values(metrics)["rouge_l"] == pytest.approx(sum(rouge) / len(rouge), abs=1e-12)
    assert values(metrics)["answer"] == 0.0 == values(metrics)["exact_match"]
    assert metrics["metrics"]["rouge_l"]["n"] == metrics["metrics"]["loss"]["n"] == len(QUESTIONS)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(
    evaluate: Evaluate, model: str, place: Path, alone: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    data = str(place / "rows.jsonl")
    ended = evaluate(model, "--data", data, "--answer-pattern", "gsm8k", "--num-processes", "2", out="two")
    assert ended.code == 0, ended.stderr
    assert found(place / "two") == alone


@pytest.mark.slow
def test_a_comparison_is_of_the_same_rows(evaluate: Evaluate, model: str, place: Path) -> None:
    other = model_of("llama", positions=512)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)  # less sure, so nearer to chance
    other.save_pretrained(place / "other")
    TOKENIZER.save_pretrained(place / "other")
    data = write(place / "compared.jsonl", QUESTIONS)
    named = ("--metrics", "loss,rouge_l")
    ended = evaluate(model, "--data", data, "--against", str(place / "other"), *named, out="compared")
    assert ended.code == 0, ended.stderr
    assert f"A: {model}" in ended.stdout and "A - B" in ended.stdout
    metrics, samples = found(place / "compared")
    difference = metrics["against"]["difference"]
    assert list(difference) == ["loss", "rouge_l"]
    for name in difference:
        own, theirs = metrics["metrics"][name]["value"], metrics["against"]["metrics"][name]["value"]
        assert difference[name]["value"] == pytest.approx(own - theirs, abs=1e-12)
        assert difference[name]["low"] <= difference[name]["value"] <= difference[name]["high"]
    assert difference["loss"]["value"] != 0.0
    lines = (place / "compared" / "samples-against.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [sample["prompt"] for sample in samples]


@pytest.mark.slow
def test_long_texts_are_split_and_lose_nothing(evaluate: Evaluate, model: str, place: Path) -> None:
    texts = ["ab " * 20, "the quick brown fox", "never twice the same river"]
    data = write(place / "texts.jsonl", [{"text": text} for text in texts])
    named = ("--metrics", "loss")
    ended = evaluate(model, "--data", data, "--max-length", "16", *named, out="texts")
    assert ended.code == 0, ended.stderr
    assert "3 rows split at the maximum length; no token is lost" in ended.stdout
    plain, total, count = model_of("llama", positions=512), 0.0, 0
    for text in texts:
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        for begin in range(0, len(ids) - 1, 15):  # a window begins with the last token of the one before
            window = torch.tensor([ids[begin : begin + 16]])
            with torch.no_grad():
                logits = plain(window).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
            count += window.shape[1] - 1
    metrics, samples = found(place / "texts")
    assert values(metrics) == {"loss": pytest.approx(total / count, rel=1e-5)}
    assert len(samples) == metrics["metrics"]["loss"]["n"] == len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("single source", marks=pytest.mark.slow), "a mixture"])
def test_a_run_is_measured_on_the_rows_that_it_held_out(runs: Runs, evaluate: Evaluate, place: Path, kind: str) -> None:
    texts = place / "library"
    texts.mkdir(exist_ok=True)
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"Chapter {number}.\n\n" + f"It was the {number}th of them. " * 30)
    mixture = f"data.train=[{{source: {ROWS}, limit: 60}}, {{source: {texts}, format: documents, weight: 2}}]"
    data = (mixture, "data.limit=null") if kind == "a mixture" else (f"data.train={ROWS}", "data.limit=60")
    run = runs.trained(*data, "data.validation=0.2", "train.max_steps=2", "parallel.num_processes=1", recipe=TINY)
    ended = evaluate(str(run), out=f"run, {kind}")
    assert ended.code == 0, ended.stderr
    metrics, samples = found(place / f"run, {kind}")
    seen = events(run, "evaluate")[-1]["metrics"]
    for name in ("loss", "perplexity", "token_accuracy"):
        assert values(metrics)[name] == pytest.approx(seen[name], rel=1e-5), name
    if kind == "single source":
        assert len(samples) == 12 and "sources" not in metrics
        return
    sources = metrics["sources"]
    assert list(sources) == [str(ROWS), str(texts)]
    held = [sum(sample["source"] == name for sample in samples) for name in sources]
    assert held == [12, 1] == [sources[name]["metrics"]["loss"]["n"] for name in sources]
    assert "rouge_l" in sources[str(ROWS)]["metrics"] and "rouge_l" not in sources[str(texts)]["metrics"]
    assert f"of {texts}:" in ended.stdout
    losses = [sources[name]["metrics"]["loss"]["value"] for name in sources]
    assert min(losses) < values(metrics)["loss"] < max(losses)


BAD: dict[str, tuple[Any, str]] = {
    "an empty turn": ({"messages": [{**USER, "content": " "}, ASSISTANT]}, "a user turn, is empty"),
    "roles out of order": (
        {"messages": [USER, {"role": "system", "content": "s"}, ASSISTANT]},
        "the roles are out of order",
    ),
    "no reference": ({"messages": [USER]}, "there is no reference to compare with"),
    "an empty reference": (
        {"messages": [USER, {**ASSISTANT, "content": ""}]},
        "the answer is empty, so there is no reference to compare with",
    ),
    "a reference without a number": ({"messages": [USER, ASSISTANT]}, "gsm8k"),
    "a refused conversation": ({"messages": [{**USER, "content": "no"}, ASSISTANT]}, "not this"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_row_is_named_and_nothing_is_written(runs: Runs, place: Path, model: str, case: str) -> None:
    row, said = BAD[case]
    good = {"messages": [USER, {**ASSISTANT, "content": "So. #### 1"}]}
    data = write(place / f"{case}.jsonl", [good, row])
    options = ["--answer-pattern", "gsm8k"] if "number" in case else []
    if "refused" in case:
        model = refusing(place / "refusing")
    out = place / f"out, {case}"
    ended = runs.command("eval", model, "--data", data, "--out", str(out), *options).wait()
    assert ended.code == 2, ended.stdout + ended.stderr
    assert f"{case}.jsonl:2: " in ended.stderr and said in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == 1
    assert not out.exists() and not list(place.glob(".*.writing-*"))


def refusing(directory: Path) -> str:
    """A model whose template takes no turn that says no."""
    write_model(directory)
    template = "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    file = directory / "chat_template.jinja"
    file.write_text(template + "{% endfor %}" + file.read_text())
    return str(directory)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--metrics", "f2"), "unknown metric 'f2'"),
        (("--metrics", "answer"), "needs --answer-pattern"),
        (("--metrics", "f1", "--answer-pattern", "number"), "has no effect"),
        (("--metrics", "loss", "--full"), "--full: has no effect"),
        (("--format", "preference"), "--format: unknown format"),
        (("--quick", "--limit", "3"), "cannot be combined with --full or --limit"),
        (("--relearning-steps", "3"), "has no effect without --benchmark"),
        (("--answer-pattern", "("), "is not a regular expression"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    runs: Runs, place: Path, model: str, options: tuple[str, ...], said: str
) -> None:
    data = write(place / "asked.jsonl", QUESTIONS)
    ended = runs.command("eval", model, "--data", data, *options, "--out", str(place / "refused")).wait()
    assert ended.code == 2 and said in ended.stderr, ended.stderr
    assert not (place / "refused").exists()


def test_tasks_of_the_harness(runs: Runs, place: Path, model: str) -> None:
    """A task of likelihoods and one of answers, defined here, on local rows."""
    pytest.importorskip("lm_eval")
    tasks = place / "tasks"
    tasks.mkdir()
    data = write(tasks / "rows.jsonl", [{"q": row["question"], "a": row["answer"], "b": "No."} for row in QUESTIONS])
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}, "test_split": "test"}
    choices = {"task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": 0}
    choices |= {"doc_to_choice": "{{[a, b]}}", "metric_list": [{"metric": "acc"}]}
    written = {"task": "written", "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    written |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}, "metric_list": [{"metric": "exact_match"}]}
    for task in (choices, written):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps({**common, **task}))
    asked = ("--lm-eval", "choices,written", "--lm-eval-include", str(tasks), "--num-processes", "2")
    ended = runs.command("eval", model, *asked, "--out", str(place / "harness")).wait()
    assert ended.code == 0, ended.stderr
    results = json.loads((place / "harness" / "metrics.json").read_text())["lm_eval"]
    plain = model_of("llama", positions=512)

    def likelihood(text: str, more: str) -> float:
        ids = TOKENIZER(f"{text} {more}")["input_ids"]
        begin = len(TOKENIZER(text)["input_ids"])
        with torch.no_grad():
            logs = plain(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return sum(float(logs[place - 1, ids[place]]) for place in range(begin, len(ids)))

    right = [likelihood(row["question"], row["answer"]) > likelihood(row["question"], "No.") for row in QUESTIONS]
    assert results["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert results["written"]["exact_match,none"] == 0.0
