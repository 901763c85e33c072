"""What was read of long runs is kept, and is not used for a file that is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.machine.cache import find_cache_root
from trainwright.observe import following
from trainwright.observe.following import RunFollower

START = {"event": "start", "time": 0.0, "max_steps": 10, "resumed_from": None}


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"event": "step", "time": 2.0 * number, "step": number, "loss": loss, "step_time": 1.0, "tokens": 7 * number}


def add(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(following, "_CACHED_FROM_BYTES", 1)
    found = tmp_path / "run"
    found.mkdir()
    evaluation = {"event": "evaluate", "time": 5.0, "step": 2, "metrics": {"loss": 2.0}}
    add(found, START, *(step(number) for number in range(1, 5)), evaluation)
    following.read_run(found)
    return found


def facts(run: RunFollower) -> Any:
    curve = run.curves.points("loss", "tokens", 100)
    told = (run.events, run.everything)
    return curve, told, run.start, run.last_step, run.goodput, run.damaged, run.changed, run.tokens_per_second


def test_only_what_was_added_is_read_again(run: Path) -> None:
    assert following.open_follower(run).count_unread_bytes() == 0
    fault = {"event": "fault", "time": 19.0, "step": 5}
    add(run, step(5, 9.0), fault, {**START, "resumed_from": 3, "time": 20.0})
    again = following.open_follower(run)
    assert 0 < again.count_unread_bytes() < 400
    again.look()
    whole = RunFollower(run)
    whole.look()
    assert facts(again) == facts(whole)


def test_half_a_line_is_kept_until_its_rest_is_written(run: Path) -> None:
    line = json.dumps(step(5)) + "\n"
    with (run / "events.jsonl").open("a") as file:
        file.write(line[:30])
    assert following.read_run(run).step == 4 and following.open_follower(run).half_written
    with (run / "events.jsonl").open("a") as file:
        file.write(line[30:])
    assert following.read_run(run).step == 5


@pytest.mark.parametrize("change", ["replaced", "shortened", "overwritten"])
def test_another_file_is_read_whole(run: Path, change: str) -> None:
    file = run / "events.jsonl"
    text = file.read_text()
    if change == "replaced":
        file.unlink()
        file.write_text(text.replace('"loss": 1.0', '"loss": 3.0'))
    elif change == "shortened":
        file.write_text("".join(line + "\n" for line in text.splitlines()[:3]))
    else:
        file.write_text(text.replace('"loss": 1.0', '"loss": 3.0'))  # the same file and size
    assert following.open_follower(run).read_bytes == 0


def test_a_damaged_cache_is_left_aside(run: Path) -> None:
    (file,) = (find_cache_root() / "events").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", b"\n", whole[:-8], whole[:40], whole.replace(b'"format": ', b'"format": 9')):
        file.write_bytes(damaged)
        assert following.open_follower(run).read_bytes == 0


def test_a_glance_has_the_beginning_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.observe.following._GLANCE_BYTES", 300)
    add(tmp_path, START, *(step(number) for number in range(1, 100)), {"event": "finish", "time": 200.0, "step": 99})
    found = RunFollower.from_glance(tmp_path)
    assert (found.start, found.step, found.damaged, found.goodput) == (START, 99, 0, None)
    assert found.finish is not None
