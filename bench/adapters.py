"""What adapters save: SmolLM2-135M-Instruct tuned in full, by LoRA and by QLoRA on the same rows.

    python bench/adapters.py --data gsm8k/train.jsonl --data instructions.json     both sources, three runs each
    python bench/adapters.py --data gsm8k/train.jsonl --only qlora --steps 4        a trial

Every case is a run of the product's own workers on one process. Shown are the validation loss before and after, the
peak of live tensors as counted from every allocation, that of the full run, and what the plan says of the same recipe.
Loading is left out on both sides: it goes by the file that the weights are mapped from, which is counted whole though
the system may drop it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import plan_runs
from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import print_table, write_results

from trainwright.data.sources.reading import iterate_source
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.run.resolve import resolve

RESULTS = results_directory() / "adapters.json"
ROWS, VALIDATION = 200, 24
WAYS: dict[str, tuple[dict[str, Any] | str, float]] = {
    "full": ("none", 2e-4),
    "lora": ({"type": "lora", "rank": 16, "alpha": 32}, 1e-3),
    "qlora": ({"type": "qlora", "rank": 16, "alpha": 32}, 1e-3),
}


def recipe_of(rows: Path, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    adapter, learning_rate = WAYS[way]
    return {
        "task": "sft",
        "model": {"name": arguments.model, "adapter": adapter},
        "data": {
            "train": str(rows),
            "validation": VALIDATION,
            "max_length": arguments.length,
            "pack_length": arguments.length,
        },
        "optimizer": {"learning_rate": learning_rate, "warmup_steps": 2},
        "train": {
            "max_steps": arguments.steps,
            "global_batch_size": arguments.batch,
            "micro_batch_size": 1,
            "mixed_precision": "bf16",
            "activation_checkpointing": "none",
            "compile": False,
        },
        "parallel": {"strategy": "single", "num_processes": 1},
        "checkpoint": {"every": None, "keep_best": False},
        "evaluate": {"every": arguments.steps},
    }


def measure(rows: Path, way: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Bytes of live tensors, measured and predicted, by phase; and the validation losses."""
    directory = work / f"{rows.stem}-{way}"
    found = plan_runs.run(recipe_of(rows, way, arguments), directory, work / "cache")
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    losses = [event["metrics"]["loss"] for event in events if event["event"] == "evaluate"]
    (rank,) = found["ranks"]
    # Anew: the lengths of the examples are known now, as they are to every run but the first on its data.
    memory = resolve(load_recipe(directory / "written.json"), detect()).plan.document["chosen"]["memory"]
    return {
        "data": rows.name,
        "way": way,
        "loss_before": losses[0],
        "loss_after": losses[-1],
        "measured": _peak(rank["phases"]),
        "predicted": _peak(memory["phases"]),
        "measured_phases": rank["phases"],
        "predicted_phases": memory["phases"],
        "trainable_parameters": next(e["trainable_parameters"] for e in events if e["event"] == "start"),
        "seconds": found["seconds"],
    }


def _peak(phases: Mapping[str, int]) -> int:
    return max(held for phase, held in phases.items() if phase != "load")


def some_rows(source: str, work: Path) -> Path:
    """The first rows of a source, as JSONL."""
    file = work / f"{Path(source).parent.name}-{Path(source).stem}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _, row in iterate_source(source, ROWS)))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", action="append", required=True, metavar="FILE", help="rows as for training")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--only", action="append", choices=list(WAYS), help="of the ways of tuning")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="examples per step (4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a pack, and at most of an example (512)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    machine = describe(use_cores(2))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="adapters-") as temporary:
        work = Path(temporary)
        os.environ["TRAINWRIGHT_CACHE"] = str(work / "cache")
        for source in arguments.data:
            rows = some_rows(source, work)
            for way in arguments.only or WAYS:
                results.append(measure(rows, way, arguments, work))
                report(results)
    write_results(arguments.output, {"machine": machine, "rows": ROWS, "cases": results})


def report(results: list[dict[str, Any]]) -> None:
    full = {result["data"]: result["measured"] for result in results if result["way"] == "full"}
    rows = [
        [
            f"{result['data']}, {result['way']}",
            f"{result['loss_before']:.3f}",
            f"{result['loss_after']:.3f}",
            f"{result['measured'] / 2**20:.0f} MiB",
            f"{result['measured'] / full[result['data']]:.0%}" if result["data"] in full else "",
            f"{result['predicted'] / 2**20:.0f} MiB",
            f"{result['predicted'] / result['measured'] - 1:+.1%}",
            f"{result['seconds']:.0f} s",
        ]
        for result in results
    ]
    print_table(["", "loss before", "after", "peak", "of full's", "plan", "error", "took"], rows)
    print(flush=True)


if __name__ == "__main__":
    main()
