"""A drill puts faults into short runs of a recipe, and tells what held, what did not and what could not be tried."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.commands import PATIENCE, started, wait_for
from tests.support.runs import ON_ROWS, ROOT, TINY
from trainwright.cli.main import app
from trainwright.errors import RequestError
from trainwright.faults.drills import damage, kills, watched_commands  # noqa: F401
from trainwright.faults.drills.damage import compute_disk_size
from trainwright.faults.drills.invariants import (
    InvariantBroken,
    Skipped,
    Undisturbed,
    check_checkpoints_complete,
    check_complete_and_same,
)
from trainwright.faults.drills.kinds import (
    KINDS,
    DrillTrial,
    FaultCase,
    FaultKind,
    Worlds,
    move_trials,
    schedule_trials,
    select_kinds,
)
from trainwright.faults.drills.operations import (
    BROKEN,
    HELD,
    MISSED,
    SKIPPED,
    CampaignResults,
    Drill,
    DrillRequest,
    _drill,
    _list_trials,
    build_rows,
    format_cells,
    format_drill_table,
    format_results,
    list_notes,
    run_trials,
)
from trainwright.faults.drills.trial_environment import Scene, compute_measures, measure_undisturbed_seconds
from trainwright.faults.drills.trial_settings import (
    TrialSettings,
    build_setting,
    list_phases,
    list_spreads,
    load_shortened_recipe,
    read_refusals,
)
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.schema import FaultsSection

SPREADS = (("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("zero2", 2))
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if "objectives:" not in path.read_text())
CASES = {name: kind.list_cases(SPREADS, watched_commands.ALL) for name, kind in KINDS.items()}


def request(directory: Path, **values: Any) -> DrillRequest:
    plain = {"seed": 0, "tries": None, "minutes": None, "kinds": (), "strategies": (), "processes": (), "jobs": 1}
    return DrillRequest(TINY, (ON_ROWS,), directory, **{**plain, "resume": False, **values})


def test_a_schedule_is_the_seeds() -> None:
    trials = schedule_trials(3, 300, CASES)
    assert len(trials) == len(set(trials)) == 300
    assert trials == schedule_trials(3, 300, CASES) != schedule_trials(4, 300, CASES)
    # Each kind comes once before any comes twice, and cases repeat only when all have been drawn.
    assert {trial.kind for trial in trials[: len(KINDS)]} == set(KINDS)
    assert set(trials) <= set(schedule_trials(3, 600, CASES))
    for name, cases in CASES.items():
        drawn = [trial.case for trial in schedule_trials(3, len(cases), {name: cases})]
        assert sorted(map(str, drawn)) == sorted(map(str, cases))


def test_a_drill_tries_one_of_each_kind_unless_told_otherwise(tmp_path: Path) -> None:
    recipe = load_shortened_recipe(TINY, [])
    for spreads in (SPREADS, (("single", 1),)):
        trials = _list_trials(request(tmp_path), recipe, spreads)
        kinds = [name for name, kind in KINDS.items() if kind.list_cases(spreads, list_phases(recipe))]
        assert sorted(trial.kind for trial in trials) == sorted(kinds)
    for asked, count in (({"tries": 3}, 3), ({"kinds": ("SIGKILL*",)}, len(select_kinds(["SIGKILL*"])))):
        assert len(_list_trials(request(tmp_path, **asked), recipe, SPREADS)) == count


def test_kinds_are_tried_where_they_can_be() -> None:
    assert {case.spread[1] for case in CASES["connections that are cut"]} == {2, 3}
    # Where the optimizer state is sharded, the next step replaces a wrong weight.
    assert {case.spread for case in CASES["a flipped bit of a weight"]} == {("ddp", 2), ("ddp", 3)}
    assert not KINDS["a flipped bit of a weight"].list_cases((("single", 1),), watched_commands.ALL)
    assert {case.phase for case in KINDS["connections that are cut"].list_cases(SPREADS, (watched_commands.STEP,))} == {
        watched_commands.STEP
    }


def test_the_recipe_is_shortened_and_spread() -> None:
    recipe = load_shortened_recipe(TINY, ["train.max_steps=null", "train.epochs=3"])
    assert (recipe.train.max_steps, recipe.train.epochs, recipe.checkpoint.every) == (watched_commands.STEPS, None, 6)
    assert list_spreads(recipe, ["single", "zero3"], [1, 3]) == (("single", 1), ("zero3", 1), ("zero3", 3))
    assert set(list_spreads(recipe, [], [])) >= {("single", 1), ("ddp", 2), ("fsdp", 2)}
    assert watched_commands.GENERATION not in list_phases(recipe) and watched_commands.EVALUATION in list_phases(recipe)
    # Texts are generated without validation rows, and learning histories are evaluated without.
    generating = load_shortened_recipe(TINY, ["data.validation=null", "evaluate.prompts=[a, b]"])
    assert watched_commands.GENERATION in list_phases(generating) and watched_commands.EVALUATION not in list_phases(
        generating
    )
    assert watched_commands.GENERATION not in list_phases(load_shortened_recipe(TINY, ["data.validation=null"]))
    distilling = load_shortened_recipe(ROOT / "recipes" / "algorithm_distillation" / "tiny.yaml", [])
    assert watched_commands.EVALUATION in list_phases(distilling) and watched_commands.GENERATION not in list_phases(
        distilling
    )
    assert generating.evaluate.every == distilling.evaluate.every == watched_commands.EVALUATES_EVERY
    with pytest.raises(RequestError, match="unknown; one of single, ddp"):
        list_spreads(recipe, ["dpp"], [])
    with pytest.raises(RequestError, match="single supports none"):
        list_spreads(recipe, ["single"], [2])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_can_be_shortened(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the recipes' relative paths start
    recipe = load_shortened_recipe(path, [])
    setting = build_setting(recipe, tmp_path / "recipe.yaml", list_spreads(recipe, [], []), tmp_path / "shared")
    for strategy, processes in setting.spreads:
        spread = (f"parallel.strategy={strategy}", f"parallel.num_processes={processes}", *setting.halvable)
        assert load_recipe(setting.files["recipe.yaml"], spread).train.max_steps == watched_commands.STEPS


@pytest.mark.parametrize(
    ("overrides", "off"),
    [
        (["model.dropout=0.1"], {"model.dropout=0"}),
        (["model.dropout=0"], set()),
        # GPT-2 has dropout by default, which the recipe does not show.
        (
            ["model.dropout=null", "model.config={model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2}"],
            {"model.dropout=0"},
        ),
        # What is called so elsewhere is not the model's.
        (["model.dropout=0", "model.config.dropout=null"], set()),
        (
            ["model.dropout=0", "model.adapter={type: lora, rank: 2, dropout: 0.1}"],
            {"model.adapter.dropout=0"},
        ),
    ],
)
def test_dropout_is_off_where_smaller_micro_batches_are_compared(
    overrides: list[str], off: set[str], tmp_path: Path
) -> None:
    setting = build_setting(
        load_shortened_recipe(TINY, overrides), tmp_path / "recipe.yaml", (("single", 1),), tmp_path / "shared"
    )
    assert set(setting.halvable) == off


def test_a_warm_up_and_a_decay_fit_in_the_short_run() -> None:
    decaying = "optimizer.schedule=warmup_stable_decay"
    for asked, wanted in (
        ((2000, 50_000), (6, 6)),
        ((3, 5), (3, 5)),
        ((0.25, 0.5), (0.25, 0.5)),
        ((0.9, 1000), (0.9, 2)),
        ((1000, 0.99), (0, 0.99)),
    ):
        lengths = [
            f"optimizer.{key}={value}" for key, value in zip(("warmup_steps", "decay_steps"), asked, strict=True)
        ]
        optimizer = load_shortened_recipe(TINY, ["train.max_steps=1000000", decaying, *lengths]).optimizer
        assert (optimizer.warmup_steps, optimizer.decay_steps) == wanted
    assert (
        load_shortened_recipe(TINY, ["train.max_steps=5000", "optimizer.warmup_steps=2000"]).optimizer.warmup_steps == 6
    )


def test_a_trial_expects_nothing_of_the_recipes_own_faults_and_writes_to_its_directory_only() -> None:
    recipe = load_shortened_recipe(
        TINY,
        [
            "train.profile.steps=[100, 105]",
            "train.max_steps=200",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            "data.pack_length=null",
            "parallel.num_processes=4",
            "train.gradient_accumulation_steps=1",
            "checkpoint.every=auto",
            "checkpoint.copies=['s3://bucket/runs']",
            "faults={restarts: off, on_hang: stop, on_non_finite: skip, on_loss_spike: stop, on_corruption: stop}",
            "faults.mean_time_between=6 h",
            "faults.replay_every=5",
            "logging.observers={wandb: true, prometheus: {address: 9100}, report: true}",
        ],
    )
    assert recipe.faults == FaultsSection() and recipe.train.profile is None
    assert recipe.train.gradient_accumulation_steps == "auto" and recipe.train.replan == "offer"
    assert recipe.checkpoint.copies == [] and not any(recipe.logging.observers.values())


def test_a_recipe_that_cannot_be_trained_is_refused_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="longer than the 50 steps"):
        load_shortened_recipe(TINY, ["train.max_steps=50", "optimizer.warmup_steps=100"])


def test_commands_have_the_trials_own_cache_and_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {"HOME": "home", "TMPDIR": "temporary", "TRAINWRIGHT_CACHE": "cache"}
    for name, directory in users.items():
        monkeypatch.setenv(name, str(tmp_path / directory))
    recipe = load_shortened_recipe(TINY, [])
    setting = build_setting(recipe, tmp_path / "recipe.yaml", (("single", 1),), tmp_path / "shared")
    scene = Scene(DrillTrial(next(iter(KINDS)), 0, 0, FaultCase(("single", 1))), tmp_path / "trial", setting)
    code = f"import json, os; print(json.dumps({{name: os.environ[name] for name in {list(users)}}}))"

    def seen() -> dict[str, str]:
        found: dict[str, str] = json.loads(scene.wait(scene.command(sys.executable, "-c", code)).text)
        return found

    assert seen() == {
        "HOME": str(tmp_path / "home"),  # for tokens and models
        "TMPDIR": str(tmp_path / "trial" / "tmp"),
        "TRAINWRIGHT_CACHE": str(tmp_path / "shared" / "cache"),
    }
    scene.use_own_cache()
    assert seen()["TRAINWRIGHT_CACHE"] == str(tmp_path / "trial" / "cache")


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
    lacking = FaultKind(
        "no mounts", lambda scene: None, Worlds.ONE, ("",), ("",), 1.0, 60.0, lambda: "mounts are refused"
    )
    monkeypatch.setitem(KINDS, lacking.name, lacking)
    trials = schedule_trials(0, 2, {lacking.name: lacking.list_cases(SPREADS, ())})
    results = CampaignResults(tmp_path / "trials.jsonl")
    for line in run_trials(trials, TrialSettings({}, SPREADS, tmp_path, {}), tmp_path / "trials"):
        results.add(line)
    found = results.of(trials)
    assert [line["verdict"] for line in found.values() if line] == [SKIPPED, SKIPPED]
    row = build_rows(found)[-1].as_json()
    assert (row["tries"], row[HELD], row[SKIPPED]) == (0, 0, 2)
    assert "not tried here: no mounts: mounts are refused" in format_drill_table(found)
    assert all(
        line is None for line in results.of(schedule_trials(1, 2, {lacking.name: [FaultCase(SPREADS[0])]})).values()
    )


def undisturbed(scene: Scene, size: int = 0) -> None:
    """Make the undisturbed run of a trial: a file of so many bytes, without any on the disk."""

    def finished(run: Path, overrides: object) -> None:
        run.mkdir()
        with (run / "model.safetensors").open("wb") as file:
            file.truncate(size)
        run.with_name("seconds.json").write_text('{"start": 1.0, "all": 3.0}')

    scene._make_run_once("undisturbed", (), finished)


@pytest.mark.parametrize(("size", "disk"), [(2**20, 96 * 2**20), (100 * 2**20, 200 * 2**20), (2**43, None)])
def test_a_disk_that_fills_up_has_room_for_the_run_without_a_fault(tmp_path: Path, size: int, disk: int | None) -> None:
    setting = build_setting(load_shortened_recipe(TINY, []), tmp_path / "recipe.yaml", SPREADS, tmp_path / "shared")
    scene = Scene(DrillTrial("a disk that fills up", 0, 0, FaultCase(("single", 1))), tmp_path / "trial", setting)
    undisturbed(scene, size)
    if disk is not None:
        assert compute_disk_size(scene) == disk
        return
    with pytest.raises(Skipped, match=r"in memory, of which .* free"):
        compute_disk_size(scene)


def test_texts_that_are_generated_without_an_evaluation_are_seen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def write(*events: dict[str, Any]) -> None:
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    start, last = {"event": "start"}, {"event": "step", "step": watched_commands.EVALUATES_EVERY}
    for evaluates in (True, False):
        write(start, last)
        sight = watched_commands.build_phase_check(
            run, watched_commands.GENERATION, random.Random(0), evaluates=evaluates
        )
        assert sight() is not evaluates
        write(start, last, {"event": "evaluate", "step": watched_commands.EVALUATES_EVERY})
        assert sight()


def test_a_loss_near_zero_may_differ_by_the_rounding_of_the_largest(tmp_path: Path) -> None:
    undisturbed = {"event": "step", "step": 1, "loss": 0.0, "metrics": {"forget_loss": 3.0}}
    for loss, holds in ((2e-5, True), (4e-5, False)):
        runs = []
        for name, step in (("one", {**undisturbed, "loss": loss}), ("other", undisturbed)):
            runs.append(tmp_path / f"{name}-{loss}")
            (runs[-1] / "final").mkdir(parents=True)
            (runs[-1] / "recipe.yaml").write_text(
                dump_recipe(load_shortened_recipe(TINY, ["train.mixed_precision=no"]))
            )
            lines = [step, {"event": "finish", "status": "finished"}]
            (runs[-1] / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with (
            contextlib.nullcontext()
            if holds
            else pytest.raises(InvariantBroken, match=r"loss is 4e-05, undisturbed 0\.0")
        ):
            check_complete_and_same(*runs, exact=False)


def test_a_verdict_that_was_cut_loses_no_other(tmp_path: Path) -> None:
    results = CampaignResults(tmp_path / "trials.jsonl")
    lines = [{"seed": 0, "trial": f"kind/{n}", "case": "single on 1", "verdict": HELD} for n in range(3)]
    results.add(lines[0])
    with results.path.open("a") as file:
        file.write(json.dumps(lines[1])[:-9])
    results.add(lines[2])
    assert list(results.read().values()) == [lines[0], lines[2]]
    with results.path.open("a") as file:
        file.write(json.dumps(lines[1])[:-9] + json.dumps(lines[1]) + "\n")  # as earlier versions have gone on
    assert list(results.read().values()) == [lines[0], lines[2]]


@pytest.mark.slow
def test_a_run_to_be_resumed_has_whole_checkpoints_whatever_its_recipe_writes_in_the_background(tmp_path: Path) -> None:
    recipe = load_shortened_recipe(TINY, [ON_ROWS, "checkpoint.background=true"])
    setting = build_setting(recipe, tmp_path / "recipe.yaml", SPREADS, tmp_path / "shared")
    scene = Scene(DrillTrial(next(iter(KINDS)), 0, 0, FaultCase(("single", 1))), tmp_path / "trial", setting)
    scene.provide_stopped_run()
    assert check_checkpoints_complete(scene.run) == [6, 12, 18]
    assert load_recipe(scene.run / "recipe.yaml").checkpoint.background is False


def test_a_drill_begins_with_a_strategy_that_can_be_trained(tmp_path: Path) -> None:
    spreads = ("single", 2), ("single", 1)
    setting = build_setting(
        load_shortened_recipe(TINY, [ON_ROWS]), tmp_path / "recipe.yaml", spreads, tmp_path / "shared"
    )
    refused, good = (DrillTrial(next(iter(KINDS)), n, 0, FaultCase(spread)) for n, spread in enumerate(spreads))
    undisturbed(Scene(good, tmp_path / "made", setting))
    assert (
        measure_undisturbed_seconds(setting, [refused]) == measure_undisturbed_seconds(setting, [refused, good]) == 3.0
    )
    # It is not started again, also where a run would be resumed with it.
    assert read_refusals(setting, spreads).keys() == {("single", 2)}
    (place,) = (file.parent for file in setting.shared.rglob("failure.json"))
    (place / "output.txt").write_text("not started again")
    assert not Scene(good, tmp_path / "scene", setting).can_train(("single", 2))
    assert (place / "output.txt").read_text() == "not started again"
    # Where nothing can be trained, the next command tries again.
    only = replace(setting, spreads=spreads[:1])
    with pytest.raises(Undisturbed, match="exit code 2") as found:
        measure_undisturbed_seconds(only, [refused])
    assert found.value.code == 2 and not read_refusals(setting, spreads)


def test_trials_move_from_what_the_recipe_cannot_be_trained_with() -> None:
    trials = schedule_trials(3, 100, CASES)
    refused = {("ddp", 2), ("single", 1)}
    found = move_trials(trials, refused, CASES)
    assert [trial.name for trial in found] == [trial.name for trial in trials]
    kept = [(one, other) for one, other in zip(trials, found, strict=True) if one.case.spread not in refused]
    assert len(kept) < len(trials) and all(one == other for one, other in kept)
    there = [name for name, cases in CASES.items() if {case.spread for case in cases} - refused]
    assert all((trial.case.spread in refused) is (trial.kind not in there) for trial in found)
    assert all(trial.case in CASES[trial.kind] for trial in found)
    # What has been moved stays when more are refused, unless it is on them: it may have a verdict.
    more = refused | {("fsdp", 2)}
    again = move_trials(trials, more, CASES)
    assert all(one == other for one, other in zip(found, again, strict=True) if one.case.spread not in more)


@pytest.mark.slow
def test_a_drill_that_is_interrupted_leaves_no_process_behind(tmp_path: Path) -> None:
    output = tmp_path / "drill"
    command = ("-m", "trainwright", "drill", str(TINY), ON_ROWS, "--processes", "2", "--output", str(output))
    with started(*command, cwd=tmp_path) as drill:
        wait_for(lambda: list(output.glob("undisturbed/runs/*/scratch/events.jsonl")))
        own = str(tmp_path).encode()
        assert any(own in variables for variables in _of_trials())
        drill.send_signal(signal.SIGINT)
        assert drill.wait(PATIENCE) == 75
    assert not [variables for variables in _of_trials() if own in variables]


def _of_trials() -> Iterator[bytes]:
    """The environment variables of every process of a trial."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if b"TRAINWRIGHT_FAULT_TRIAL=" in (variables := file.read_bytes()):
                yield variables


