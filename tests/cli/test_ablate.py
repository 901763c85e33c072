"""`trainwright ablate`: one key at a time, and what came of it side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.runs import ON_ROWS, TINY, Runs, events

SHORT = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=2", "logging.tensorboard=false")


@pytest.mark.slow
def test_every_value_of_every_key_is_trained_once(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "ablation"
    asked = ("ablate", str(TINY), *SHORT, "--over", "optimizer.learning_rate=1e-3,2e-2", "--out", str(out))
    ended = runs.command(*asked).wait()
    assert ended.code == 0, ended.stderr
    table = json.loads((out / "ablation.json").read_text())
    assert [(row["key"], row["value"]) for row in table] == [
        ("", ""),
        ("optimizer.learning_rate", "1e-3"),
        ("optimizer.learning_rate", "2e-2"),
    ]
    losses = [row["metrics"]["loss"] for row in table]
    assert losses[0] == losses[1] != losses[2]
    assert [row["run"] for row in table] == ["as-it-is", "as-it-is", "learning_rate=2e-2"]
    assert not (out / "learning_rate=1e-3").exists()
    assert "learning_rate=1e-3 is trained once, as as-it-is" in ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[1:4]] == [
        "as-it-is",
        "learning_rate=1e-3",
        "learning_rate=2e-2",
    ]
    assert events(out / "learning_rate=2e-2", "step")[0]["step"] == 1
    again = runs.command(*asked).wait()
    assert again.code == 0 and again.stderr.count("is already finished") == 2
    found = tw.ablate(TINY, *SHORT, over={"optimizer.learning_rate": ["1e-3", "2e-2"]}, out=out)
    assert f"{found}\n\n{out}/\n" == again.stdout and list(found.rows) == table


@pytest.mark.slow
def test_a_value_that_is_written_in_several_ways_is_trained_once(runs: Runs, tmp_path: Path) -> None:
    few = (*SHORT, "optimizer.warmup_steps=0", "data.validation=0.02")  # the recipe's own rate is 1e-3
    values = "--over", "optimizer.learning_rate=0.0020,2e-3,0.001,2.0e-03"
    ended = runs.command("ablate", str(TINY), *few, *values, "--out", str(tmp_path / "out")).wait()
    assert ended.code == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ablation.json",
        "as-it-is",
        "learning_rate=0.0020",
    ]
    for name, run in (("2e-3", "learning_rate=0.0020"), ("0.001", "as-it-is"), ("2.0e-03", "learning_rate=0.0020")):
        assert f"learning_rate={name} is trained once, as {run}\n" in ended.stderr
    table = json.loads((tmp_path / "out" / "ablation.json").read_text())
    own, other = (table[0]["metrics"], table[1]["metrics"])
    assert own != other and [row["metrics"] for row in table] == [own, other, other, own, other]


def test_a_wrong_value_is_refused_before_anything_is_trained(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "ablation"
    for over, word in (
        ("train.max_steps=2,many", "many"),
        ("train.max_steps", "KEY=VALUE"),
        ("model.tokenizer=a/b,a-b", "model.tokenizer=a/b and model.tokenizer=a-b would both be tokenizer=a-b/"),
    ):
        ended = runs.command("ablate", str(TINY), *SHORT, "--over", over, "--out", str(out)).wait()
        assert ended.code == 2 and word in ended.stderr
    assert not out.exists()
