"""Runs that are listed, reported and compared, from what they have written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.errors import RequestError
from trainwright.observe.ledger import LedgerLine, RankLedger
from trainwright.observe.reports.charts import build_curve_charts
from trainwright.observe.reports.comparing import compute_paired_differences, find_recipe_differences
from trainwright.observe.reports.figures import RunFigures, build_curves, compute_moving_average, thin_points
from trainwright.observe.reports.page import (
    Page,
    RunRemarks,
    format_machines,
    format_prose,
    sum_seconds_by_kind,
    write_remarks,
)

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\u202e\x1b[31m'


def step(number: int, time: float, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    return {
        **{"event": "step", "time": time, "step": number, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1},
        **{"tokens": number * 10, "target_tokens": 5, "tokens_per_second": 100.0, "step_time": 1.0},
        **{"memory_bytes": 2**30, **more},
    }


def start(time: float, resumed: int | None = None) -> dict[str, Any]:
    fields = {"task": "sft", "world_size": 2, "strategy": "ddp", "max_steps": 4, "parameters": 100, "predicted": {}}
    return {
        "event": "start",
        "time": time,
        "resumed_from": resumed,
        "reasons": ["train.compile false: short"],
        **fields,
    }


def evaluate(number: int, time: float, loss: float) -> dict[str, Any]:
    return {"event": "evaluate", "time": time, "step": number, "metrics": {"loss": loss}, "seconds": 0.5}


def written(directory: Path, *events: dict[str, Any] | str, recipe: str = "task: sft\nmodel: {name: small}\n") -> Path:
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text(recipe)
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def finished(directory: Path, shift: float = 0.0, recipe: str = "task: sft\nmodel: {name: small}\n") -> Path:
    events = [start(100.0), *(step(n, 100.0 + n, 3.0 - n / 10 + shift) for n in (1, 2, 3, 4))]
    events += [evaluate(n, 104.0 + n, 2.0 - n / 10 + shift) for n in (2, 3, 4)]
    end = {
        "event": "finish",
        "time": 110.0,
        "status": "finished",
        "step": 4,
        "seconds": 10.0,
        "path": "x",
        "measured": {},
    }
    return written(directory, *events, end, recipe=recipe)


def test_runs_are_listed_with_what_they_did(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    finished(tmp_path / "sweep" / "b", 1.0)
    fault = {"event": "fault", "time": 102.5, "kind": "non-finite", "rank": 0, "detail": "NaN", "action": "stop"}
    written(tmp_path / "c", start(100.0), step(1, 101.0), step(2, 102.0), fault)
    written(tmp_path / "d", start(200.0), step(1, 201.0))
    (tmp_path / "empty").mkdir()
    found = {each.run.name: each for each in tw.runs(tmp_path)}
    assert {name: each.status for name, each in found.items()} == {
        **{"a": "finished", "b": "finished"},
        **{"c": "failed", "d": "ended"},
    }
    assert (found["a"].best, found["a"].step, found["a"].steps, found["a"].goodput) == (1.6, 4, 4, 0.4)
    assert next(iter(found)) == "d", "the newest first"
    assert [each.run.name for each in tw.runs(tmp_path, status="failed")] == ["c"]
    assert [each.run.name for each in tw.runs(tmp_path, name="sweep")] == ["b"]
    assert tw.runs(tmp_path, task="dpo") == []
    for key, order in {"begun": "dacb", "run": "acdb", "best": "abdc", "step": "abcd"}.items():
        assert "".join(each.run.name for each in tw.runs(tmp_path, sort=key)) == order, key
    with pytest.raises(RequestError, match="sort: speed: choose from begun, run, "):
        tw.runs(tmp_path, sort="speed")
    with pytest.raises(RequestError, match="no such directory"):
        tw.runs(tmp_path / "nowhere")


def test_damage_is_told_and_what_is_left_is_shown(tmp_path: Path) -> None:
    run = written(tmp_path / "run", start(100.0), step(1, 101.0), '{"event": "st', step(2, 102.0))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "ti')  # being written
    found = RunFigures.read(run)
    assert found.damage == ["events.jsonl line 3 is damaged"]
    assert [event["step"] for event in found.steps] == [1, 2]
    assert "events.jsonl line 3 is damaged" in tw.report(run).read_text()


def test_seconds_of_a_resumed_run_belong_to_what_they_were_used_for(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        *(start(100.0), step(1, 101.0), step(2, 102.0), step(3, 103.0)),
        *(start(110.0, resumed=1), step(2, 111.0), step(3, 112.0), evaluate(3, 112.5, 1.0)),
        {"event": "checkpoint", "time": 113.0, "step": 3, "path": "x", "seconds": 2.0, "blocked_seconds": 0.25},
    )
    assert sum_seconds_by_kind(RunFigures.read(run)) == pytest.approx(
        {"steps": 3.0, "repeated": 2.0, "evaluation": 0.5, "checkpoints": 0.25, "paused": 7.0, "other": 0.25}
    )


def test_seconds_of_ranks_are_compared_in_one_unit(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    (run / "ledger").mkdir()
    for rank, forward in enumerate((94.25, 122.5)):
        line = {"launch": 1, "rank": rank, "time": 110.0, "step": 4, "started": 100.0, "seconds": {"forward": forward}}
        (run / "ledger" / f"rank-{rank}.jsonl").write_text(json.dumps(line) + "\n")
    assert "<td class=number>94.2</td><td class=number>122.5</td>" in tw.report(run).read_text()


def test_commands_in_sentences_are_shown_as_code() -> None:
    assert format_prose("run `a <b>` again") == "<p>Run <code>a &lt;b&gt;</code> again</p>"


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(n, float(n % 7)) for n in range(100_000)]
    points[54_321] = (54_321, 99.0)
    shown = thin_points(points, 1000)
    assert len(shown) <= 1002 and (54_321, 99.0) in shown and shown[0] == (0, 0.0) and shown[-1] == points[-1]


def test_a_gap_in_a_curve_stays_a_gap(tmp_path: Path) -> None:
    """Where steps were lost, and where a value is not a number; a metric that is rare has none."""
    numbers = [1, 2, 3, 6, 7, 8, 9]
    metrics = {n: {"each": float(n), **({"rare": 1.0} if n in (2, 8) else {})} for n in numbers}
    steps = [step(n, 100.0 + n, 2.0 if n != 8 else float("nan"), metrics=metrics[n]) for n in numbers]
    run = RunFigures.read(written(tmp_path / "run", start(100.0), *steps))
    curves = build_curves(run)
    assert curves["loss"].breaks == [6, 8] and curves["each"].breaks == [6] and curves["rare"].breaks == []
    charts = {chart["title"]: chart for chart in build_curve_charts([run])}
    parts = {row["step"]: row["part"] for row in charts["Training loss"]["data"]["values"]}
    assert parts == {1: 0, 2: 0, 3: 0, 6: 1, 7: 1, 9: 2}
    assert [row["step"] for row in charts["Training loss"]["data"]["values"] if row.get("alone")] == [9]


def test_smoothed_curves_follow_the_means_and_lose_no_point(tmp_path: Path) -> None:
    assert compute_moving_average([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0]), (
        "without a bias to its beginning"
    )
    assert compute_moving_average([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])
    long = [step(n, 100.0 + n, 2.0 + (-1.0) ** n) for n in range(1, 5001)]
    found = build_curves(RunFigures.read(written(tmp_path / "run", start(100.0), *long)), limit=100)
    assert {len(values) for values in found["loss"].smoothed.values()} == {len(found["loss"].points)}
    assert found["loss"].smoothed[0.9] == pytest.approx([2.0] * len(found["loss"].points)), "of means, not of extremes"
    assert found["learning_rate"].smoothed == {}


def test_the_result_the_hyperparameters_and_the_data_come_first(tmp_path: Path) -> None:
    recipe = "task: sft\noptimizer: {learning_rate: 0.003, schedule: cosine}\ndata: {train: <i>.jsonl}\n"
    begun = {**start(100.0), "data": ["train: 400 rows <b>", "kept in a cache"], "trainable_parameters": 10}
    last = {**evaluate(2, 104.0, 1.5), "metrics": {"loss": 1.5, "accuracy": 0.5}, "intervals": {"accuracy": [0.4, 0.6]}}
    events = [begun, evaluate(0, 100.5, 3.0), step(1, 101.0), step(2, 102.0), last]
    page = tw.report(written(tmp_path / "run", *events, recipe=recipe)).read_text()
    heads = re.findall("<h2>(.*?)</h2>", page)
    assert heads[:4] == ["Result", "Hyperparameters", "Data", "Curves"]
    for shown in (
        "<td>loss</td><td class=number>3.0000</td><td class=number>1.5000</td>",
        "0.5000 (0.4 to 0.6)",
        "<td>optimizer.learning_rate</td><td>0.003</td>",
        "<td>trainable parameters</td><td>10 of 100</td>",
        "&lt;i&gt;.jsonl",
        "400 rows &lt;b&gt;",
    ):
        assert shown in page, shown


def test_only_a_measurement_outside_of_the_plans_interval_is_colored(tmp_path: Path) -> None:
    predicted = {"memory_bytes": 100, "step_time": 0.5, "memory_low": 0.8, "memory_high": 1.2, "speed_low": 0.5}
    measured = {"memory_bytes": 119, "step_time": 1.1}
    finish = {"event": "finish", "time": 9.0, "status": "finished", "step": 1, "seconds": 3.0, "measured": measured}
    begun = {**start(1.0), "predicted": {**predicted, "speed_high": 1.5}}
    page = tw.report(written(tmp_path / "run", begun, step(1, 2.0), finish)).read_text()
    assert re.findall("<tr class=warn><td>(.*?)</td>", page) == ["Step time"]
    assert page.count("outside of the plan") == 1 and "100 B predicted, 119 B measured (+19 %)" in page


def test_the_tags_and_the_note_of_a_run_are_on_its_page(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    write_remarks(run, RunRemarks(["good", "<b>"], HOSTILE))
    page = tw.report(run).read_text()
    assert "good, &lt;b&gt;" in page and "alert(1)" in page and "<script>alert" not in page


def test_an_evaluation_whose_step_is_lost_is_at_the_step_before_it(tmp_path: Path) -> None:
    lost = [
        start(100.0),
        step(1, 101.0),
        step(2, 102.0),
        step(4, 104.0),
        evaluate(0, 100.5, 2.0),
        evaluate(3, 103.0, 1.0),
    ]
    charts = build_curve_charts([RunFigures.read(written(tmp_path / "run", *lost))])
    values = next(chart["data"]["values"] for chart in charts if chart["title"] == "Validation loss")
    assert [(value["step"], value["tokens"]) for value in values] == [(0, 0.0), (3, 20.0)]


def test_positions_on_every_axis(tmp_path: Path) -> None:
    run = RunFigures.read(finished(tmp_path / "run"))
    assert run.positions("seconds") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert run.positions("flops")[4] == 6 * 100 * 40
    assert build_curves(run)["validation/loss"].points == [(2, 1.8), (3, 1.7), (4, 1.6)]


class Scripts(HTMLParser):
    """Collects the scripts and the sources of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.loaded = 0, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += tag == "script"
        self.loaded += [f"{tag} {value}" for name, value in attrs if name in ("src", "onerror") or name == "href"]


