"""`trainwright ablate`: one key at a time, all combinations or a sample of them, and what came of it side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.commands import wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from trainwright.errors import RequestError
from trainwright.observe.ablation import Ablation, SuccessiveHalving, Variant, list_combinations, sample_variants
from trainwright.observe.reports.comparing import is_lower_better

SHORT = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=2", "logging.observers.tensorboard=false")


@pytest.mark.slow
def test_every_value_of_every_key_is_trained_once(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "ablation"
    over = ("--one-at-a-time", "--over", "optimizer.learning_rate=1e-3,2e-2")
    asked = ("ablate", str(TINY), *SHORT, *over, "--out", str(out))
    ended = runs.command(*asked).wait()
    assert ended.code == 0, ended.stderr
    table = json.loads((out / "ablation.json").read_text())
    assert [row["changes"] for row in table] == [
        {},
        {"optimizer.learning_rate": "1e-3"},
        {"optimizer.learning_rate": "2e-2"},
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
    found = tw.ablate(
        TINY, *SHORT, over={"optimizer.learning_rate": ["1e-3", "2e-2"]}, combine="one at a time", out=out
    )
    assert f"{found}\n\n{out}/\n" == again.stdout and list(found.rows) == table


@pytest.mark.slow
def test_a_value_that_is_written_in_several_ways_is_trained_once(runs: Runs, tmp_path: Path) -> None:
    few = (*SHORT, "optimizer.warmup_steps=0", "data.validation=0.02")  # the recipe's own rate is 1e-3
    values = "--one-at-a-time", "--over", "optimizer.learning_rate=0.0020,2e-3,0.001,2.0e-03"
    ended = runs.command("ablate", str(TINY), *few, *values, "--out", str(tmp_path / "out")).wait()
    assert ended.code == 0, ended.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "ablation.html",
        "ablation.json",
        "as-it-is",
        "asked",
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


OVER = {"optimizer.learning_rate": ["1e-3", "2e-3", "4e-3"], "train.seed": [0, 1]}


def test_a_grid_has_every_combination_once() -> None:
    names = [variant.name for variant in list_combinations(OVER)]
    assert len(set(names)) == 6 and names[0] == "learning_rate=1e-3,seed=0" and names[-1] == "learning_rate=4e-3,seed=1"


def test_a_sample_is_drawn_by_its_seed_from_values_and_ranges() -> None:
    assert sample_variants(OVER, 4, seed=1) == sample_variants(OVER, 4, seed=1) != sample_variants(OVER, 4, seed=2)
    assert len(set(sample_variants(OVER, 4, seed=1))) == 4 and sample_variants(OVER, 9, seed=1) == list_combinations(
        OVER
    )
    drawn = [
        dict(each.changes)
        for each in sample_variants({"a.b": ["1e-5..1e-3"], "a.c": ["2..40"], "a.d": ["x", "y"]}, 50, 0)
    ]
    rates = [float(each["a.b"]) for each in drawn]
    assert min(rates) >= 1e-5 and max(rates) <= 1e-3 and 10 < sum(rate < 1e-4 for rate in rates) < 40
    assert all(2 <= int(each["a.c"]) <= 40 for each in drawn) and {each["a.d"] for each in drawn} == {"x", "y"}
    for wrong in ("1..0", "1..e"):
        with pytest.raises(RequestError, match=r"LOW\.\.HIGH"):
            sample_variants({"a.b": [wrong]}, 2, 0)
    with pytest.raises(RequestError, match="--sample"):
        list_combinations({"a.b": ["1..2"]})


def test_halving_continues_the_best_of_every_few() -> None:
    halving = SuccessiveHalving((10, 30, 90), 3, "loss", highest=False)
    values = {Variant((("a", str(n)),)): value for n, value in enumerate([3.0, 1.0, float("nan"), 2.0, 5.0, 4.0, 6.0])}
    assert [variant.changes[0][1] for variant in halving.best(values)] == ["0", "1", "3"]
    highest = SuccessiveHalving((10, 30, 90), 3, "accuracy", highest=True)
    assert [variant.changes[0][1] for variant in highest.best(values)] == ["4", "5", "6"]


def test_the_best_run_is_that_of_the_metric_that_was_named() -> None:
    rows = tuple(
        {"name": name, "changes": {}, "run": name, "step": 2, "metrics": {"loss": loss, "token_accuracy": accuracy}}
        for name, loss, accuracy in (("a", 1.0, 0.2), ("b", 2.0, 0.9))
    )
    assert is_lower_better("loss") and is_lower_better("perplexity") and not is_lower_better("token_accuracy")
    assert Ablation(Path("out"), rows, "loss").best["name"] == "a"
    accurate = Ablation(Path("out"), rows, "token_accuracy", highest=True)
    assert accurate.best["name"] == "b" and "best: b (highest token accuracy 0.9000)" in str(accurate)


@pytest.mark.slow
def test_a_sweep_is_a_grid_under_runs_with_all_curves_and_a_logarithmic_axis(runs: Runs, tmp_path: Path) -> None:
    over = ("--over", "optimizer.learning_rate=1e-3,4e-3", "--over", "train.seed=0,1", "--metric", "token_accuracy")
    ended = runs.command("ablate", str(TINY), *SHORT, *over, cwd=tmp_path).wait()
    assert ended.code == 0, ended.stderr
    found = {each.run.name for each in tw.runs(tmp_path / "runs")}
    assert found == {f"learning_rate={rate},seed={seed}" for rate in ("1e-3", "4e-3") for seed in (0, 1)}
    out = tmp_path / "runs" / "tiny-sweep"
    rows = json.loads((out / "ablation.json").read_text())
    best = max(rows, key=lambda row: row["metrics"]["token_accuracy"])
    assert f"(highest token accuracy {best['metrics']['token_accuracy']:.4f})" in ended.stdout
    page = re.search(r'id="charts">(.*?)</script>', (out / "ablation.html").read_text(), re.DOTALL)
    assert page is not None
    charts = {chart["title"]: chart for chart in json.loads(page[1])}
    assert charts["optimizer.learning_rate"]["encoding"]["x"]["scale"]["type"] == "log"
    assert charts["train.seed"]["encoding"]["x"]["scale"]["type"] == "linear"
    assert {row["run"] for row in charts["Training loss"]["data"]["values"]} == found


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [(), ("--jobs", "2")])
def test_a_metric_that_is_not_measured_ends_a_sweep_at_its_first_evaluation(
    runs: Runs, tmp_path: Path, jobs: tuple[str, ...]
) -> None:
    short = [word.replace("max_steps=2", "max_steps=200000") for word in SHORT]
    sweep = ("ablate", str(TINY), *short, *jobs, "--over", "train.seed=0,1", "--metric")
    ended = runs.command(*sweep, "exact_match", cwd=tmp_path).wait()
    assert ended.code == 2, ended.stderr
    assert "error: --metric: exact_match is not measured; choose from loss, perplexity, token_accuracy" in ended.stderr


def test_a_sweep_without_validation_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.validation: not set"):
        tw.ablate(TINY, *SHORT, "data.validation=null", over={"train.seed": [0, 1]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_grid_goes_on_where_it_was_and_trains_no_run_twice(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "grid"
    over = ("--over", "optimizer.learning_rate=1e-3,2e-3,4e-3", "--over", "train.seed=0,1", "--jobs", "2")
    asked = ("ablate", str(TINY), *SHORT, "train.max_steps=6", *over, "--out", str(out))
    started = runs.command(*asked)

    def logs() -> list[Path]:
        return [log for log in out.glob("*/events.jsonl") if b'"finish"' in log.read_bytes()]

    wait_for(lambda: len(logs()) >= 2)
    started.kill()
    finished = {log.parent.name: log.read_bytes() for log in logs()}
    ended = runs.command(*asked).wait()
    assert ended.code == 0, ended.stderr
    table = json.loads((out / "ablation.json").read_text())
    assert [row["run"] for row in table] == [variant.name for variant in list_combinations(OVER)]
    for row in table:
        run = out / row["run"]
        assert column(run, "step") == list(range(1, 7)) and len(events(run, "finish")) == 1
        assert row["metrics"] == events(run, "evaluate")[-1]["metrics"] and row["step"] == 6
    for name, log in finished.items():
        assert (out / name / "events.jsonl").read_bytes() == log, "it was not trained again"
    best = min(table, key=lambda row: row["metrics"]["loss"])["name"]
    assert f"best: {best} (loss " in ended.stdout and best in (out / "ablation.html").read_text()
    other = runs.command(*asked, "data.max_length=64").wait()
    assert other.code == 2 and "is of another recipe" in other.stderr


@pytest.mark.slow
def test_halving_trains_only_the_best_to_the_end_with_the_losses_of_the_whole_run(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "halving"
    over = ("--over", "optimizer.learning_rate=1e-5,1e-4,1e-3,4e-3", "--grid", "--halving", "2")
    ended = runs.command("ablate", str(TINY), *SHORT, "train.max_steps=16", *over, "--out", str(out)).wait()
    assert ended.code == 0, ended.stderr
    table = {row["name"]: row for row in json.loads((out / "ablation.json").read_text())}
    assert sorted(row["step"] for row in table.values()) == [4, 4, 8, 16]
    (best,) = [name for name, row in table.items() if row["step"] == 16]
    assert f"best: {best} " in ended.stdout
    rate = f"optimizer.learning_rate={best.partition('=')[2]}"
    whole = runs.trained(*SHORT, "train.max_steps=16", "evaluate.every=4", rate)
    assert column(out / best, "loss") == column(whole, "loss")
