"""``trainwright eval --benchmark``: on any number of processes the numbers that a plain loop over the rows gives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from tests.inference.evaluation.unlearning.benchmark import write_model, write_tofu
from tests.inference.models import TOKENIZER, model_of
from tests.support.runs import Finished, Runs
from trainwright.data.rows.chat_encoding import encode_messages
from trainwright.tasks.unlearn.evaluation.registry import METRICS

_MOST = [name for name in METRICS if name not in ("verbatim_memorisation", "choice_accuracy")]

Evaluate = Callable[..., Finished]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


@pytest.fixture(scope="module")
def evaluate(runs: Runs, place: Path) -> Evaluate:
    """Run ``eval`` on the made-up benchmark."""
    model, benchmark = write_model(place / "model"), write_tofu(place / "rows")

    def run(*arguments: str, out: str, asked: str = benchmark) -> Finished:
        words = ("eval", model, "--benchmark", asked, "--max-new-tokens", "8", "--out", str(place / out), *arguments)
        return runs.command(*words).wait()

    return run


@pytest.fixture(scope="module")
def alone(evaluate: Evaluate, place: Path) -> dict[str, Any]:
    """What one process finds, with the metrics that need no reference."""
    ended = evaluate(out="alone")
    assert ended.code == 0, ended.stderr
    return json.loads((place / "alone" / "log.json").read_text())


@pytest.mark.slow
def test_likelihoods_are_those_of_a_plain_loop(alone: dict[str, Any], place: Path) -> None:
    model = model_of("llama", positions=512)

    def loss(question: str, answer: str) -> float:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids, flags = encode_messages(TOKENIZER, turns)
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses = [-float(logs[n - 1, ids[n]]) for n in range(1, len(ids)) if flags[n]]
        return float(np.mean(losses))

    ratios = {}
    for stem, name in (("forget01", "forget"), ("retain", "retain"), ("world_facts", "world_facts")):
        rows = [json.loads(line) for line in (place / "rows" / f"{stem}_perturbed.jsonl").read_text().splitlines()]
        right = [loss(row["question"], row["answer"]) for row in rows]
        said = [loss(row["question"], row.get("paraphrased_answer", row["answer"])) for row in rows]
        wrong = [[loss(row["question"], each) for each in row["perturbed_answer"]] for row in rows]
        probability = [math.exp(-each) for each in right]
        if name == "world_facts":
            probability = [
                p / (p + sum(math.exp(-w) for w in each)) for p, each in zip(probability, wrong, strict=True)
            ]
        assert alone["metrics"]["answer_probability"][name] == pytest.approx(np.mean(probability), rel=1e-4)
        ratios[name] = np.exp(np.array(said) - np.mean(wrong, axis=1))
    found = alone["metrics"]["truth_ratio"]
    assert found["forget"] == pytest.approx(np.minimum(ratios["forget"], 1 / ratios["forget"]).mean(), rel=1e-4)
    assert found["retain"] == pytest.approx(np.maximum(0, 1 - ratios["retain"]).mean(), rel=1e-3, abs=1e-4)
    logged = alone["eval_log_forget.json"]["truth_ratio"]
    assert list(logged.values()) == pytest.approx(ratios["forget"].tolist(), rel=1e-4)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(evaluate: Evaluate, place: Path, alone: dict[str, Any]) -> None:
    options = ["--metrics", ",".join(_MOST), "--reference-log", str(place / "alone")]
    options += ["--reference-model", str(place / "model"), "--relearning-rate", "1e-3", "--relearning-steps", "4"]
    logs = []
    for processes in (1, 2):
        ended = evaluate(*options, "--num-processes", str(processes), out=f"processes-{processes}")
        assert ended.code == 0, ended.stderr
        logs.append(json.loads((place / f"processes-{processes}" / "metrics.json").read_text())["metrics"])
    one, two = logs
    assert list(one) == list(two) == _MOST
    for name in _MOST:
        assert one[name] == pytest.approx(two[name], rel=1e-6, abs=1e-9), name
    assert one["forget_quality"] == {"forget": 1.0}  # it is compared with itself
    assert one["privleak"] == {"forget": 0.0}
    assert one["mia_reference"] == {"forget": 0.5}
    steps = one["relearning"]
    assert list(steps) == ["0", "1", "2", "3", "4"] and steps["4"] > steps["0"]
    assert one["quantisation"]["int8"] == pytest.approx(one["answer_probability"]["forget"], rel=0.2)


def test_a_published_log_is_a_reference(evaluate: Evaluate, place: Path, alone: dict[str, Any]) -> None:
    """TOFU's authors' layout, with more rows than there are here."""
    drawn = np.random.default_rng(0)
    right, wrong = drawn.normal(3, 1, 40), drawn.normal(4, 1, (40, 5))
    numbered = {
        "avg_paraphrased_loss": {str(n): float(each) for n, each in enumerate(right)},
        "average_perturb_loss": {str(n): each.tolist() for n, each in enumerate(wrong)},
    }
    (place / "eval_log_aggregated.json").write_text(json.dumps({"eval_log_forget.json": numbered}))
    options = ["--metrics", "forget_quality", "--reference-log", str(place / "eval_log_aggregated.json")]
    ended = evaluate(*options, out="published")
    assert ended.code == 0, ended.stderr
    assert "the reference's log has 40 rows" in ended.stdout
    mine = list(alone["eval_log_forget.json"]["truth_ratio"].values())
    expected = ks_2samp(mine, np.exp(right - wrong.mean(1))).pvalue
    found = json.loads((place / "published" / "metrics.json").read_text())["metrics"]
    assert found["forget_quality"]["forget"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--metrics", "forget_quality"), "--metrics forget_quality: it needs --reference-log"),
        (("--metrics", "mia_loss", "--quick"), "--quick: is for rows of data"),
    ],
)
def test_a_metric_without_its_data_is_refused(evaluate: Evaluate, arguments: tuple[str, ...], said: str) -> None:
    ended = evaluate(*arguments, out="refused")
    assert ended.code == 2 and said in ended.stderr, ended.stderr