def test_hostile_text_is_shown_and_not_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    sample = {"event": "generate", "time": 105.0, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    fault = {"event": "fault", "time": 106.0, "kind": HOSTILE, "rank": 0, "detail": HOSTILE, "action": HOSTILE}
    metrics = step(1, 101.0, metrics={HOSTILE: 1.0})
    recipe = f"task: sft\nmodel: {{name: {json.dumps(HOSTILE)}}}\n"
    run = written(tmp_path / "<b>run", start(100.0), metrics, sample, fault, recipe=recipe)
    for page in (tw.report(run), tw.compare(run, run, out=tmp_path / "both.html").page):
        assert page is not None
        text = page.read_text()
        parser = Scripts()
        parser.feed(text)
        assert parser.count == 4, "two with data, the library, and ours"
        assert parser.loaded == []
        assert "\x1b" not in text and "\u202e" not in text
        charts = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)
        assert charts is not None and json.loads(charts.group(1))


def test_a_run_is_compared_with_others(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", recipe="task: sft\ntrain: {max_steps: 4, seed: 1}\n")
    two = finished(tmp_path / "two", 0.5, recipe="task: sft\ntrain: {max_steps: 4, seed: 2}\nmodel: {name: x}\n")
    found = tw.compare(one, two, out=tmp_path / "page.html")
    assert found.recipes == {"model.name": ["-", "x"], "train.seed": ["1", "2"]}
    (difference,) = found.evaluations
    assert (difference.metric, difference.step, difference.evaluations) == ("loss", 4, 3)
    assert difference.last == pytest.approx((1.6, 2.1)) and difference.best == pytest.approx((1.6, 2.1))
    assert "train.seed" in str(found)
    assert re.search(r"loss +two +2\.1 +1\.6 +\+0\.5 +2\.1 .*1\.6 +\+0\.5 +4 +3", str(found))
    assert found.page is not None and "Evaluations, paired by step" in found.page.read_text()
    with pytest.raises(RequestError, match="at least two runs"):
        tw.compare(one)
    with pytest.raises(RequestError, match="nowhere: no such directory"):
        tw.compare(tmp_path / "nowhere")
    same = [RunFigures.read(one), RunFigures.read(one)]
    assert find_recipe_differences(same) == {} and compute_paired_differences(same)[0].last == (1.6, 1.6)
    for several in ([[one, two]], [tmp_path], [str(tmp_path)], [(one,), two]):
        assert [run.name for run in tw.compare(*several).runs] == ["one", "two"]
    (tmp_path / "none").mkdir()
    with pytest.raises(RequestError, match="is one; name another one"):
        tw.compare([one])


def test_the_untrained_model_does_not_count_and_other_data_is_said(tmp_path: Path) -> None:
    def run(name: str, losses: dict[int, float], data: dict[str, str], recipe: str) -> Path:
        steps = [step(n, 101.0 + n) for n in range(1, max(losses) + 1)]
        evaluations = [evaluate(n, 120.0 + n, loss) for n, loss in losses.items()]
        return written(tmp_path / name, {**start(100.0), "fingerprints": data}, *steps, *evaluations, recipe=recipe)

    recipe = "task: sft\nmodel: {name: small}\ndata: {train: a.jsonl, validation: b.jsonl, max_length: 64}\n"
    same = {"train": "1", "validation": "2"}
    one = run("one", {0: 5.0, 2: 0.9, 4: 0.87}, same, recipe)
    two = run("two", {0: 4.0, 2: 1.1, 4: 1.08, 6: 1.0}, same, recipe)
    found = tw.compare(one, two)
    (difference,) = found.evaluations
    assert (difference.best, difference.last, difference.step) == ((0.87, 1.08), (0.87, 1.08), 4)
    assert not found.notes and [each.best for each in found.runs] == [(4, 0.87), (6, 1.0)]
    assert "+0.21" in str(found)

    longer = recipe.replace("b.jsonl", "c.jsonl").replace("64", "128")
    other = run("other", {2: 0.1}, {"train": "1", "validation": "3"}, longer)
    found = tw.compare(one, other, out=tmp_path / "page.html")
    assert found.evaluations == []
    (note,) = found.notes
    assert "validated on different data (data.max_length, data.validation)" in note and "not comparable" in str(found)
    assert found.page is not None and "not comparable" in found.page.read_text()
    changed = run("changed", {2: 0.1}, {"train": "9", "validation": "3"}, recipe)
    notes = tw.compare(one, changed).notes
    assert len(notes) == 2 and all("their rows have changed" in note for note in notes)
    older = run("older", {2: 0.1}, {}, longer)
    assert "data.validation" in tw.compare(one, older).notes[0]


def test_runs_are_listed_without_what_checks_recipes(tmp_path: Path) -> None:
    """Which takes a fifth of the time of `trainwright runs`."""
    finished(tmp_path / "run")
    code = f"import sys, trainwright as tw; assert len(tw.runs({str(tmp_path)!r})) == 1; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "rich", "trainwright.recipe.schema"} & set(done.stdout.split())


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"is not a run directory: it has no recipe\.yaml"):
        tw.report(tmp_path)
    run = finished(tmp_path / "run")
    checkpoint = tmp_path / "copies" / "run" / "step-00000040"  # of a run whose own files are elsewhere
    checkpoint.mkdir(parents=True)
    for name in ("recipe.yaml", "manifest.json"):
        (checkpoint / name).write_text("{}")
    (run / "manifest.json").write_text("{}")  # of another program
    assert [each.run for each in tw.runs(tmp_path)] == [run]
    with pytest.raises(RequestError, match="is not a run directory: it is a checkpoint"):
        tw.report(checkpoint)
    (checkpoint / "recipe.yaml").unlink()
    with pytest.raises(RequestError, match=r"is not a run directory: it has no recipe\.yaml"):
        tw.report(checkpoint)
    with pytest.raises(RequestError, match="No such file or directory"):
        tw.report(run, tmp_path / "missing" / "page.html")


