"""Which rank is late, from what all ranks do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.faults.hangs.judge import Conflict, RankState, choose_limit, find_conflict, judge
from trainwright.utils.heartbeat import FINISHED, WAITING, Beat, EnteredCollective, Heartbeat, Times, read


def call(number: int, name: str = "all_reduce", tensor: str = "float32[3]", line: str = "a.py:1") -> EnteredCollective:
    return EnteredCollective(number, name, tensor, line, same_shape=name == "all_reduce")


def beat(
    phase: str = "forward", *, entered: int = 5, waiting: bool = False, times: tuple[int, float] = (9, 2.0)
) -> Beat:
    collectives = {number: call(number) for number in range(1, entered + 1)}
    known = {} if not times[0] else {phase: Times(*times)}
    return Beat(1, 0.0, 100, entered, waiting, 7, 2, phase, call(entered), known, collectives)


def test_the_rank_that_has_not_entered_the_collective_is_late_not_those_that_wait_in_it() -> None:
    ranks = {
        0: RankState(beat("backward", entered=6, waiting=True), 300.0),
        1: RankState(beat("data"), 13.0),
        2: RankState(beat("backward", entered=6, waiting=True), 299.0),
    }
    found = judge(ranks)
    assert found is not None
    assert (found.ranks, found.phase, found.step) == ((1,), "data", 7)
    assert "rank 1 has made no progress for 13.0 s" in found.detail
    entered = "ranks 0, 2 have entered all_reduce of float32[3] at a.py:1 (number 6), which rank 1 has not"
    assert entered in found.detail


def test_nobody_is_late_while_the_rank_that_others_wait_for_is_within_its_time() -> None:
    waiting = RankState(beat("checkpoint", entered=6, waiting=True), 3000.0)
    assert judge({0: RankState(beat("checkpoint", times=(0, 0.0)), 3000.0), 1: waiting}) is None
    assert judge({0: RankState(beat("checkpoint", times=(5, 600.0)), 760.0), 1: waiting}) is None
    late = judge({0: RankState(beat("checkpoint", times=(5, 600.0)), 771.0), 1: waiting})
    assert late is not None and late.ranks == (0,)


@pytest.mark.parametrize(
    ("times", "seconds"),
    [((0, 0.0), 900.0), ((1, 8.0), 26.0), ((3, 8.0), 20.0), ((50, 0.001), 10.00125)],
)
def test_the_limit_follows_from_what_the_phase_has_taken(times: tuple[int, float], seconds: float) -> None:
    assert choose_limit(beat("forward", times=times)) == pytest.approx(seconds)


def test_the_first_time_of_a_phase_lasts_until_it_ends(tmp_path: Path) -> None:
    """What it does after its first collectives may still compile, or compute another metric."""
    own = Heartbeat(tmp_path / "rank-0")

    def now() -> float:
        own.seconds()  # counts all marks
        found = read(tmp_path / "rank-0")
        assert found is not None
        return choose_limit(found)

    own.phase("evaluation")
    for _ in range(5):
        own.enter("all_gather", "float32[3]", "a.py:1", counted=True, same_shape=True)
        own.leave()
        own.progress()
    own.begin_within("compilation")
    own.end_within()
    assert now() == 1800.0
    time.sleep(0.05)
    own.progress()
    own.phase("data")
    assert now() == 900.0
    own.phase("evaluation")
    own.progress()
    assert 10.1 <= now() < 11.0  # of the longest part of the time before
    time.sleep(0.2)
    own.progress()
    assert now() >= 10.4
    own.phase("data")
    assert 10.0 <= now() < 10.4


@pytest.mark.parametrize(
    ("before", "phase", "seconds"),
    [("profile", "profile writing", 3600.0), ("checkpoint", "copies", 7200.0), ("checkpoint", "finishing", 900.0)],
)
def test_work_that_comes_once_is_not_compared_with_shorter_work(
    tmp_path: Path, before: str, phase: str, seconds: float
) -> None:
    own = Heartbeat(tmp_path / "rank-0")
    for name in (before, "data", phase):
        own.phase(name)
    own.seconds()
    found = read(tmp_path / "rank-0")
    assert found is not None and choose_limit(found) == seconds


def test_a_compiled_model_may_compile_again() -> None:
    assert choose_limit(beat("forward"), compiled=True) == 302.5
    assert choose_limit(beat("optimizer"), compiled=True) == 12.5


def test_ranks_that_all_wait_in_one_collective_have_longer() -> None:
    inside = beat("backward", waiting=True)
    assert judge({0: RankState(inside, 119.0), 1: RankState(inside, 119.0)}) is None
    found = judge({0: RankState(inside, 121.0), 1: RankState(inside, 121.0)})
    assert found is not None and found.ranks == (0, 1)
    slow = replace(inside, times={WAITING: Times(20, 100.0)})
    assert judge({0: RankState(slow, 199.0), 1: RankState(slow, 199.0)}) is None


def test_a_rank_that_loads_is_waited_for_while_others_join() -> None:
    joins = replace(beat("joining", entered=0, waiting=True, times=(0, 0.0)), collective=None)
    loads = replace(beat("loading", entered=0, times=(0, 0.0)), collective=None)
    assert judge({0: RankState(loads, 7000.0), 1: RankState(joins, 7000.0)}) is None
    found = judge({0: RankState(loads, 7300.0), 1: RankState(joins, 7300.0)})
    assert found is not None and found.ranks == (0,) and "rank 1 waits in joining the process group" in found.detail


def test_a_suspended_rank_is_named_in_any_phase() -> None:
    found = judge(
        {0: RankState(beat(entered=6, waiting=True), 11.0), 1: RankState(beat(times=(0, 0.0)), 11.0, suspended=10.5)}
    )
    assert found is not None and found.ranks == (1,)
    assert "suspended by a signal (SIGSTOP)" in found.detail


def test_a_rank_that_has_finished_is_not_waited_for() -> None:
    done = replace(beat(), phase=FINISHED)
    assert judge({0: RankState(done, 9000.0)}) is None
    found = judge({0: RankState(done, 9000.0), 1: RankState(beat(), 20.0)})
    assert found is not None and found.ranks == (1,)


def test_different_collectives_are_named_by_rank_and_line() -> None:
    one, other = beat(), beat()
    other.collectives[4] = call(4, "broadcast", "float32[5]", "b.py:9")
    found = find_conflict({0: one, 1: one, 2: other})
    assert found == Conflict(
        (2,),
        "the ranks have entered different collectives: as number 4, rank 0 has entered all_reduce of float32[3] at "
        "a.py:1, and rank 2 broadcast of float32[5] at b.py:9",
    )
    other.collectives[4] = call(4, tensor="float64[3]")
    found = find_conflict({0: one, 1: one, 2: other})
    assert found is not None and "rank 2 all_reduce of float64[3]" in found.detail


def test_of_two_ranks_the_one_that_went_further_has_not_entered_what_the_other_waits_in() -> None:
    waits, further = beat(waiting=True), replace(beat("backward"), step=8)
    further.collectives[5] = call(5, tensor="float32[900]", line="b.py:9")
    found = judge({0: RankState(waits, 10.5), 1: RankState(further, 10.5)})
    assert found is not None and found.ranks == (1,)
    assert (
        "rank 0 has entered all_reduce of float32[3] at a.py:1, and rank 1 all_reduce of float32[900]" in found.detail
    )
    assert (found.conflict, found.exit_code) == (True, 4)
    assert judge({0: RankState(waits, 10.5), 1: RankState(further, 1.0)}) is None


def test_lines_may_differ_in_a_run_that_is_right() -> None:
    one, other = beat(), beat()
    other.collectives[5] = call(5, line="b.py:9")
    assert find_conflict({0: one, 1: other}) is None
    assert find_conflict({0: one, 1: other}, lines=True) is not None
    assert judge({0: RankState(one, 11.0), 1: RankState(other, 11.0)}) is None
    found = judge({0: RankState(one, 13.0), 1: RankState(other, 13.0)})
    assert found is not None and found.ranks == (0, 1)
    assert "ranks 0, 1 have made no progress" in found.detail
    assert "rank 1 has entered all_reduce of float32[3] at b.py:9" in found.detail
    assert (found.conflict, found.exit_code) == (False, 5)


def test_objects_may_have_another_size_on_each_rank() -> None:
    one, other = beat(), beat()
    one.collectives[4] = call(4, "all_gather_object", "uint8[3]")
    other.collectives[4] = call(4, "all_gather_object", "uint8[9]")
    assert find_conflict({0: one, 1: other}) is None