def test_the_table_has_medians_and_what_is_left() -> None:
    kind = next(iter(KINDS))
    trials = [DrillTrial(kind, n, 0, FaultCase(("single", 1))) for n in range(4)]
    values = [{"detection": 1.0, "recovery": 4.0, "lost": 2}, {"detection": 3.0, "recovery": 8.0, "lost": 4}, {}]
    lines = [{"verdict": HELD, "why": "", **value} for value in values]
    found = dict(zip(trials, [*lines, None], strict=True))
    whole = format_drill_table(found)
    assert "2.0 s" in whole and "6.0 s" in whole and "3 steps" in whole and "1 of 4 trials are left" in whole
    narrow = format_results(format_cells(found), list_notes(found), 80)
    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert "3 steps" in narrow and "1 of 4 trials are left" in narrow and "broken" not in narrow and "broken" in whole


@pytest.mark.parametrize(
    ("verdicts", "holds"),
    [
        ([HELD, SKIPPED], True),
        ([HELD, BROKEN], False),
        ([HELD, MISSED], False),
        ([MISSED, MISSED], False),
        ([SKIPPED], False),
        ([], False),
    ],
)
def test_a_drill_has_held_if_all_that_could_be_tried_has(tmp_path: Path, verdicts: list[str], holds: bool) -> None:
    trials = [DrillTrial(next(iter(KINDS)), n, 0, FaultCase(("single", 1))) for n in range(len(verdicts))]
    found = {trial: {"verdict": verdict, "why": ""} for trial, verdict in zip(trials, verdicts, strict=True)}
    rows = tuple(row.as_json() for row in build_rows(found))
    assert Drill(tmp_path, rows, 0, format_cells(found), list_notes(found)).held is holds


def test_what_is_measured_begins_with_the_fault() -> None:
    def event(name: str, time: float, **values: Any) -> dict[str, Any]:
        return {"event": name, "time": time, **values}

    steps = [event("step", float(n), step=n) for n in range(1, 6)]
    resumed = [event("start", 9.0, resumed_from=2), event("step", 11.0, step=3)]
    assert compute_measures([*steps, *resumed], 5.5, [6.0]) == {"detection": 0.5, "lost": 3, "recovery": 5.5}
    told = event("fault", 5.75, kind="hang", rank=0)
    assert compute_measures([*steps, told, event("rewind", 7.0, resumed_from=4)], 5.5, []) == {
        "detection": 0.25,
        "lost": 1,
    }
    assert compute_measures(steps, 5.5, [4.0]) == {}
