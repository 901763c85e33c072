"""Following a run's events as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.engine.event_reader import find_curve_part
from trainwright.observe.following import Curves, RunFollower
from trainwright.observe.reports.charts import build_curve_charts
from trainwright.observe.reports.figures import RunFigures


def start(**more: Any) -> dict[str, Any]:
    return {"event": "start", "time": 0.0, "max_steps": 10, "resumed_from": None, **more}


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"event": "step", "time": 2.0 * number, "step": number, "loss": loss, "step_time": 1.0, "tokens": 7 * number}


def add(run: Path, *events: dict[str, Any] | str) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    add(tmp_path, start(), step(1))
    assert follower.look() and follower.step == 1
    assert not follower.look()
    line = json.dumps(step(2)) + "\n"
    add(tmp_path, line[:20])
    assert follower.look() and follower.step == 1  # half a line waits for its rest
    add(tmp_path, line[20:])
    assert follower.look() and follower.step == 2
    assert (follower.damaged, follower.goodput) == (0, 0.5)
    assert follower.curves.points("loss", "tokens", 100)[0] == [7.0, 14.0]


def test_steps_that_are_done_again_count_once(tmp_path: Path) -> None:
    add(tmp_path, start(), *(step(number, 5.0) for number in range(1, 6)))
    add(tmp_path, start(resumed_from=3, time=20.0), step(4, 1.0))
    follower = RunFollower(tmp_path)
    follower.look()
    places, losses, _, _ = follower.curves.points("loss", "step", 100)
    assert (places, losses) == ([1, 2, 3, 4], [5, 5, 5, 1])
    assert follower.curves.points("loss", "seconds", 100)[0] == [1, 2, 3, 4]
    assert follower.finish is None


def test_the_fault_before_a_restart_is_still_told(tmp_path: Path) -> None:
    fault = {"event": "fault", "time": 11.0, "step": 5, "kind": "process", "rank": 1, "detail": "", "action": "restart"}
    add(tmp_path, start(), *(step(number) for number in range(1, 6)), fault, start(resumed_from=3, time=20.0))
    follower = RunFollower(tmp_path)
    follower.look()
    assert [event["event"] for event in follower.everything] == ["start", "fault", "start"]
    assert [event["event"] for event in follower.events] == ["start", "start"]


def test_damage_is_counted_and_left_out(tmp_path: Path) -> None:
    add(tmp_path, start(), "\0\0{half\n", '["a list"]\n', '{"event": "step", "time": 1}\n', step(1))
    follower = RunFollower(tmp_path)
    follower.look()
    assert (follower.step, follower.damaged) == (1, 3)


def test_a_run_that_takes_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    add(tmp_path, start(), step(1), step(2))
    follower = RunFollower(tmp_path)
    follower.look()
    (tmp_path / "events.jsonl").unlink()
    add(tmp_path, start(), step(1))
    follower.look()
    assert follower.step == 1


@pytest.mark.parametrize("most", [5000, 300])
def test_long_curves_keep_their_extremes(most: int) -> None:
    curves = Curves()
    for number in range(1, 20_001):
        curves.add(step(number, 99.0 if number == 12_345 else 2.0), float(number))
    places, means, lows, highs = curves.points("loss", "step", most)
    assert len(places) <= min(most, 4096) and places[-1] == 20_000
    assert max(value for value in highs if value is not None) == 99.0
    assert min(value for value in lows if value is not None) == 2.0
    assert max(value for value in means if value is not None) < 99.0
    assert curves.cut(9_000) <= 9_000


def test_nan_is_a_gap(tmp_path: Path) -> None:
    add(tmp_path, start(), {**step(1), "loss": "nan"}, step(2))
    follower = RunFollower(tmp_path)
    follower.look()
    assert follower.curves.points("loss", "step", 10)[1] == [None, 1.0]


def test_lost_steps_are_gaps_where_the_report_has_them(tmp_path: Path) -> None:
    """Also of a metric that both steps beside the gap have, and for a state that is restored; not of a rare metric."""
    numbers = [1, 2, 3, 6, 7, 8, 20]
    metrics = {n: {"each": float(n), **({"rare": 1.0} if n in (2, 8) else {})} for n in numbers}
    (tmp_path / "recipe.yaml").write_text("task: sft\n")
    add(tmp_path, start(), *({**step(n), "metrics": metrics[n]} for n in numbers))
    follower = RunFollower(tmp_path)
    follower.look()
    follower = RunFollower.from_state(tmp_path, follower.state())
    expected = [1, 2, 3, None, 6, 7, 8, None, 20]
    assert follower.curves.points("loss", "step", 100)[0] == expected
    assert follower.metrics["each"].points("each", "step", 100)[1] == expected
    assert follower.metrics["rare"].points("rare", "step", 100)[0] == [2, 8]
    assert [
        index for index, row in enumerate(zip(*follower.curves.points("loss", "step", 4), strict=True)) if not row[1]
    ]
    rows = build_curve_charts([RunFigures.read(tmp_path)])[0]["data"]["values"]
    parts = {row["step"]: row["part"] for row in rows}
    assert [find_curve_part(follower.curves.breaks, number) for number in numbers] == [
        parts[number] for number in numbers
    ]


def test_a_step_that_is_done_again_after_a_gap_closes_it(tmp_path: Path) -> None:
    add(tmp_path, start(), step(1), step(4), start(resumed_from=1, time=20.0), step(2), step(3))
    follower = RunFollower(tmp_path)
    follower.look()
    assert follower.curves.points("loss", "step", 100)[0] == [1, 2, 3]


def test_a_long_run_that_goes_back_has_no_gap(tmp_path: Path) -> None:
    """Its steps are in buckets, which are cut as a whole."""
    add(tmp_path, start(), *map(step, range(1, 5001)), start(resumed_from=4003, time=1e5), step(4004))
    follower = RunFollower(tmp_path)
    follower.look()
    assert follower.step == 4004 and None not in follower.curves.points("loss", "step", 5000)[0]
