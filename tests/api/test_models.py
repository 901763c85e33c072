"""evaluate, generate, merge and verify find what the commands of their names find."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.main import get_command

import trainwright as tw
from tests.support.commands import trainwright
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.api.evaluation import MeasureRequest
from trainwright.api.generation import GenerationRequest
from trainwright.cli.main import app
from trainwright.doctor.operations import VerifyRequest

SETTINGS = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=4")
PROMPTS = ["What is a list?", "What is a tuple?"]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(runs.trained(*SETTINGS))


# Each starts Python twice; of each command one is among the fast tests.
FAST = [
    (["eval", "gpt2", "--quick", "--full"], lambda: tw.evaluate("gpt2", quick=True, full=True)),
    (["generate", "run", "--prompt", "a", "--dtype", "int8"], lambda: tw.generate("run", "a", dtype="int8")),
    (["verify", str(TINY), "task=sfft"], lambda: tw.verify(TINY, "task=sfft")),
]
MORE = [
    (["eval", "gpt2", "--metrics", "los"], lambda: tw.evaluate("gpt2", metrics=["los"])),
    (["eval", "gpt2", "--episodes", "3"], lambda: tw.evaluate("gpt2", episodes=3)),
    (["generate", "run", "--prompt", "a", "--top-k", "3"], lambda: tw.generate("run", "a", top_k=3)),
    (["generate", "run", "--prompt", "a", "--batch-size", "3"], lambda: tw.generate("run", "a", batch_size=3)),
    (["generate", "run", "--file", "no.csv", "--out", "a.csv"], lambda: tw.generate("run", file="no.csv", out="a.csv")),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected a number of at least 1, not 0"),
        ({"temperature": -1.0}, "temperature: expected a number of at least 0, not -1.0"),
        ({"temperature": 1.0, "top_p": 2.0}, "top_p: expected a number of at most 1, not 2.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected a number of at least 1, not 0"),
        ({"temperature": math.nan}, "temperature: expected a number of at least 0, not NaN"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected a whole number, not 1.5"),
        ({"max_new_tokens": "many"}, 'max_new_tokens: expected a whole number, not "many"'),
        ({"top_p": None}, "top_p: expected a number, not null"),
        ({"seed": -1}, "seed: expected a number of at least 0, not -1"),
    ],
    ids=str,
)
def test_numbers_that_are_not_possible_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tw.RequestError, match=said):
        tw.generate("run", "a", **options)


def test_counts_that_are_not_possible_are_refused_before_anything_starts() -> None:
    with pytest.raises(tw.RequestError, match="prompts has none"):
        tw.generate("run", [])
    with pytest.raises(tw.RequestError, match="limit: expected a number of at least 1, not 0"):
        tw.evaluate("run", limit=0)
    with pytest.raises(tw.RequestError, match="steps: expected a number of at least 1, not 0"):
        tw.verify(TINY, steps=0)
    with pytest.raises(tw.RequestError, match="greedy_after: expected a number of at least 1, not 0"):
        tw.evaluate("run", greedy_after=0)
    with pytest.raises(tw.RequestError, match="count: expected a number of at least 1, not 0"):
        tw.alternates(TINY, out="alternates.jsonl", count=0)
    with pytest.raises(tw.RequestError, match="global_batch_size: expected a number of at least 1, not 0"):
        tw.plan(TINY, global_batch_size=0)


@pytest.mark.parametrize(
    ("command", "request_type"),
    [("generate", GenerationRequest), ("eval", MeasureRequest), ("verify", VerifyRequest)],
)
def test_options_of_commands_have_the_bounds_of_their_requests(command: str, request_type: type) -> None:
    types = get_type_hints(request_type, localns={"Tree": object}, include_extras=True)  # Tree: only for type checks
    options = get_command(app).get_command(None, command).params
    minima = {each.name: each.min for each in options if getattr(each, "min", None) is not None}
    assert minima
    for name, least in minima.items():
        adapter = TypeAdapter(types[name])
        assert adapter.validate_python(least) == least
        with pytest.raises(ValidationError):
            adapter.validate_python(least - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "call"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_a_wrong_argument_raises_what_the_command_says(
    words: list[str], call: Callable[[], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = trainwright(*words, cwd=tmp_path)
    with pytest.raises(tw.RequestError) as refused:
        call()
    assert (command.returncode, command.stderr) == (2, f"error: {refused.value}\n")
    assert capfd.readouterr() == ("", "") and [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_an_evaluation_is_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--metrics", "loss,exact_match", "--max-new-tokens", "4", "--limit", "3", "--out", "by-command")
    command = trainwright("eval", "run", *options, cwd=tmp_path)
    found = tw.evaluate(tw.Run("run"), metrics=["loss", "exact_match"], max_new_tokens=4, limit=3, out="by-api")
    assert command.returncode == 0, command.stderr
    table = command.stdout[command.stdout.index("metric ") :]
    assert table == f"{found}\n\nby-command/\n" and capfd.readouterr() == ("", "")
    assert found.details == json.loads((tmp_path / "by-command" / "metrics.json").read_text())
    assert set(found.metrics) == {"loss", "exact_match"}
    assert [sample["answer"] for sample in found.samples] == [
        json.loads(line)["answer"] for line in (tmp_path / "by-command" / "samples.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_answers_are_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ("--max-new-tokens", "6", "--temperature", "0.7", "--seed", "3")
    command = trainwright(
        "generate", "run", "--file", "prompts.txt", "--out", "by-command.jsonl", *options, cwd=tmp_path
    )
    answers = tw.generate("run", PROMPTS, max_new_tokens=6, temperature=0.7, seed=3)
    assert command.returncode == 0, command.stderr
    assert answers == [json.loads(line)["generated"] for line in Path("by-command.jsonl").read_text().splitlines()]
    assert len(set(answers)) == 2 and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_other_ways_to_ask_give_the_same_answers(tmp_path: Path) -> None:
    command = trainwright("generate", "run", "--prompt", PROMPTS[0], "--max-new-tokens", "6", cwd=tmp_path)
    (answer,) = tw.generate("run", PROMPTS[0], max_new_tokens=6)
    assert command.stdout == answer + "\n"
    conversation = [{"role": "user", "content": PROMPTS[0]}]
    assert tw.generate("run", [conversation], max_new_tokens=6) == [answer]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": conversation}) + "\n")
    assert tw.generate("run", file="rows.jsonl", out="answers.jsonl", max_new_tokens=6) == [answer]
    assert json.loads(Path("answers.jsonl").read_text())["generated"] == answer


@pytest.mark.slow
def test_merging_and_exporting_are_the_commands(tmp_path: Path, runs: Runs) -> None:
    run = runs.trained(*SETTINGS, "model.adapter={type: lora, rank: 2}", "optimizer.learning_rate=0.1")
    command = trainwright("merge", str(run), "--out", "by-command", cwd=tmp_path)
    merged = tw.merge(tw.Run(run), "by-api")
    assert command.stdout.startswith(f"by-command: {merged.changed} matrices merged"), command.stderr
    assert f"{merged.difference:.1e}" in command.stdout and repr(merged.sample) in command.stdout
    names = sorted(path.name for path in Path("by-command").iterdir())
    assert names == sorted(path.name for path in merged.directory.iterdir())
    assert Path("by-command/model.safetensors").read_bytes() == Path("by-api/model.safetensors").read_bytes()
    command = trainwright("export", str(run), "--to", "adapter", "--out", "adapter", cwd=tmp_path)
    assert command.stdout.startswith("adapter: the adapter\n"), command.stderr
    exported = tw.export(tw.Run(run), "adapter-by-api", to="adapter") / "adapter_model.safetensors"
    assert Path("adapter/adapter_model.safetensors").read_bytes() == exported.read_bytes()


@pytest.mark.slow
def test_a_comparison_is_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (ON_ROWS, "parallel.strategy=ddp", "parallel.num_processes=2")
    command = trainwright("verify", str(TINY), *words, "--steps", "2", cwd=tmp_path)
    found = tw.verify(TINY, *words, steps=2)
    assert command.stdout.endswith(found.verdict() + "\n") and found.is_same and len(found.steps) == 2
    assert capfd.readouterr() == ("", "")
