"""Recorded steps: one trace of all ranks with the phases of every step, and the operators that took most time."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ON_ROWS, TINY, Runs, events
from trainwright.engine.policies.profiling import merge
from trainwright.errors import RequestError
from trainwright.observe.reports.figures import RunFigures
from trainwright.observe.reports.page import build_report
from trainwright.recipe.loading import load_recipe

SETTINGS = (ON_ROWS, "data.validation=null", "train.max_steps=6", "checkpoint.every=2")


def trace(run: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(run / "profile" / name, "rt", encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def phases(found: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """The events of the track of phases of a rank, in their order."""
    named = [e for e in found if e["name"] == "process_name" and e["args"]["name"] == f"rank {rank}"]
    (process,) = {event["pid"] for event in named}
    tracks = [e for e in found if e["name"] == "thread_name" and e["pid"] == process and e["args"]["name"] == "phases"]
    (track,) = {event["tid"] for event in tracks}
    own = [e for e in found if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, track)]
    return sorted(own, key=lambda event: float(event["ts"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow), pytest.param("zero3", 2, marks=pytest.mark.slow)],
)
def test_the_trace_has_the_phases_of_the_recorded_steps_of_every_rank(
    runs: Runs, strategy: str, processes: int
) -> None:
    spread = (f"parallel.strategy={strategy}", f"parallel.num_processes={processes}")
    run = runs.trained(*SETTINGS, "train.profile={steps: [3, 4]}", *spread)
    (profile,) = events(run, "profile")
    assert (profile["first"], profile["step"]) == (3, 4)
    assert [file.name for file in (run / "profile").iterdir()] == ["steps-3-4.json.gz"]
    found = trace(run, "steps-3-4.json.gz")
    times = {event["step"]: event["step_time"] for event in events(run, "step")}
    for rank in range(processes):
        own = phases(found, rank)
        steps = {int(step) for event in own for step in re.findall(r", step (\d+)", event["name"])}
        assert {3, 4} <= steps <= {2, 3, 4}, "recording begins at the end of step 2"
        for step in (3, 4):
            of_step = [event for event in own if f", step {step}" in event["name"]]
            names = [event["name"].split(",")[0] for event in of_step]
            assert names[0] == "data"
            assert {"data", "forward", "backward", "gradient norm", "optimizer"} <= set(names)
            seconds = sum(event["dur"] for event in of_step) / 1e6
            assert seconds >= 0.5 * times[step], "the phases are those of the whole step; on a busy machine with gaps"
        assert own[-1]["name"] == "profile writing, step 4", "not the phase that begins the recording"
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1, "phases do not overlap"
    begun = [phases(found, rank)[0]["ts"] for rank in range(processes)]
    assert max(begun) - min(begun) < 60e6, "the ranks have one clock"


def test_the_report_has_the_slowest_operators(runs: Runs) -> None:
    pytest.importorskip("vl_convert")
    spread = ("parallel.strategy=ddp", "parallel.num_processes=2")
    run = runs.trained(*SETTINGS, "train.profile={steps: [3, 4]}", *spread)
    (profile,) = events(run, "profile")
    seconds = [operator["seconds"] for operator in profile["operators"]]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < sum(operator["share"] for operator in profile["operators"]) <= 1 + 1e-9
    assert any(operator["name"] == "aten::mm" for operator in profile["operators"])
    assert not any("phase" in operator["name"] for operator in profile["operators"])
    page = build_report(RunFigures.read(run))
    assert "aten::mm" in page and "steps-3-4.json.gz" in page


@pytest.mark.slow
def test_a_resumed_run_records_the_steps_that_are_left(runs: Runs) -> None:
    spread = ("parallel.strategy=single", "parallel.num_processes=1")
    started = runs.train(*SETTINGS, "train.profile={steps: [2, 5]}", *spread)
    assert started.run is not None
    plain = runs.trained(*SETTINGS, *spread)
    ended = started.wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    losses = [event["loss"] for event in events(plain, "step")]
    assert [event["loss"] for event in events(started.run, "step")] == losses, "recording changes no loss"
    stopped = runs.new_directory("run")
    words = (
        "train",
        str(TINY),
        *SETTINGS,
        *spread,
        "train.profile={steps: [2, 5]}",
        "logging.observers.tensorboard=false",
    )
    ended = runs.command(*words, f"logging.run_directory={stopped}", "--until", "step 4").wait()
    assert ended.code == 75, ended.stdout + ended.stderr
    assert not (stopped / "profile").exists(), "the last of the steps has not come"
    runs.resumed(stopped)
    (profile,) = events(stopped, "profile")
    assert (profile["first"], profile["step"]) == (5, 5)
    assert [event["loss"] for event in events(stopped, "step")] == losses


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{steps: [4, 3]}", "first and last step, in order"),
        ("{steps: [1, 21]}", "at most 20 steps"),
        ("{steps: [0, 3]}", "train.profile.steps"),
        ("{steps: 3}", "train.profile.steps"),
        ("{steps: [2, 7]}", "train.max_steps is 6"),
        ("{step: [2, 7]}", "steps"),
    ],
)
def test_wrong_steps_are_refused_with_their_key(value: str, reason: str) -> None:
    with pytest.raises(RequestError, match=r"train\.profile") as refused:
        load_recipe(TINY, ["train.max_steps=6", f"train.profile={value}"])
    assert reason in str(refused.value)


def test_steps_behind_the_end_of_an_epoch_are_refused(runs: Runs) -> None:
    words = ("train.max_steps=null", "train.epochs=1", "train.profile={steps: [1000, 1001]}", ON_ROWS)
    ended = runs.train(*words, "parallel.num_processes=1").wait()
    assert ended.code == 2 and "train.profile.steps: ends at step 1001" in ended.stderr


def test_traces_are_moved_to_one_clock_and_to_processes_of_their_own(tmp_path: Path) -> None:
    files = []
    for rank, base in enumerate((1_000_000, 3_000_000)):
        own = [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 5.0, "dur": 1.0},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 6.0, "dur": 1.0},
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "phase: forward",
                "pid": 77,
                "tid": 77,
                "ts": 4.0,
                "dur": 9.0,
            },
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 77, "tid": 77, "ts": 5.0},
            {"ph": "f", "name": "ac2g", "id": 3, "pid": 0, "tid": 7, "ts": 6.0},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        ]
        files.append(tmp_path / f"rank-{rank}.json")
        files[-1].write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": own}))
    merge(files, tmp_path / "merged.json.gz")
    assert [file.name for file in tmp_path.iterdir()] == ["merged.json.gz"]
    with gzip.open(tmp_path / "merged.json.gz", "rt") as file:
        found = json.load(file)["traceEvents"]
    kernels = [event for event in found if event["name"] == "gemm"]
    assert [event["ts"] for event in kernels] == [6.0, 2006.0]
    assert len({event["pid"] for event in kernels}) == 2
    streams = [e for e in found if e["name"] == "thread_name" and e["args"]["name"] == "stream 7"]
    assert {(e["pid"], e["tid"]) for e in streams} == {(e["pid"], e["tid"]) for e in kernels}
    arrows = [event["id"] for event in found if event["ph"] in "sf"]
    assert len(set(arrows)) == 2, "arrows of different ranks are different"