@pytest.mark.slow
def test_a_real_run_writes_its_report(runs: Runs) -> None:
    run = runs.new_directory("run")
    fixed = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=3", "logging.observers.tensorboard=false")
    samples = (
        "evaluate.prompts=['What is a list?']",
        "evaluate.every=2",
        "evaluate.max_new_tokens=4",
        "data.validation=8",
    )
    ended = runs.command(
        "train", str(TINY), *fixed, *samples, f"logging.run_directory={run}", "logging.observers.report=true"
    ).wait()
    assert ended.code == 0, ended.stderr
    page = (run / "report.html").read_text()
    for shown in ("What is a list?", "Predicted and measured", "Where the time went", "max_steps: 3", "<td>torch</td>"):
        assert shown in page
    assert badge(run) == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "status", "shown"),
    [
        (("faults.on_non_finite=stop", "optimizer.learning_rate=1e9", "optimizer.max_grad_norm=1"), "failed", "stop"),
        (("optimizer.learning_rate=1e9", "optimizer.max_grad_norm=null"), "failed", "optimizer.learning_rate"),
    ],
)
def test_the_page_of_a_failed_run_says_so(runs: Runs, overrides: tuple[str, ...], status: str, shown: str) -> None:
    run = runs.new_directory("run")
    fixed = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=20", "logging.observers.tensorboard=false")
    ended = runs.command(
        "train", str(TINY), *fixed, *overrides, f"logging.run_directory={run}", "logging.observers.report=true"
    ).wait()
    assert ended.code == 4, ended.stderr
    assert badge(run) == status
    assert shown in (run / "report.html").read_text() and RunFigures.read(run).status == "failed"


