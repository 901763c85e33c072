"""The errors that plans have had, by kind: from published runs and from runs of our own.

What ``trainwright/planning/class_errors.json`` says; ``bench/plan_published.py --write`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.published import Compared
from trainwright.planning.errors import Interval, estimate_interval

_RESULTS = Path(__file__).parents[2] / "bench" / "results"
_ABOUT = (
    "Measured over predicted, by kind of run: 9 of 10 runs lie between low and high, which have 1 between them. Made "
    "by `python bench/plan_published.py --write` from tests/planning/published, and from our own runs in bench/results."
)


_KINDS = {"full": "dense", "lora": "LoRA", "dora": "LoRA", "qlora": "QLoRA"}


def class_errors(found: Sequence[Compared]) -> dict[str, Any]:
    """Of all figures, those that were mended on and those that only check."""
    planned = [one for one in found if one.missing is None and one.other is None]
    own = [
        (_KINDS[case["kind"]], case["measured"] / case["predicted"])
        for file in sorted(_RESULTS.glob("plan_accuracy_gpu_*.json"))
        for case in _cases(file)
    ]
    kinds = sorted({kind for one in planned for kind in one.kinds})
    classes = {
        kind: _of([one for one in planned if kind in one.kinds], [ratio for name, ratio in own if name == kind])
        for kind in kinds
    }
    return {"about": _ABOUT, "classes": {"all": _of(planned, [ratio for _, ratio in own]), **classes, "CPU": _of_cpu()}}


def _of(found: Sequence[Compared], own: Sequence[float]) -> dict[str, Any]:
    """``own``: memory of GPUs that runs of our own took over what was predicted (bench/plan_accuracy.py)."""
    return {
        "memory": _told(estimate_interval([*(1 / one.memory for one in found if one.memory is not None), *own])),
        "speed": _told(estimate_interval(1 / one.speed for one in found if one.speed is not None)),
    }


def _of_cpu() -> dict[str, Any]:
    """Memory: resident, of processes (bench/plan_memory.py); speed: by datasheets (bench/plan_time.py)."""
    memory = _cases(_RESULTS / "plan_memory_cpu_13.json")
    times = _cases(_RESULTS / "plan_time.json")
    return {
        "memory": _told(estimate_interval(case["measured"] / case["predicted"] for case in memory)),
        "speed": _told(estimate_interval(case["datasheet"] / case["measured"] for case in times)),
    }


def _cases(file: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return cases


def _told(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(interval).items()}
