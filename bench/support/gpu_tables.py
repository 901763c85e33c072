"""Tables of what was measured on a real GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from support.tables import Row, measured, read, table


def gpu_runs() -> str:
    results, memory = read("gpu_runs"), [read(f"plan_accuracy_gpu_{seed}") for seed in range(3)]
    rows: list[Row] = [
        (
            f"`{case['name']}` with random weights, {case['precision']}, micro-batches of {case['micro_batch_size']}, "
            "as planned: tokens per second and peak of tensors, in brackets beside the plan's",
            "-",
            f"{case['tokens_per_second']:,.0f} ({_more(case, 'tokens_per_second')}), "
            f"{case['memory_bytes'] / 2**30:.1f} GiB ({case['memory_bytes'] / case['predicted_bytes'] - 1:+.1%}); "
            f"{case['mfu']:.1%} of the datasheet's peak rate",
            "python bench/gpu_runs.py",
        )
        for case in results["cases"]
    ]
    cases = [case for each in memory for case in each["cases"]]
    rows.append(
        (
            f"Peak of tensors of {len(cases)} runs (single and ddp, full, LoRA and DoRA), predicted against "
            "`max_memory_allocated`; the 64 MiB of workspaces that plans count were read off these runs",
            "median 3%",
            _errors([case["error"] for case in cases]),
            "python bench/plan_accuracy.py --seed 0 (1, 2)",
        )
    )
    return table(rows, results)


def launches() -> str:
    results, rows = read("launches"), []
    for name, case in results["cases"].items():
        eager, fused = (case["passes"][kernels] for kernels in ("eager", "triton"))
        fewer = "60% and 50%" if name == "smollm2-135m" else "-"
        rows.append(
            (
                f"`{name}`, the passes over {case['packs']} packs of {case['pack']:,} tokens with `model.kernels: "
                "triton` beside plain operations, counted without a GPU: launches, and bytes "
                "that operations but products and attention move",
                fewer,
                f"{fused['launches']:,} beside {eager['launches']:,} ({fused['launches'] / eager['launches']:.0%}); "
                f"{fused['bytes_of_others'] / 1e9:,.1f} beside {eager['bytes_of_others'] / 1e9:,.1f} GB "
                f"({fused['bytes_of_others'] / eager['bytes_of_others']:.0%})",
                "python bench/launches.py",
            )
        )
        counted = ", ".join(f"{update['launches']:,} ({optimizer})" for optimizer, update in case["update"].items())
        rows.append(("The same: launches of the update in bf16 on one GPU", "-", counted, "python bench/launches.py"))
    return table(rows, results)


def ledger_gpu() -> str:
    results = read("ledger_gpu")
    (rank,), (phases,) = (results["cases"]["tiny"][key] for key in ("ranks", "phases"))
    rows: list[Row] = [
        (
            "The life of the process of `tiny` that the ledger has in a named category; its phases of steps, on the "
            "clock of the GPU, beside torch.profiler's",
            "99%; within 5%",
            f"{rank['attributed']:.1%}; {phases['difference']:+.1%}",
            "python bench/ledger.py --only tiny --output bench/results/ledger_gpu.json",
        ),
    ]
    return table(rows, results)


def _more(case: dict[str, Any], key: str) -> str:
    return f"{case[key] / case[f'predicted_{key}'] - 1:+.1%}"


def _errors(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}"


TABLES = tuple(measured(gpu_runs, launches, ledger_gpu))
