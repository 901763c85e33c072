"""Runs under a plan that is wrong: a machine file says that two processes are far faster than any machine is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import MACHINE
from tests.support.measured import measurement
from tests.support.runs import ON_ROWS, TINY, EventRecord, Runs, read_events
from trainwright.doctor.calibrate_worker import build_curve
from trainwright.machine.measured.calibration import Calibration, Exchanged, ProcessRates, to_json

STEPS, SAVED = 18, 14
COMMON = (
    ON_ROWS,
    f"train.max_steps={STEPS}",
    f"checkpoint.every={SAVED}",
    "evaluate.every=null",
    "train.mixed_precision=no",
    "train.activation_checkpointing=none",
    "train.compile=false",
    "logging.observers.tensorboard=false",
)


def _wrong() -> Calibration:
    found = measurement({(1, 1): 1e12, (1, 2): 1e12, (2, 1): 1e15})
    return replace(found, settings=tuple(_without_all_else(setting) for setting in found.settings))


def _without_all_else(setting: ProcessRates) -> ProcessRates:
    """Nothing but products takes time."""
    curves = dict(setting.curves)
    for name in ("traffic/fp32/copy", "traffic/fp32/elementwise", "traffic/fp32/reduction", "optimizer", "loss/fp32"):
        curves[name] = build_curve(name, [{"sizes": (2**21,), "seconds": 1e-7, "held_out": False}])
    for direction in ("forward", "backward"):
        name = f"attention/fp32/{direction}"
        curves[name] = build_curve(name, [{"sizes": (128,), "seconds": 1e-14, "held_out": False}])
    for precision in ("bf16",):
        curves = {name: curve for name, curve in curves.items() if precision not in name}
    return replace(setting, curves=curves, launch=1e-10, exchange=Exchanged(waited=1e-9, factor=1e-6))


def train(runs: Runs, tmp_path: Path, *overrides: str) -> tuple[list[EventRecord], str]:
    machine, run = tmp_path / "machine.json", tmp_path / "run"
    machine.write_text(json.dumps({**json.loads(MACHINE.read_text()), "measurement": to_json(_wrong())}))
    arguments = ("train", str(TINY), *COMMON, f"logging.run_directory={run}", *overrides)
    ended = runs.command(*arguments, TRAINWRIGHT_MACHINE=str(machine)).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    return list(read_events(run / "events.jsonl")), ended.stdout


def of_kind(events: list[EventRecord], kind: str) -> list[dict[str, Any]]:
    return [dict(event) for event in events if event["event"] == kind]


def losses(events: list[EventRecord]) -> list[float]:
    return [event["loss"] for event in of_kind(events, "step")]


def test_a_run_whose_plan_proves_wrong_goes_on_in_another_way_as_the_same_run(runs: Runs, tmp_path: Path) -> None:
    events, said = train(runs, tmp_path, "train.replan=auto")
    first, second = of_kind(events, "start")
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert second["resumed_from"] == SAVED and second["strategy"] == "single"
    (notice,) = of_kind(events, "notice")
    assert notice["kind"] == "plan" and notice["measured"] > 1.3 * notice["predicted"] and notice["cause"]
    assert "the plan expected" in said and "parallel.num_processes=1" in said and "continuing with single on 1" in said
    assert [event["status"] for event in of_kind(events, "finish")] == ["stopped", "finished"]
    assert [event["step"] for event in of_kind(events, "step")] == list(range(1, STEPS + 1))
    reference = losses(read_events(runs.trained(*COMMON, "parallel.num_processes=1") / "events.jsonl"))
    assert all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(losses(events), reference, strict=True))
    resolved = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "num_processes: 1" in resolved and not (tmp_path / "run" / "replan.json").exists()


@pytest.mark.slow
def test_without_being_told_to_it_only_offers_the_faster_way(runs: Runs, tmp_path: Path) -> None:
    events, said = train(runs, tmp_path)
    assert [event["world_size"] for event in of_kind(events, "start")] == [2]
    (notice,) = of_kind(events, "notice")
    assert notice["offer"]["num_processes"] == 1 and "parallel.strategy=single" in said


@pytest.mark.slow
def test_the_plan_of_a_run_is_by_the_counted_lengths_of_its_examples(runs: Runs, tmp_path: Path) -> None:
    rows = [{"question": "?" * 10, "answer": "é" * (10 + index)} for index in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    more = ("data.validation=null", "evaluate.every=null", "evaluate.prompts=[]", "logging.observers.tensorboard=false")
    asked = (str(TINY), f"data.train={tmp_path / 'rows.jsonl'}", "train.max_steps=2", *more)
    estimated = json.loads(runs.command("plan", *asked, "--json").wait().stdout)["assumptions"]
    assert any("from the characters" in one for one in estimated)
    ended = runs.command("train", *asked, f"logging.run_directory={run}").wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    plan = json.loads((run / "plan.json").read_text())
    assert not any("characters" in one for one in plan["assumptions"])
    # Bytes: two for every é; and what the chat template writes around the turns.
    assert plan["workload"]["longest_document"] > 10 + 2 * 41
