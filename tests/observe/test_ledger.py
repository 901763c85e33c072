"""Every second of a rank belongs to one category, also of launches that were killed and steps that were repeated."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_for
from tests.support.runs import ON_ROWS, Runs
from trainwright.observe.ledger import LedgerWriter, count_ends, locate_rank_file, read_ledger, sum_by_category
from trainwright.utils.heartbeat import Heartbeat, Use


def line(launch: int, time: float, started: float, step: int = 1, **seconds: float) -> dict[str, Any]:
    return {
        **{"format": 1, "launch": launch, "rank": 0, "time": time, "step": step, "started": started},
        **{"seconds": seconds, "system": {"cpu": 1.0}},
    }


def written(run: Path, *lines: dict[str, Any] | str, rank: int = 0) -> Path:
    file = locate_rank_file(run, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    file.write_text("\n".join(texts) + "\n")
    return run


def test_time_in_collectives_is_exchange_as_far_as_no_other_rank_was_waited_for() -> None:
    spent = {
        **{Use("forward", False): 3.0, Use("forward", True): 0.5, Use("gradient norm", True): 1.5},
        **{Use("evaluation", True): 2.0, Use("loading", False): 4.0, Use("something new", False): 0.25},
    }
    assert sum_by_category(spent, behind=1.2) == pytest.approx(
        {
            **{"forward": 3.0, "exchange": 0.8, "waiting for ranks": 1.2, "evaluation": 2.0},
            **{"start: data and model": 4.0, "other": 0.25},
        }
    )
    assert sum_by_category(spent, behind=9.0)["waiting for ranks"] == 2.0


def test_what_a_checkpoint_has_taken_from_steps_is_its_time() -> None:
    spent = {Use("forward", False): 3.0, Use("backward", False): 6.0, Use("checkpoint", False): 0.5}
    assert sum_by_category(spent, behind=0.0, slowed=1.8) == pytest.approx(
        {"forward": 2.4, "backward": 4.8, "checkpoint": 2.3}
    )
    assert sum_by_category(spent, behind=0.0, slowed=-1.0) == pytest.approx(
        {"forward": 3.0, "backward": 6.0, "checkpoint": 0.5}
    )


@pytest.mark.parametrize(
    ("phase", "category"),
    [
        *(("rewinding", "checkpoint"), ("copies", "checkpoint"), ("finishing", "logging")),
        *(("profile", "profile"), ("profile writing", "profile")),
    ],
)
def test_phases_outside_of_steps_have_a_category(phase: str, category: str) -> None:
    assert sum_by_category({Use(phase, waiting=False): 5.0}, behind=0.0) == {category: 5.0}


def test_the_launcher_counts_what_came_after_the_last_line_as_the_end(tmp_path: Path) -> None:
    now = time.time()
    written(tmp_path, line(1, now - 1.0, now - 5.0, forward=3.0, end=1.0))
    written(tmp_path, line(1, now - 100.0, now - 105.0, forward=5.0), rank=1)  # of a rank that could not write its last
    count_ends(tmp_path, range(3))
    ended, cut = read_ledger(tmp_path)
    assert ended.seconds["forward"] == 3.0 and ended.seconds["end"] >= 2.0
    assert sum(ended.seconds.values()) == pytest.approx(ended.wall, abs=0.01)
    assert cut.seconds == {"forward": 5.0}


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
    assert ledger.trained == pytest.approx(18.0 / 50.0)


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


def steps(first: int, last: int, at: float, each: float = 2.0) -> list[dict[str, Any]]:
    """The events of steps that end one after another from a time on."""
    return [{"event": "step", "time": at + each * (n - first + 1), "step": n} for n in range(first, last + 1)]


def started(at: float, resumed_from: int | None) -> dict[str, Any]:
    return {"event": "start", "time": at, "resumed_from": resumed_from}


def test_what_is_undone_twice_is_repeated_once(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 130.0, 100.0, forward=30.0))
    events = [started(100.0, None), *steps(1, 5, 100.0), {"event": "rewind", "time": 110.0, "resumed_from": 4}]
    events += [*steps(5, 7, 110.0), {"event": "rewind", "time": 116.0, "resumed_from": 2}, *steps(3, 9, 116.0)]
    (ledger,) = read_ledger(run, events)
    # Since step 2, at 104: of these 12 seconds, 2 had been repeated already.
    assert ledger.seconds == pytest.approx({"forward": 18.0, "repeated": 12.0})


def test_a_launch_that_resumes_before_the_one_that_it_follows_repeats_what_both_did(tmp_path: Path) -> None:
    run = written(
        tmp_path,
        line(1, 102.0, 100.0, **{"start: imports": 2.0}),
        line(1, 112.0, 100.0, forward=10.0, **{"start: imports": 2.0}),
        line(2, 122.0, 120.0, **{"start: imports": 2.0}),
        line(2, 130.0, 120.0, forward=8.0, **{"start: imports": 2.0}),
        line(3, 143.0, 140.0, **{"start: imports": 3.0}),  # it ended before anything was trained
        line(4, 170.0, 150.0, forward=16.0, **{"start: imports": 4.0}),
    )
    events = [started(102.0, None), *steps(1, 5, 102.0)]
    events += [started(122.0, 4), *steps(5, 8, 122.0)]  # step 5 is repeated
    events += [started(154.0, 2), *steps(3, 10, 154.0)]  # the checkpoint of step 4 was damaged
    (ledger,) = read_ledger(run, events)
    expected = {"forward": 4.0 + 16.0, "repeated": 6.0 + 8.0, "stopped": 8.0 + 10.0 + 7.0, "start: imports": 11.0}
    assert ledger.seconds == pytest.approx(expected)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall) == 70.0


def test_the_launch_that_resumes_loses_nothing_however_seldom_it_writes(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 112.0, 100.0, forward=12.0), line(2, 150.0, 120.0, forward=26.0, other=4.0))
    (ledger,) = read_ledger(run, [started(100.0, None), *steps(1, 6, 100.0), started(124.0, 5), *steps(6, 9, 124.0)])
    assert ledger.seconds == pytest.approx({"forward": 36.0, "repeated": 2.0, "stopped": 8.0, "other": 4.0})


def test_a_step_that_has_not_ended_is_repeated_too(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 113.0, 100.0, forward=13.0), line(2, 150.0, 130.0, forward=20.0))
    killed = [started(100.0, None), *steps(1, 5, 100.0), {"event": "restart", "time": 113.5, "after_step": 5}]
    (ledger,) = read_ledger(run, [*killed, started(131.0, 5)])
    assert ledger.seconds == pytest.approx({"forward": 30.0, "repeated": 3.0, "stopped": 17.0})


def test_a_launch_that_ended_by_itself_lost_nothing(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 113.0, 100.0, forward=13.0), line(2, 150.0, 130.0, forward=20.0))
    stopped = [started(100.0, None), *steps(1, 5, 100.0), {"event": "finish", "time": 111.0, "step": 5}]
    (ledger,) = read_ledger(run, [*stopped, started(131.0, 5)])
    assert ledger.seconds == pytest.approx({"forward": 33.0, "stopped": 17.0})


def test_ranks_that_leave_and_come_back_were_stopped_meanwhile(tmp_path: Path) -> None:
    launches = {0: (100.0, 130.0, 160.0), 1: (100.0, 160.0), 2: (100.0, 160.0)}
    for rank, begun in launches.items():
        written(tmp_path, *(line(n, at + 20.0, at, forward=18.0, data=2.0) for n, at in enumerate(begun, 1)), rank=rank)
    # On three ranks up to step 9, of which 8 and 9 are lost; on one up to a stop at step 14; on three again.
    events = [started(102.0, None), *steps(1, 9, 102.0), started(132.0, 7), *steps(8, 14, 132.0)]
    events += [{"event": "finish", "time": 148.0, "step": 14}, started(162.0, 14), *steps(15, 20, 162.0)]
    ledgers = read_ledger(tmp_path, events)
    assert [dict(each.seconds) for each in ledgers] == [
        pytest.approx({"forward": 54.0 - 3.6, "data": 6.0 - 0.4, "repeated": 4.0, "stopped": 20.0}),
        *2 * [pytest.approx({"forward": 36.0 - 3.6, "data": 4.0 - 0.4, "repeated": 4.0, "stopped": 40.0})],
    ]
    for each in ledgers:
        assert sum(each.seconds.values()) == pytest.approx(each.wall) == 80.0


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    run = written(tmp_path, '{"format": 1, "launch": 1, "ra', line(1, 110.0, 100.0, forward=10.0), "[]", "{}")
    assert [(each.rank, dict(each.seconds)) for each in read_ledger(run)] == [(0, {"forward": 10.0})]
    assert read_ledger(tmp_path / "nowhere") == []


def test_a_writer_continues_the_file_of_an_earlier_launch_that_was_cut(tmp_path: Path) -> None:
    run = written(tmp_path, line(1, 110.0, 100.0, forward=10.0))
    with locate_rank_file(run, 0).open("a") as file:
        file.write('{"format": 1, "laun')
    own = Heartbeat(None)
    with LedgerWriter(run, 0, own):
        own.phase("forward", 3, 1)
        own.phase("finished")
    (ledger,) = read_ledger(run)
    assert [(each.launch, each.step) for each in ledger.lines] == [(1, 1), (2, -1), (2, 3)]
    last = ledger.lines[-1]
    assert sum(last.seconds.values()) == pytest.approx(last.time - last.started, abs=0.01)


@pytest.mark.slow
def test_samples_are_of_whole_intervals(tmp_path: Path) -> None:
    """The first and the last line follow another one by milliseconds, of which cores and waiting say nothing."""
    counted = iter(range(1, 100))
    with LedgerWriter(tmp_path, 0, Heartbeat(None), lambda: {"cpu": next(counted)}):
        wait_for(
            lambda: (
                locate_rank_file(tmp_path, 0).is_file() and locate_rank_file(tmp_path, 0).read_text().count("\n") >= 2
            )
        )
    (ledger,) = read_ledger(tmp_path)
    first, *between, last = [each.system for each in ledger.lines]
    assert first == last == {} and between == [{"cpu": number + 1} for number in range(len(between))] and between
