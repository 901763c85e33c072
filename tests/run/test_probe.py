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


def probed(runs: Runs, tmp_path: Path, *overrides: str, mebibytes: int | None = None) -> dict[str, Any]:
    """What a probe finds, in a process that is limited to so much; nothing of it may be left."""
    recipe = dump_recipe(resolve(load_recipe(TINY, overrides), detect()).recipe)
    answer, scratch = tmp_path / "answer.json", tmp_path / "scratch"
    scratch.mkdir()
    arguments = [recipe, mebibytes, str(answer)]
    request = {"function": "tests.support.memory:probe", "arguments": arguments}
    ended = runs._start({**request, "environment": {"TMPDIR": str(scratch)}}, None).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert ended.stdout == ended.stderr == "", "the caller tells what was found"
    assert list(scratch.iterdir()) == []
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def spread(count: int, strategy: str) -> tuple[str, ...]:
    return f"parallel.num_processes={count}", f"parallel.strategy={strategy}"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_what_fits_is_measured_and_what_does_not_is_said(runs: Runs, tmp_path: Path, count: int, strategy: str) -> None:
    settings = (ON_ROWS, *WIDE, *spread(count, strategy))
    (tmp_path / "1").mkdir()
    fitting = probed(runs, tmp_path / "1", *settings)
    assert fitting["fits"] and fitting["error"] is None and not fitting["out_of_memory"]
    assert 400 * 2**20 < fitting["memory_bytes"] < 2 * 2**30
    assert 0 < fitting["step_time"] < 60
    (tmp_path / "2").mkdir()
    found = probed(runs, tmp_path / "2", *settings, mebibytes=450)
    assert not found["fits"] and found["out_of_memory"]
    assert found["error"].startswith("memory ran out on rank ")


def test_another_failure_is_not_taken_for_the_end_of_memory(runs: Runs, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": 7 if n == 300 else "x" * 5} for n in range(400)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))  # plans read fewer rows
    found = probed(runs, tmp_path, ON_ROWS, f"data.train={data}", *spread(1, "single"))
    assert not found["fits"] and not found["out_of_memory"]
    assert found["memory_bytes"] is None and "rows.jsonl:301" in found["error"]


@pytest.mark.slow
def test_the_fullest_step_is_the_one_that_is_tried(runs: Runs, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n}?", "answer": "x" * (230 if n == 20 else 5)} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (*WIDE, f"data.train={data}", "data.max_length=256", "train.global_batch_size=8", "train.max_steps=5")
    assert not probed(runs, tmp_path, *settings, *spread(1, "single"), mebibytes=600)["fits"]
    # None of the other steps needs that much.
    shorter = (*settings, "data.limit=20", *spread(1, "single"))
    (tmp_path / "shorter").mkdir()
    assert probed(runs, tmp_path / "shorter", *shorter, mebibytes=600)["fits"]
