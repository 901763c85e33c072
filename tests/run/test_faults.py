"""What a run has to be like after a fault: what is broken is seen, and a sample of the bench of faults holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment
from tests.support.runs import TINY, Runs
from trainwright.faults.drills import invariants
from trainwright.faults.drills.invariants import InvariantBroken

BENCH = Path(__file__).parents[2] / "bench"


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    file = run / "events.jsonl"
    events = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(event) + "\n" for event in events))


def changed(kind: str, step: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**e, **values} if (e["event"], e.get("step")) == (kind, step) else e for e in events]

    return change


@pytest.mark.slow
def test_a_trial_sees_what_is_lost_repeated_or_wrong(runs: Runs) -> None:
    good = runs.trained("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep_best=false")
    invariants.check_complete_and_same(good, runs.copied(good), exact=True)
    invariants.check_none_lost(good)
    loss = next(e["loss"] for e in invariants.read_lines(good) if e["event"] == "step" and e["step"] == 3)
    metrics = next(e["metrics"] for e in invariants.read_lines(good) if e["event"] == "evaluate" and e["step"] == 4)
    less_accurate = {**metrics, "token_accuracy": metrics["token_accuracy"] / 2}

    changes: list[tuple[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]] = [
        (
            "steps are 1, 2, 4, not 1-4",
            lambda events: [e for e in events if (e["event"], e.get("step")) != ("step", 3)],
        ),
        ("steps are 1-3, 3, 4, not 1-4", lambda events: [e for e in events for _ in range(1 + (e.get("step") == 3))]),
        ("step 3: loss is", changed("step", 3, loss=loss * (1 + 1e-14))),
        ("step 2: tokens is", changed("step", 2, tokens=1)),
        ("evaluate 4: loss is", changed("evaluate", 4, metrics={"loss": 0.5})),
        ("evaluate 4: token_accuracy is", changed("evaluate", 4, metrics=less_accurate)),
        ("not finished", changed("finish", 4, status="stopped")),
        ("evaluations are of steps", lambda events: [e for e in events if e["event"] != "evaluate"]),
        ("resumed from step 7", lambda events: [*events, {"event": "start", "resumed_from": 7}]),
    ]
    for message, change in changes:
        run = runs.copied(good)
        rewrite(run, change)
        with pytest.raises(InvariantBroken, match=message):
            invariants.check_complete_and_same(run, good, exact=True)
    rounded = runs.copied(good)
    rewrite(rounded, changed("step", 3, loss=loss * (1 + 1e-6)))
    rewrite(rounded, changed("evaluate", 4, metrics=less_accurate))  # of a token between two that are equally likely
    invariants.check_complete_and_same(rounded, good, exact=False)
    rewrite(rounded, changed("step", 3, loss=loss * (1 + 1e-4)))
    with pytest.raises(InvariantBroken, match="step 3: loss is"):
        invariants.check_complete_and_same(rounded, good, exact=False)
    lower = runs.copied(good)
    recipe = lower / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("mixed_precision: 'no'", "mixed_precision: bf16"))
    invariants.check_complete_and_same(rounded, lower, exact=False)
    rewrite(rounded, changed("step", 2, learning_rate=1e-9))
    with pytest.raises(InvariantBroken, match="step 2: learning_rate is"):
        invariants.check_complete_and_same(rounded, lower, exact=False)


@pytest.mark.parametrize(
    ("precision", "rounding"),
    [
        ("{mixed_precision: 'no'}", 1e-5),
        ("{mixed_precision: 'no', tf32: true}", 2e-2),
        ("{mixed_precision: bf16}", 2e-2),
        ("{mixed_precision: fp16}", 2e-2),
    ],
)
def test_lower_precisions_are_compared_to_their_own_rounding(tmp_path: Path, precision: str, rounding: float) -> None:
    (tmp_path / "recipe.yaml").write_text(f"include: {TINY}\ntrain: {precision}\n")
    assert invariants.look_up_rounding(tmp_path) == rounding


def test_a_trial_sees_checkpoints_and_models_that_are_not_whole(runs: Runs) -> None:
    good = runs.trained("train.max_steps=4", "checkpoint.every=2", "checkpoint.keep_best=false")
    newest = Path("checkpoints/step-00000004")
    for name in ("state.json", "manifest.json", "rank-00000.safetensors", "recipe.yaml"):
        run = runs.copied(good)
        data = (run / newest / name).read_bytes()
        (run / newest / name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        with pytest.raises(InvariantBroken, match=name):
            invariants.check_none_lost(run)
    for removed, message in ((newest / "state.json", "state.json"), (newest, "step 4 was written, and")):
        run = runs.copied(good)
        path = run / removed
        path.unlink() if path.is_file() else path.rename(run / "elsewhere")
        with pytest.raises(InvariantBroken, match=message):
            invariants.check_none_lost(run)
    run = runs.copied(good)
    weights = run / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InvariantBroken, match="not what its header says"):
        invariants.check_final(run, good, exact=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_sample_of_faults_holds(tmp_path: Path) -> None:
    """Ten faults of ten kinds, as `bench/faults.py` draws them."""
    where = ["--results", str(tmp_path / "faults.jsonl"), "--work", str(tmp_path / "work")]
    command = [sys.executable, str(BENCH / "faults.py"), "--trials", "10", "--seed", "1", "--jobs", "2", *where]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == 10
