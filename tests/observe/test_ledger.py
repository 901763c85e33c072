"""Every second of a rank belongs to one category, also of launches that were killed and steps that were repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ON_ROWS, Runs
from trainwright.heartbeat import Heartbeat, Use
from trainwright.observe.ledger import LedgerWriter, by_category, rank_file, read_ledger


def line(launch: int, time: float, started: float, step: int = 1, **seconds: float) -> dict[str, Any]:
    return {
        **{"format": 1, "launch": launch, "rank": 0, "time": time, "step": step, "started": started},
        **{"seconds": seconds, "system": {"cpu": 1.0}},
    }


def written(run: Path, *lines: dict[str, Any] | str, rank: int = 0) -> Path:
    file = rank_file(run, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    file.write_text("\n".join(texts) + "\n")
    return run


def test_time_in_collectives_is_exchange_as_far_as_no_other_rank_was_waited_for() -> None:
    spent = {
        **{Use("forward", False): 3.0, Use("forward", True): 0.5, Use("gradient norm", True): 1.5},
        **{Use("evaluation", True): 2.0, Use("loading", False): 4.0, Use("something new", False): 0.25},
    }
    assert by_category(spent, behind=1.2) == pytest.approx(
        {
            **{"forward": 3.0, "exchange": 0.8, "waiting for ranks": 1.2, "evaluation": 2.0},
            **{"start: data and model": 4.0, "other": 0.25},
        }
    )
    assert by_category(spent, behind=9.0)["waiting for ranks"] == 2.0


def test_a_phase_within_another_is_not_part_of_it() -> None:
    own, uses = Heartbeat(None), []
    own.changed = lambda use, step, micro_batch: uses.append((use.phase, step, micro_batch))
    own.phase("backward", 3, 1)
    own.begin_within("compilation")
    own.end_within()
    own.phase("optimizer", 3)
    assert uses == [("backward", 3, 1), ("compilation", 3, 1), ("backward", 3, 1), ("optimizer", 3, -1)]


@pytest.mark.slow
def test_compilation_is_no_part_of_the_passes(runs: Runs) -> None:
    run = runs.trained(ON_ROWS, "train.max_steps=3", "data.validation=null", "train.compile=true")
    (ledger,) = read_ledger(run)
    assert ledger.seconds["compilation"] > ledger.seconds["forward"] + ledger.seconds["backward"]


def test_what_a_killed_launch_did_after_its_checkpoint_is_repeated_and_the_time_between_launches_stopped(
    tmp_path: Path,
) -> None:
    run = written(
        tmp_path,
        line(1, 110.0, 100.0, forward=4.0, **{"start: imports": 6.0}),
        line(1, 120.0, 100.0, forward=14.0, **{"start: imports": 6.0}),
        line(2, 150.0, 140.0, forward=8.0, **{"start: imports": 2.0}),
    )
    events = [
        {"event": "start", "time": 106.0, "resumed_from": None},
        *({"event": "step", "time": 106.0 + 2 * n, "step": n} for n in range(1, 8)),
        {"event": "start", "time": 142.0, "resumed_from": 5},
        *({"event": "step", "time": 142.0 + 2 * n, "step": 5 + n} for n in (1, 2)),
    ]
    (ledger,) = read_ledger(run, events)
    # Step 5 ended at 116: the 4 seconds until the last line are lost.
    assert ledger.seconds == pytest.approx({"forward": 18.0, "repeated": 4.0, "stopped": 20.0, "start: imports": 8.0})
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall) == 50.0
    assert ledger.goodput == pytest.approx(18.0 / 50.0)


def test_a_rewind_repeats_within_a_launch(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 120.0, 100.0, forward=20.0))
    events = [
        {"event": "start", "time": 100.0, "resumed_from": None},
        *({"event": "step", "time": 100.0 + n, "step": n} for n in range(1, 11)),
        {"event": "rewind", "time": 110.0, "resumed_from": 4, "left_out": [11]},
        *({"event": "step", "time": 106.0 + n, "step": n} for n in range(5, 11)),
    ]
    (ledger,) = read_ledger(run, events)
    assert ledger.seconds == pytest.approx({"forward": 14.0, "repeated": 6.0})


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    run = written(tmp_path, '{"format": 1, "launch": 1, "ra', line(1, 110.0, 100.0, forward=10.0), "[]", "{}")
    assert [(each.rank, dict(each.seconds)) for each in read_ledger(run)] == [(0, {"forward": 10.0})]
    assert read_ledger(tmp_path / "nowhere") == []


def test_a_writer_continues_the_file_of_an_earlier_launch_that_was_cut(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 110.0, 100.0, forward=10.0))
    with rank_file(run, 0).open("a") as file:
        file.write('{"format": 1, "laun')
    own = Heartbeat(None)
    with LedgerWriter(run, 0, own):
        own.phase("forward", 3, 1)
        own.phase("finished")
    (ledger,) = read_ledger(run)
    assert [(each.launch, each.step) for each in ledger.lines] == [(1, 1), (2, -1), (2, 3)]
    last = ledger.lines[-1]
    assert sum(last.seconds.values()) == pytest.approx(last.time - last.started, abs=0.01)
