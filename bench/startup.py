"""How long a user waits: for `trainwright --help`, and from the command to the first step of training.

    python bench/startup.py

The wait for the first step is held against what cannot be avoided: importing torch and transformers and loading the
model, in a fresh process. The caches are warm, as they are from the second run on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.inputs import find_model, write_rows
from support.trainwright_side import COMMAND, RECIPE

ROUNDS = 5
UNAVOIDABLE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained({model!r})
AutoModelForCausalLM.from_pretrained({model!r})
"""


def main() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles all modules
    model = str(find_model("HuggingFaceTB/SmolLM2-135M-Instruct"))
    helps = [timed([*COMMAND, "--help"]) for _ in range(2 * ROUNDS)]
    print(f"trainwright --help: {statistics.median(helps):.2f} s (at most 0.3 wanted)")
    with tempfile.TemporaryDirectory(prefix="startup-") as temporary:
        work = Path(temporary)
        rows = write_rows(work / "rows.jsonl")
        pairs = [(first_step(work / str(i), model, rows), unavoidable(model)) for i in range(ROUNDS + 1)][1:]
    waits, floors = zip(*pairs, strict=True)
    ratio = statistics.median(wait / floor for wait, floor in pairs)
    print(
        f"command to first step: {statistics.median(waits):.1f} s; imports and model load alone: "
        f"{statistics.median(floors):.1f} s; {ratio:.2f} times (at most 1.3 wanted)"
    )


def timed(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def unavoidable(model: str) -> float:
    return timed([sys.executable, "-c", UNAVOIDABLE.format(model=model)])


def first_step(work: Path, model: str, rows: Path) -> float:
    """Seconds from the command to the beginning of the first step, by the events of the run."""
    work.mkdir()
    recipe = work / "recipe.yaml"
    settings = {"model": model, "rows": rows, "steps": 1, "examples": 1, "compile": "false", "precision": "auto"}
    recipe.write_text(RECIPE.format(**settings, run_directory=work / "run"))
    begun = time.time()
    # The command and not `tw.train`: its start is part of the wait.
    subprocess.run([*COMMAND, "train", str(recipe)], check=True, capture_output=True)
    events = [json.loads(line) for line in (work / "run" / "events.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["event"] == "step")
    return float(step["time"] - step["step_time"] - begun)


if __name__ == "__main__":
    main()
