"""A drill puts faults into short runs of a recipe, and tells what held, what did not and what could not be tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from tests.support.runs import ON_ROWS, TINY
from trainwright.api.drilling import DrillRequest, _drill
from trainwright.cli.main import app
from trainwright.drilling import phases
from trainwright.drilling.campaign import HELD, SKIPPED, Results, run_trials
from trainwright.drilling.faults import catalog  # noqa: F401
from trainwright.drilling.kinds import KINDS, Case, Kind, Trial, Worlds, schedule
from trainwright.drilling.report import cells, notes, rows_of, shown, table
from trainwright.drilling.scene import measures_of
from trainwright.drilling.setting import Setting
from trainwright.drilling.shortened import phases_of, shortened, spreads_of
from trainwright.errors import RequestError

SPREADS = (("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3))
CASES = {name: kind.cases(SPREADS, phases.ALL) for name, kind in KINDS.items()}


def request(directory: Path, **values: Any) -> DrillRequest:
    plain = {"seed": 0, "tries": None, "minutes": None, "kinds": (), "strategies": (), "processes": (), "jobs": 1}
    return DrillRequest(TINY, (ON_ROWS,), directory, **{**plain, "resume": False, **values})


def test_a_schedule_is_the_seeds() -> None:
    trials = schedule(3, 300, CASES)
    assert len(trials) == len(set(trials)) == 300
    assert trials == schedule(3, 300, CASES) != schedule(4, 300, CASES)
    # Each kind comes once before any comes twice, and cases repeat only when all have been drawn.
    assert {trial.kind for trial in trials[: len(KINDS)]} == set(KINDS)
    assert set(trials) <= set(schedule(3, 600, CASES))
    for name, cases in CASES.items():
        drawn = [trial.case for trial in schedule(3, len(cases), {name: cases})]
        assert sorted(map(str, drawn)) == sorted(map(str, cases))


def test_kinds_are_tried_where_they_can_be() -> None:
    assert {case.spread[1] for case in CASES["connections that are cut"]} == {2, 3}
    assert {case.spread for case in CASES["a flipped bit of a weight"]} == {("ddp", 2), ("ddp", 3)}
    assert not KINDS["a flipped bit of a weight"].cases((("single", 1),), phases.ALL)
    assert {case.phase for case in KINDS["connections that are cut"].cases(SPREADS, (phases.STEP,))} == {phases.STEP}


def test_the_recipe_is_shortened_and_spread() -> None:
    recipe = shortened(TINY, ["train.max_steps=null", "train.epochs=3"])
    assert (recipe.train.max_steps, recipe.train.epochs, recipe.checkpoint.every) == (phases.STEPS, None, 6)
    assert spreads_of(recipe, ["single", "zero3"], [1, 3]) == (("single", 1), ("zero3", 1), ("zero3", 3))
    assert set(spreads_of(recipe, [], [])) >= {("single", 1), ("ddp", 2), ("fsdp", 2)}
    assert phases.GENERATION not in phases_of(recipe) and phases.EVALUATION in phases_of(recipe)
    assert phases.EVALUATION not in phases_of(shortened(TINY, ["data.validation=null"]))
    with pytest.raises(RequestError, match="unknown; one of single, ddp"):
        spreads_of(recipe, ["dpp"], [])
    with pytest.raises(RequestError, match="single supports none"):
        spreads_of(recipe, ["single"], [2])


def test_a_directory_that_exists_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "drill").mkdir()
    result = CliRunner().invoke(app, ["drill", str(TINY), ON_ROWS, "--output", str(tmp_path / "drill")])
    assert isinstance(result.exception, RequestError) and "exists; choose another" in str(result.exception)
    with pytest.raises(RequestError, match="no drill to continue"):
        _drill(request(tmp_path / "drill", resume=True), False)
    assert not list((tmp_path / "drill").iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kinds": ("earthquake",)}, "--kinds earthquake: no kind of fault has such a name; known are: .*SIGKILL"),
        ({"tries": 0}, "--tries 0: expected more than 0"),
        ({"kinds": ("connections*",), "processes": (1,)}, "need several processes"),
    ],
)
def test_bad_requests_create_nothing(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        _drill(request(tmp_path / "drill", **values), False)
    assert not (tmp_path / "drill").exists()


def test_a_kind_that_cannot_be_tried_here_is_skipped_and_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Kind("no mounts", lambda scene: None, Worlds.ONE, ("",), ("",), 1.0, 60.0, lambda: "mounts are refused")
    monkeypatch.setitem(KINDS, lacking.name, lacking)
    trials = schedule(0, 2, {lacking.name: lacking.cases(SPREADS, ())})
    results = Results(tmp_path / "trials.jsonl")
    for line in run_trials(trials, Setting({}, SPREADS, tmp_path, {}), tmp_path / "trials"):
        results.add(line)
    found = results.of(trials)
    assert [line["verdict"] for line in found.values() if line] == [SKIPPED, SKIPPED]
    row = rows_of(found)[-1].as_json()
    assert (row["tries"], row[HELD], row[SKIPPED]) == (0, 0, 2)
    assert "not tried here: no mounts: mounts are refused" in table(found)
    assert all(line is None for line in results.of(schedule(1, 2, {lacking.name: [Case(SPREADS[0])]})).values())


def test_the_table_has_medians_and_what_is_left() -> None:
    kind = next(iter(KINDS))
    trials = [Trial(kind, n, 0, Case(("single", 1))) for n in range(4)]
    values = [{"detection": 1.0, "recovery": 4.0, "lost": 2}, {"detection": 3.0, "recovery": 8.0, "lost": 4}, {}]
    lines = [{"verdict": HELD, "why": "", **value} for value in values]
    found = dict(zip(trials, [*lines, None], strict=True))
    whole = table(found)
    assert "2.0 s" in whole and "6.0 s" in whole and "3 steps" in whole and "1 of 4 trials are left" in whole
    narrow = shown(cells(found), notes(found), 80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert "3 steps" in narrow and "1 of 4 trials are left" in narrow and "broken" not in narrow and "broken" in whole


def test_what_is_measured_begins_with_the_fault() -> None:
    def event(name: str, time: float, **values: Any) -> dict[str, Any]:
        return {"event": name, "time": time, **values}

    steps = [event("step", float(n), step=n) for n in range(1, 6)]
    resumed = [event("start", 9.0, resumed_from=2), event("step", 11.0, step=3)]
    assert measures_of([*steps, *resumed], 5.5, [6.0]) == {"detection": 0.5, "lost": 3, "recovery": 5.5}
    told = event("fault", 5.75, kind="hang", rank=0)
    assert measures_of([*steps, told, event("rewind", 7.0, resumed_from=4)], 5.5, []) == {"detection": 0.25, "lost": 1}
    assert measures_of(steps, 5.5, [4.0]) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_holds_and_can_be_continued(tmp_path: Path) -> None:
    """Five minutes of faults, in two pieces."""
    output = tmp_path / "drill"
    settings = {"output": output, "processes": (1, 2), "jobs": 2}
    first = tw.drill(TINY, ON_ROWS, **settings, minutes=2.5)
    assert first.held and first.left
    with pytest.raises(RequestError, match="another recipe"):
        tw.drill(TINY, ON_ROWS, "train.seed=5", **settings, resume=True)
    second = tw.drill(TINY, ON_ROWS, **settings, resume=True, minutes=2.5)
    assert second.held and second.rows[-1]["tries"] > first.rows[-1]["tries"]
    assert json.loads((output / "drill.json").read_text())["kinds"] == list(second.rows)
