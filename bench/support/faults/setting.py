"""The run that the bench puts faults into, and what a refusal of a hostile file has to be like."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Sequence
from pathlib import Path

from trainwright.faults.drills.invariants import require
from trainwright.faults.drills.trial_environment import REQUEST, Scene
from trainwright.faults.drills.trial_settings import TrialSettings
from trainwright.faults.drills.watched_commands import CommandResult

ROOT = Path(__file__).resolve().parents[3]
# A command that only refuses takes this much of a processor and of memory at most.
REFUSAL_SECONDS, REFUSAL_BYTES = 60.0, 1536 * 2**20
# What does not end in this time never does, however much else the machine does.
_PATIENCE = 600.0
_SPREADS = (("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3), ("zero2", 2), ("zero3", 2))


def setting(work: Path) -> TrialSettings:
    """The bench's recipe and rows; `work` is for undisturbed runs and prepared data."""
    work.mkdir(parents=True, exist_ok=True)
    rows, bystander = work / "rows.jsonl", work / "bystander.txt"
    write_rows(rows)
    bystander.write_text("not part of the run\n")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return TrialSettings(
        files={"recipe.yaml": Path(__file__).with_name("recipe.yaml"), rows.name: rows, bystander.name: bystander},
        spreads=_SPREADS,
        shared=work,
        variables={
            **kept,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
        },
        # Memory that ran out may have halved the micro-batch, which changes what dropout draws.
        halvable=("model.dropout=0.0", "train.micro_batch_size=4"),
        patience=_PATIENCE,
    )


def write_rows(path: Path, count: int = 72) -> None:
    """Questions and answers, the same on every machine."""
    draw = random.Random(7)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(90), draw.randrange(90)
            answer = f"{a} and {b} make {a + b}" + ", which is even." * ((a + b) % 2 == 0)
            file.write(json.dumps({"question": f"What is {a} and {b}?", "answer": answer}) + "\n")


def in_bounds(ended: CommandResult) -> None:
    """It took no more of a processor and of memory than a refusal may."""
    require(ended.processor < REFUSAL_SECONDS, f"took {ended.processor:.0f} s of a processor: {ended}")
    require(ended.peak < REFUSAL_BYTES, f"took {ended.peak / 2**20:.0f} MiB: {ended}")


def refused(scene: Scene, ended: CommandResult, says: str | Sequence[str], codes: Collection[int] = (REQUEST,)) -> None:
    """It was refused in words, in bounded time and memory, and nothing was left behind."""
    scene.expect(ended, codes, says)
    in_bounds(ended)
    require(not scene.run.exists(), "a refused run is there")
