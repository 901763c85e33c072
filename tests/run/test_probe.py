"""Trying whether a run fits, in processes that are thrown away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.machine.detect import detect
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.run.resolve import resolve

# Activations of 8 rows of 128 tokens take some 600 MiB.
WIDE = (
    "data.pack_length=null",
    "data.validation=null",
    "model.config.intermediate_size=24576",
    "model.config.num_hidden_layers=1",
    "train.global_batch_size=16",
    "train.micro_batch_size=8",
)


def failure_of(runs: Runs, tmp_path: Path, *overrides: str, mebibytes: int | None = None) -> dict[str, Any] | None:
    """How the largest step fails in a process that is limited to so much; nothing of it may be left."""
    recipe = dump_recipe(resolve(load_recipe(TINY, overrides), detect()).recipe)
    answer, scratch = tmp_path / "answer.json", tmp_path / "scratch"
    scratch.mkdir()
    arguments = [recipe, mebibytes, str(answer)]
    request = {"function": "tests.support.memory:try_largest_step", "arguments": arguments}
    ended = runs._start({**request, "environment": {"TMPDIR": str(scratch)}}, None).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout == ended.stderr == "", "the caller says how it failed"
    assert list(scratch.iterdir()) == []
    failure: dict[str, Any] | None = json.loads(answer.read_text())
    return failure


def spread(count: int, strategy: str) -> tuple[str, ...]:
    return f"parallel.num_processes={count}", f"parallel.strategy={strategy}"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_step_fits_or_runs_out_of_memory(runs: Runs, tmp_path: Path, count: int, strategy: str) -> None:
    settings = (ON_ROWS, *WIDE, *spread(count, strategy))
    (tmp_path / "1").mkdir()
    assert failure_of(runs, tmp_path / "1", *settings) is None
    (tmp_path / "2").mkdir()
    failure = failure_of(runs, tmp_path / "2", *settings, mebibytes=450)
    assert failure is not None and failure["out_of_memory"]
    assert failure["error"].startswith("memory ran out on rank ")


def test_another_failure_is_not_taken_for_the_end_of_memory(runs: Runs, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": 7 if n == 300 else "x" * 5} for n in range(400)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))  # plans read fewer rows
    failure = failure_of(runs, tmp_path, ON_ROWS, f"data.train={data}", *spread(1, "single"))
    assert failure is not None and not failure["out_of_memory"] and "rows.jsonl:301" in failure["error"]


@pytest.mark.slow
def test_the_fullest_step_is_the_one_that_is_tried(runs: Runs, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": "x" * (230 if n == 20 else 5)} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (*WIDE, f"data.train={data}", "data.max_length=256", "train.global_batch_size=8", "train.max_steps=5")
    assert failure_of(runs, tmp_path, *settings, *spread(1, "single"), mebibytes=600) is not None
    # None of the other steps needs that much.
    shorter = (*settings, "data.limit=20", *spread(1, "single"))
    (tmp_path / "shorter").mkdir()
    assert failure_of(runs, tmp_path / "shorter", *shorter, mebibytes=600) is None
