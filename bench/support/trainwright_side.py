"""One run of Trainwright as a whole process: a recipe, the command, and what ``events.jsonl`` says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.processes import run_measured
from support.runs import Run

# The command and not `tw.train`: a whole process is measured from outside, as those of others are.
COMMAND = (sys.executable, "-m", "trainwright")

RECIPE = """\
task: sft
model: {{name: "{model}"}}
data: {{train: "{rows}", validation: null, format: question_answer, max_length: 1024, pack_length: 1024}}
optimizer: {{name: adamw, learning_rate: 2.0e-5, weight_decay: 0.0, schedule: linear, max_grad_norm: 1.0}}
train: {{max_steps: {steps}, global_batch_size: {examples}, mixed_precision: {precision}, compile: {compile}}}
parallel: {{strategy: single, num_processes: 1}}
logging: {{run_directory: "{run_directory}", observers: {{tensorboard: false}}}}
"""


def run_trainwright(
    contender: str,
    pair: int,
    *,
    model: Path,
    rows: Path,
    steps: int,
    examples: int,
    compile: str,
    precision: str,
    overrides: Sequence[str],
    env: Mapping[str, str],
    work: Path,
) -> Run:
    """Train ``steps`` optimizer steps of ``examples`` rows each through ``trainwright train``.

    Raises:
        SystemExit: the run failed; says where its output is.
    """
    directory = work / f"{contender}-{pair}"
    directory.mkdir(parents=True)
    run_directory, recipe, log = directory / "run", directory / "recipe.yaml", directory / "log"
    recipe.write_text(
        RECIPE.format(
            model=model,
            rows=rows,
            steps=steps,
            examples=examples,
            compile=compile,
            precision=precision,
            run_directory=run_directory,
        )
    )
    usage = run_measured([*COMMAND, "train", str(recipe), *overrides], env=env, log=log)
    if usage.exit_code != 0:
        raise SystemExit(f"{contender} ended with exit code {usage.exit_code}; its output is in {log}")
    events = [json.loads(line) for line in (run_directory / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    taken = [event for event in events if event["event"] == "step"]
    shown = ("strategy", "world_size", "mixed_precision", "micro_batch_size", "gradient_accumulation_steps")
    settings: dict[str, Any] = {key: start.get(key) for key in (*shown, "global_batch_size", "threads")}
    return Run(
        contender=contender,
        pair=pair,
        step_ends=[event["time"] for event in taken],
        tokens=_each(event["tokens"] for event in taken),
        targets=_each(event["target_tokens"] for event in taken),
        losses=[event["loss"] for event in taken],
        settings=settings | {"recipe": recipe.read_text(), "overrides": list(overrides)},
        usage=usage,
    )


def _each(cumulative: Any) -> list[int]:
    return [after - before for before, after in pairwise([0, *cumulative])]