@pytest.mark.slow
def test_a_stopped_run_says_so_on_its_page(runs: Runs) -> None:
    run = runs.new_directory("run")
    fixed = (ON_ROWS, "parallel.num_processes=1", "train.max_steps=20", "logging.observers.tensorboard=false")
    ended = runs.command(
        "train", str(TINY), *fixed, f"logging.run_directory={run}", "logging.observers.report=true", "--until", "step 2"
    ).wait()
    assert ended.code == 75, ended.stderr
    assert badge(run) == "stopped"


def badge(run: Path) -> str:
    found = re.search(r'<span class="badge [a-z]+">([^<]*)</span>', (run / "report.html").read_text())
    assert found is not None
    return found[1]


def test_what_machines_did_is_drawn_where_it_is_something() -> None:
    samples = [
        {
            "cpu": 1.0,
            "waited": 0.02,
            "swap_in": 0,
            "gpu": {"clock": 1200, "limited": ["heat (driver)", "its power limit"]},
        },
        {"cpu": 1.0, "waited": 0.3, "swap_in": 0, "gpu": {"clock": 1700, "limited": ["heat (driver)"]}},
        {"cpu": 1.0, "gpu": "damaged"},
    ]
    lines = [LedgerLine(1, 110.0 + n, n, 100.0, {}, system) for n, system in enumerate(samples)]
    page = Page("machines")
    page.add("".join(format_machines([RankLedger(3, lines, {}, 12.0)], page)))
    shown = page.render()
    assert shown.index("chart-0") < shown.index("<summary>2 more charts</summary>") < shown.index("chart-1")
    assert "Cores used by each process" in shown and "Waiting for a core" in shown and "Clock of each GPU" in shown
    assert "Read from swap" not in shown and "Temperature of" not in shown
    assert "<td>Rank 3</td><td>heat (driver)</td><td>100%</td>" in shown
    assert "<td>Rank 3</td><td>its power limit</td><td>50%</td>" in shown
