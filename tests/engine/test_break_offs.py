"""A stop is looked at in evaluations, while texts are generated and while the model is exported too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import Runs, events

# Two batches of validation rows, three prompts for two processes, and answers that are judged.
OVERRIDES = [
    "train.max_steps=3",
    "data.validation=12",
    "evaluate.every=2",
    "evaluate.prompts=[one, two, three]",
    "evaluate.metrics=[exact_match]",
    "evaluate.generation_limit=2",
    "evaluate.max_new_tokens=2",
    "checkpoint.keep_best=true",
]


def history(run: Path) -> list[tuple[Any, ...]]:
    """What was trained, measured and said, in order."""
    steps = [("step", event["step"], event["loss"], event["grad_norm"]) for event in events(run, "step")]
    measured = [("evaluate", event["step"], event["metrics"]) for event in events(run, "evaluate")]
    said = [("generate", event["step"], event["prompt"], event["text"]) for event in events(run, "generate")]
    return [*steps, *measured, *said]


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(run / "final" / "model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "every"),
    [("ddp", 9), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "zero2"))],
)
def test_a_stop_at_any_moment_leaves_the_run_as_it_would_have_been(
    runs: Runs, tmp_path: Path, strategy: str, every: int
) -> None:
    overrides = [*OVERRIDES, f"parallel.strategy={strategy}"]
    runs.function("tests.engine.break_offs:stopped_everywhere", str(tmp_path), overrides, every, processes=2)
    found = json.loads((tmp_path / "moments.json").read_text())
    steps, evaluations, tensors = 3, 3, 20
    # In each evaluation two batches, an answer of each rank and two rounds of prompts; in the export every tensor.
    assert found["moments"] >= steps + evaluations * 5 + tensors
    assert set(found["codes"].values()) == {75}

    whole = history(tmp_path / "whole")
    assert [line[:2] for line in whole if line[0] != "generate"] == [
        *(("step", step) for step in (1, 2, 3)),
        *(("evaluate", step) for step in (0, 2, 3)),
    ]
    broken_off = set()
    for moment in found["codes"]:
        run = tmp_path / f"stopped-{moment}"
        assert history(run) == whole, f"stopped at moment {moment}"
        assert same_weights(run, tmp_path / "whole")
        broken_off |= {event["pending"] for event in events(run, "start")[1:]}
        # Of one that was stopped before its first step there is nothing to keep.
        finish = events(run, "finish")[0]
        assert (finish["path"] is None) == (finish["step"] == 0)
    if every == 1:
        assert broken_off == {None, "evaluation", "generation"}
