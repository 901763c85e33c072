"""What a worker reports is what a reader of its file finds, in bounded space."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import (
    CALLS,
    COLLECTIVES,
    FINISHED,
    PHASES,
    Beat,
    DeviceEvent,
    EnteredCollective,
    Heartbeat,
    Use,
    read,
)


class Worker:
    """A heartbeat and what a reader finds in its file."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "rank-0"
        self.own = Heartbeat(self.file)

    @property
    def beat(self) -> Beat:
        found = read(self.file)
        assert found is not None
        return found

    def exchange(self, tensor: str, *, counted: bool = True) -> None:
        self.own.enter("all_reduce", tensor, "a.py:1", counted=counted, same_shape=True)
        self.own.leave()


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_a_reader_finds_what_the_worker_does(worker: Worker) -> None:
    own = worker.own
    begun = worker.beat
    assert (begun.phase, begun.step, begun.micro_batch, begun.collective, begun.times) == ("start", -1, -1, None, {})
    own.phase("backward", 2**40, 7)
    own.enter("all_reduce", "float32[3]", "a.py:1", counted=True, same_shape=True)
    beat = worker.beat
    assert (beat.phase, beat.step, beat.micro_batch) == ("backward", 2**40, 7)
    assert (beat.waiting, beat.entered, beat.marks) == (True, 1, begun.marks + 2)
    assert beat.collective == EnteredCollective(1, "all_reduce", "float32[3]", "a.py:1", same_shape=False)
    assert beat.collectives == {1: EnteredCollective(1, "all_reduce", "float32[3]", "a.py:1", same_shape=True)}
    own.leave()
    own.begin_within("compilation")
    assert (worker.beat.waiting, worker.beat.phase, worker.beat.step) == (False, "compilation", 2**40)
    own.end_within()
    assert (worker.beat.phase, worker.beat.step, worker.beat.micro_batch) == ("backward", 2**40, 7)


def test_a_collective_of_some_ranks_is_shown_and_not_numbered(worker: Worker) -> None:
    worker.exchange("float32[1]")
    worker.own.enter("all_gather", "int64[2]", "b.py:2", counted=False, same_shape=False)
    beat = worker.beat
    assert beat.collective is not None and (beat.collective.name, beat.collective.line) == ("all_gather", "b.py:2")
    assert (beat.entered, list(beat.collectives)) == (1, [1])


@pytest.mark.parametrize("shapes", [1, 7, COLLECTIVES, CALLS, CALLS + 1, 3 * CALLS])
def test_the_last_collectives_are_right_among_any_number_of_calls(worker: Worker, shapes: int) -> None:
    for number in range(4 * CALLS):
        worker.exchange("often" if number % 3 else f"float32[{number % shapes}]")
        tensors = {n: each.tensor for n, each in worker.beat.collectives.items()}
        first = max(0, number + 1 - COLLECTIVES)
        assert tensors == {n + 1: "often" if n % 3 else f"float32[{n % shapes}]" for n in range(first, number + 1)}


def test_phases_that_the_file_has_no_space_for_share_the_last_place(worker: Worker) -> None:
    for number in range(2 * PHASES):
        worker.own.phase(f"phase {number}")
    assert worker.beat.phase == "another phase"
    worker.own.phase("phase 3")
    assert worker.beat.phase == "phase 3"
    assert Use("another phase", waiting=False) in worker.own.seconds()
    worker.own.phase(FINISHED)
    assert worker.beat.phase == FINISHED


def test_the_first_times_are_known_at_once_and_later_ones_within_a_second_or_when_asked_for(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = worker.own.started
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
    for count in range(4):
        worker.own.phase("forward")
        now += 0.1
        worker.own.phase("backward")
        assert worker.beat.times["forward"].count == count + 1
    worker.own.phase("forward")
    now += 0.6
    worker.own.phase("backward")
    assert worker.beat.times["forward"].longest == pytest.approx(0.1)
    now += 0.5
    worker.own.phase("forward")
    assert worker.beat.times["forward"].longest == pytest.approx(0.6)
    now += 0.75
    worker.own.phase("backward")
    assert worker.own.seconds()[Use("forward", waiting=False)] == pytest.approx(0.4 + 0.6 + 0.75)
    assert worker.beat.times["forward"].longest == pytest.approx(0.75)


class Clock:
    """The clock of a heartbeat, moved by hand."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.now = worker, worker.own.started
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now))

    def takes(self, seconds: float) -> float:
        """End a phase after so many seconds; return the longest time that its file has."""
        self.now += seconds
        self.worker.own.phase("forward")
        self.worker.own.seconds()
        return self.worker.beat.times["forward"].longest


@pytest.fixture
def clock(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(worker, monkeypatch)
    worker.own.phase("forward")
    return clock


def test_the_longest_time_in_the_file_is_never_too_short_and_5_percent_too_long_at_most(clock: Clock) -> None:
    longest = 0.0
    for number in range(200):
        seconds = 0.01 + 0.1 * (number % 29 == 5) + (0.3 if number == 1 else 0.0)
        found = clock.takes(seconds)
        longest = max(seconds, longest * (0.5 if number < 4 else 1.0))
        assert longest <= found * (1 + 1e-9)
        assert found <= longest * 1.0501


def test_a_slow_time_that_is_rare_is_usual_for_hours_and_a_thousand_times(clock: Clock) -> None:
    for _ in range(4):
        clock.takes(3.0)
    clock.takes(45.0)
    assert {clock.takes(3.0) for _ in range(1000)} == {45.0}
    for _ in range(10000):  # of a time of hours, as after Ctrl-Z, this is true too, and no longer
        found = clock.takes(3.0)
    assert found == pytest.approx(3.0)


def test_a_slow_time_of_a_phase_that_is_seldom_stays_usual(clock: Clock) -> None:
    for _ in range(4):
        clock.takes(3.0)
    clock.takes(45.0)
    assert {clock.takes(30.0) for _ in range(900)} == {45.0}


def test_waiting_is_counted_apart_from_the_phase_and_known_at_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = worker.own.started
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
    worker.own.phase("backward", 1)
    now += 0.1
    with worker.own.inside():
        now += 0.2
        assert worker.own.waited() == pytest.approx(0.2) and worker.own.in_collectives == 0.0
    assert worker.own.waited() == pytest.approx(0.2) == worker.own.in_collectives
    now += 0.3
    worker.own.phase("optimizer", 1)
    seconds = worker.own.seconds()
    assert seconds[Use("backward", waiting=True)] == pytest.approx(0.2)
    assert seconds[Use("backward", waiting=False)] == pytest.approx(0.4)


def test_a_file_of_another_layout_is_none(worker: Worker) -> None:
    data = worker.file.read_bytes()
    worker.file.write_bytes(b"\xff" * (len(data) - 4096))
    assert read(worker.file) is None


def test_only_the_thread_that_trains_uses_its_device(worker: Worker) -> None:
    """In another thread, CUDA would use GPU 0 whatever the rank's own is."""
    asked: list[int] = []

    class Event:
        def query(self) -> bool:
            asked.append(threading.get_ident())
            return True

        def elapsed_time(self, end: DeviceEvent) -> float:
            return 1000.0

    worker.own.follow_device(Event)
    for name in ("forward", "backward") * 6:  # the last ones are not counted yet
        worker.own.phase(name)
    other = threading.Thread(target=worker.own.seconds)
    other.start()
    other.join()
    assert worker.own.seconds()[Use("forward", waiting=False)] > 1.0
    assert set(asked) == {threading.get_ident()}
