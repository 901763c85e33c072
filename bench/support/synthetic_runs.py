"""Run directories as long trainings leave them, without training anything."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

_DISTINCT = 8  # logs; the others are copies
_BEGAN, _STEP_SECONDS = 1_760_000_000.0, 0.5


def write_runs(root: Path, runs: int, steps: int) -> None:
    """Write ``runs`` finished runs of ``steps`` steps, with an evaluation and a sample each hundredth of them."""
    for number in range(runs):
        run = root / f"group-{number % 10}" / f"run-{number:03d}"
        (run / "logs").mkdir(parents=True)
        (run / "logs" / "rank-0.log").write_text("training\n")
        (run / "recipe.yaml").write_text(
            f"task: sft\nmodel: {{name: HuggingFaceTB/SmolLM2-135M}}\n"
            f"optimizer: {{learning_rate: {1e-4 * (1 + number)}}}\ntrain: {{max_steps: {steps}, seed: {number}}}\n"
        )
        log = run / "events.jsonl"
        first = root / f"group-{number % _DISTINCT % 10}" / f"run-{number % _DISTINCT:03d}" / "events.jsonl"
        if number < _DISTINCT:
            _write_log(log, steps, number)
        else:
            shutil.copyfile(first, log)


def _write_log(file: Path, steps: int, seed: int) -> None:
    draw = random.Random(seed)
    start = {
        **{"event": "start", "time": _BEGAN, "task": "sft", "world_size": 8, "strategy": "fsdp"},
        **{"max_steps": steps, "parameters": 134_515_008, "resumed_from": None, "reasons": []},
    }
    with file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(start) + "\n")
        for step in range(1, steps + 1):
            loss = 1.5 + 2.0 * math.exp(-3.0 * step / steps) + 0.3 * draw.random()
            now = _BEGAN + _STEP_SECONDS * step
            record = {
                **{"event": "step", "time": now, "step": step, "loss": loss, "grad_norm": draw.random()},
                **{"learning_rate": 1e-3 * (1.0 - step / steps), "tokens": 8192 * step, "target_tokens": 4096 * step},
                **{"tokens_per_second": 16000.0 + 500.0 * draw.random(), "step_time": 0.9 * _STEP_SECONDS},
                "memory_bytes": 6_442_450_944,
            }
            out.write(json.dumps(record) + "\n")
            if step % max(1, steps // 100) == 0:
                evaluated = {"event": "evaluate", "time": now, "step": step, "metrics": {"loss": loss}, "seconds": 1.0}
                sample = {"event": "generate", "time": now, "step": step, "prompt": "Once", "text": "upon a time " * 20}
                out.write(json.dumps(evaluated) + "\n" + json.dumps(sample) + "\n")
        now = _BEGAN + _STEP_SECONDS * steps
        end = {"event": "finish", "time": now, "status": "finished", "step": steps, "seconds": now - _BEGAN}
        out.write(json.dumps(end) + "\n")
