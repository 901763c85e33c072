"""What a run writes to events.jsonl."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from tests.support.commands import wait_for
from tests.support.runs import ON_ROWS, Runs
from trainwright.engine.event_reader import read_events
from trainwright.engine.events import Evaluate, EventLog, Finish, Generate
from trainwright.errors import RequestError

FIELDS = {
    "start": "task world_size strategy mixed_precision device micro_batch_size gradient_accumulation_steps "
    "global_batch_size parameters trainable_parameters resumed_from",
    "step": "step loss grad_norm learning_rate tokens target_tokens tokens_per_second step_time memory_bytes "
    "resident_bytes",
    "evaluate": "step metrics seconds",
    "generate": "step prompt text",
    "checkpoint": "step path seconds blocked_seconds slowed_seconds",
    "finish": "status step seconds path measured",
}


@pytest.mark.slow
def test_events_have_their_fields_and_no_others(runs: Runs) -> None:
    run = runs.trained(
        "parallel.num_processes=2",
        "train.max_steps=4",
        "checkpoint.every=2",
        "evaluate.every=2",
        "evaluate.prompts=[Who]",
        "evaluate.max_new_tokens=4",
    )
    text = (run / "events.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        fields = {"event", "time", *FIELDS[line["event"]].split()}
        # The first of them may say more: what was chosen, and what only this task or strategy knows.
        assert set(line) >= fields if line["event"] == "start" else set(line) == fields, line
    assert [line["event"] for line in lines] == (
        ["start", "evaluate", "generate"] + ["step", "step", "evaluate", "generate", "checkpoint"] * 2 + ["finish"]
    )
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    numbers = re.findall(r"[ \[](-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+))(?=[,}\]])", text)
    assert len(numbers) > 20
    assert all(repr(float(number)) == number for number in numbers)


def test_start_says_the_batch_as_it_is_run(runs: Runs) -> None:
    run = runs.trained("train.micro_batch_size=auto", "train.gradient_accumulation_steps=4", "train.max_steps=2")
    start, *_, finish = read_events(run / "events.jsonl")
    assert isinstance(start["micro_batch_size"], int) and start["accumulation_asked"] == 4
    assert finish["measured"]["steps"] == 0 and finish["measured"]["threads"] == 1
    assert start["predicted"]["calibrated"] in (0.0, 1.0)


def test_what_is_announced_reaches_the_observers_and_not_the_file(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", [seen.append])
    log.announce("evaluating", 7)
    log.close()
    assert [(event["event"], event["doing"], event["step"]) for event in seen] == [("phase", "evaluating", 7)]
    assert not (tmp_path / "events.jsonl").read_text()


def test_floats_are_written_to_the_last_digit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, 2.0**53 + 2, math.nan, math.inf, -math.inf]
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(Evaluate(step=1, metrics={str(i): value for i, value in enumerate(values)}, seconds=1.0))
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    read = list(event["metrics"].values())
    assert read[:5] == values[:5]
    assert math.isnan(read[5]) and read[6:] == [math.inf, -math.inf]


def test_a_cut_last_line_is_dropped_before_anything_is_added(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for cut in ("", '{"event": "step", "step": 2, "lo'):
        path.write_text('{"event": "start"}\n{"event": "step", "step": 1}\n' + cut)
        log = EventLog(path)
        log.emit(Finish(status="finished", step=1, seconds=1.0, path=None, measured={}))
        log.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["start", "step", "finish"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_disk_that_fills_up_reaches_the_observers_and_not_the_run(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    log = EventLog(tmp_path / "events.jsonl", [seen.append])
    log.emit(Generate(step=1, prompt="", text=""))
    assert log._file is not None
    descriptor, full = log._file.fileno(), os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(descriptor)
    os.dup2(full, descriptor)
    log.emit(Generate(step=2, prompt="", text=""))
    log.emit(Generate(step=3, prompt="", text=""))
    assert [event["step"] for event in seen] == [1, 2, 3]
    assert [("No space left" in event.get("write_error", "")) for event in seen] == [False, True, True]
    log.close()
    for opened in (full, kept):
        os.close(opened)


def test_a_run_stopped_before_its_first_step_leaves_nothing(runs: Runs) -> None:
    started = runs.train("parallel.num_processes=1", "data.limit=300")
    assert started.run is not None
    wait_for(started.run.exists, every=0.001)
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert ended.code == 75 and "nothing was kept" in ended.stderr
    assert not started.run.exists()


def test_a_log_with_a_directory_in_its_place_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(RequestError, match=r"events\.jsonl: a run cannot be written there: Is a directory"):
        EventLog(tmp_path / "events.jsonl")


@pytest.mark.slow
def test_answers_that_are_cut_in_training_are_noticed_and_stored(runs: Runs) -> None:
    asked = ("data.validation=10", "evaluate.metrics=[exact_match]", "evaluate.max_new_tokens=2", ON_ROWS)
    run = runs.trained("parallel.num_processes=2", "train.max_steps=2", "evaluate.every=2", *asked)
    events = read_events(run / "events.jsonl")
    evaluations = [event for event in events if event["event"] == "evaluate"]
    assert [event["metrics"]["exact_match"] for event in evaluations] == [0.0, 0.0]
    count = None
    for event in evaluations:
        samples = [json.loads(line) for line in Path(event["answers"]).read_text().splitlines()]
        count = len(samples)
        assert all(sample["complete"] is False and sample["reference"] and sample["prompt"] for sample in samples)
        low, high = event["intervals"]["exact_match"]
        expected = binomtest(0, count).proportion_ci(0.95, "wilson")
        assert (low, high) == pytest.approx((expected.low, expected.high))
    (notice,) = [event["message"] for event in events if event["event"] == "notice"]
    assert f"all {count} answers were cut at 2 tokens" in notice and "evaluate.max_new_tokens" in notice
    assert "exact_match of step 0" in notice
