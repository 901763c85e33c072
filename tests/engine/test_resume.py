"""A run that was ended in any way goes on as if it had not been."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import ON_ROWS, Runs, column, difference, events


def processes(count: int) -> str:
    return f"parallel.num_processes={count}"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def killed(runs: Runs, *overrides: str, step: int, later: float = 0.0) -> Path:
    """A run all of whose processes were killed after this step."""
    started = runs.train(*overrides)
    started.wait_for_step(step)
    time.sleep(later)
    started.kill()
    assert started.wait().code == -signal.SIGKILL
    assert started.run is not None and not (started.run / "final").exists()
    return started.run


def resumed_from(run: Path) -> int | None:
    step: int | None = events(run, "start")[-1]["resumed_from"]
    return step


@pytest.mark.parametrize(
    ("count", "seed", "elsewhere"),
    [(2, 2, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0, 2), (2, 1, 3), (3, 3, 1)))],
)
def test_killed_at_a_random_moment(runs: Runs, count: int, seed: int, elsewhere: int | None) -> None:
    uninterrupted = runs.trained(processes(count), ON_ROWS)
    chance = random.Random(seed)
    step = chance.randint(4, 22)
    run = killed(runs, processes(count), ON_ROWS, "checkpoint.every=3", step=step, later=chance.random() * 0.05)
    copy = runs.copied(run) if elsewhere else None

    runs.resumed(run)
    assert (resumed_from(run) or 0) >= step - 3
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "target_tokens"):
        assert column(run, name) == column(uninterrupted, name), name
    assert events(run, "evaluate")[-1]["metrics"] == events(uninterrupted, "evaluate")[-1]["metrics"]
    assert same_weights(run, uninterrupted)

    if copy and elsewhere:
        runs.resumed(copy, processes(elsewhere))
        assert [start["world_size"] for start in events(copy, "start")] == [count, elsewhere]
        assert column(copy, "tokens") == column(uninterrupted, "tokens")
        assert difference(column(copy, "loss"), column(uninterrupted, "loss")) < 1e-5


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_begins_again(runs: Runs) -> None:
    uninterrupted = runs.trained(processes(2), ON_ROWS)
    run = killed(runs, processes(2), ON_ROWS, step=3)
    runs.resumed(run)
    assert resumed_from(run) is None
    assert column(run, "loss") == column(uninterrupted, "loss")
    assert [event["step"] for event in events(run, "evaluate")] == [0, 30]


@pytest.mark.slow
def test_a_line_cut_by_the_kill_is_taken_out(runs: Runs) -> None:
    uninterrupted = runs.trained(processes(1), ON_ROWS)
    run = killed(runs, processes(1), ON_ROWS, "checkpoint.every=2", step=5)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "time": 17952')
    runs.resumed(run)
    for line in (run / "events.jsonl").read_text().splitlines():
        assert json.loads(line)["event"]
    assert column(run, "loss") == column(uninterrupted, "loss")


def test_a_signal_ends_with_a_checkpoint_and_75(runs: Runs) -> None:
    uninterrupted = runs.trained(processes(2), ON_ROWS)
    started = runs.train(processes(2), ON_ROWS)
    started.wait_for_step(5)
    started.kill(signal.SIGTERM)
    ended = started.wait()
    run = started.run
    assert run is not None
    assert ended.code == 75, ended.stdout + ended.stderr
    assert f"--resume {run}" in ended.stderr and "Traceback" not in ended.stderr
    finish = events(run, "finish")[-1]
    assert finish["status"] == "stopped" and 5 <= finish["step"] < 30
    assert Path(finish["path"]) == run / "checkpoints" / f"step-{finish['step']:08d}"
    assert not (run / "final").exists()

    runs.resumed(run)
    assert resumed_from(run) == finish["step"]
    # Not a step was done twice: read as they are, not as a history.
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 31))
    assert column(run, "loss") == column(uninterrupted, "loss")
    assert column(run, "tokens") == column(uninterrupted, "tokens")
    assert same_weights(run, uninterrupted)


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(runs: Runs) -> None:
    finished = runs.trained(processes(1), ON_ROWS)
    run = runs.copied(finished)
    runs.resumed(run)
    assert resumed_from(run) == 30
    assert column(run, "loss") == column(finished, "loss")
    assert [event["status"] for event in events(run, "finish")] == ["finished", "finished"]
    assert same_weights(run, finished)


def test_more_steps_can_be_asked_for_but_not_other_data(runs: Runs) -> None:
    run = runs.copied(runs.trained(processes(1), ON_ROWS))
    refused = runs.resume(run, "data.max_length=64").wait()
    assert refused.code == 2
    assert "data" in refused.stderr and "resumed" in refused.stderr
    runs.resumed(run, "train.max_steps=33")
    assert len(column(run, "loss")) == 33


STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")


def every_pair(names: tuple[str, ...]) -> list[str]:
    """A walk from the first name back to it in which each name follows each other one once (Hierholzer)."""
    left = {name: [other for other in names if other != name] for name in names}
    stack, walk = [names[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "walk",
    [
        ("fsdp", "single", "ddp"),
        pytest.param(tuple(every_pair(STRATEGIES)), marks=(pytest.mark.slow, pytest.mark.timeout(1500))),
    ],
    ids=["a few", "each after each"],
)
def test_one_strategy_goes_on_from_another(runs: Runs, walk: tuple[str, ...]) -> None:
    """By the command line, and what the plan has chosen for one strategy is no hindrance to another."""

    def asked(position: int) -> tuple[str, ...]:
        strategy = walk[position]
        count = processes(1 if strategy == "single" else 2)
        return f"parallel.strategy={strategy}", count, f"train.max_steps={2 * position + 2}"

    constant = ("optimizer.schedule=constant", "optimizer.warmup_steps=0")
    fixed = (ON_ROWS, *constant, "model.dropout=0", "data.validation=null")
    uninterrupted = runs.trained(*fixed, processes(1), f"train.max_steps={2 * len(walk)}")
    run = runs.copied(runs.trained(*fixed, *asked(0)))
    for position in range(1, len(walk)):
        runs.resumed(run, *asked(position))
    assert [start["strategy"] for start in events(run, "start")] == list(walk)
    assert difference(column(run, "loss"), column(uninterrupted, "loss")) < 1e-5
    assert difference(column(run, "grad_norm"), column(uninterrupted, "grad_norm")) < 1e-4
