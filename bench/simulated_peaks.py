"""Compare peak memory on simulated GPUs with the plan's: 60 runs of several sizes, strategies and precisions.

    python bench/simulated_peaks.py

The cases are those of ``tests/planning/simulation/test_matrix.py``. Peaks are bytes of tensors, rounded as CUDA's
allocator rounds them, of rank 0 over the whole run; nothing depends on the speed of the machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from support.results import results_directory  # noqa: E402
from support.runs import print_table, write_results  # noqa: E402

from tests.planning.simulation.cases import simulate_all  # noqa: E402
from tests.planning.simulation.test_matrix import memory_cases  # noqa: E402

RESULTS = results_directory() / "simulated_peaks.json"


def main() -> None:
    asked, begun = memory_cases(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        done = simulate_all(list(asked.values()), Path(directory))
    cases: list[dict[str, Any]] = []
    for name, one in zip(asked, done, strict=True):
        if one.error or one.report["error"]:
            raise SystemExit(f"{name}: {one.error or one.report['error']}")
        error = one.planned / one.peak - 1
        cases.append({"name": name, "machine": one.case.machine, "peak": one.peak, "plan": one.planned, "error": error})
    print_table(
        ("case", "machine", "simulated", "plan", "error"),
        [
            (each["name"], each["machine"], f"{each['peak']:,}", f"{each['plan']:,}", f"{each['error']:+.2%}")
            for each in sorted(cases, key=lambda each: each["error"])
        ],
    )
    errors = [each["error"] for each in cases]
    summary = {"median": statistics.median(map(abs, errors)), "lowest": min(errors), "highest": max(errors)}
    print(f"median {summary['median']:.2%}, {summary['lowest']:+.2%} to {summary['highest']:+.2%}")
    write_results(RESULTS, {"seconds": time.monotonic() - begun, "summary": summary, "cases": cases})


if __name__ == "__main__":
    main()
