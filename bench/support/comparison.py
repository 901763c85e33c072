"""Trainwright beside each contender: speed, memory and utilisation, and what the product promises of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.flops import ModelFlops, llama_flops, seen_per_token
from support.runs import Run, Spread, print_table

OURS = "trainwright"
# TRL's best settings in either precision; what is promised is promised of the faster.
BEST = ("trl-best-bf16", "trl-best-fp32")
COLUMNS = ("", "tokens/s", "peak GB", "tokens/step", "CPU s", "of its peak", "our speed", "our memory")


def summarize(
    runs: Sequence[Run], warm_up: int, model: Path, lengths: Sequence[int], machine: dict[str, Any]
) -> dict[str, Any]:
    """By contender, over its runs; where Trainwright ran too, also their ratios pair by pair."""
    flops, seen = llama_flops(model), seen_per_token(lengths)
    ours = {run.pair: run for run in runs if run.contender == OURS}
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(run.contender for run in runs):
        own = [run for run in runs if run.contender == name]
        row = _row(own, warm_up, flops, seen, machine["matrix_gflops"][own[0].precision])
        if name != OURS and ours:
            row |= _against([(ours[run.pair], run) for run in own], warm_up)
        summary[name] = row
    return summary


def _row(runs: Sequence[Run], warm_up: int, flops: ModelFlops, seen: float, peak: float) -> dict[str, Any]:
    rates = [run.steady_tokens_per_second(warm_up) for run in runs]
    per_token = [flops.of(1, run.steady_targets_per_token(warm_up), seen) for run in runs]
    gflops = statistics.median(rate * each / 1e9 for rate, each in zip(rates, per_token, strict=True))
    return {
        "precision": runs[0].precision,
        "tokens_per_second": asdict(Spread.of(rates)),
        "peak_memory": asdict(Spread.of([run.usage.peak_memory for run in runs])),
        "peak_memory_largest": asdict(Spread.of([run.usage.peak_memory_largest for run in runs])),
        "tokens_per_step": statistics.mean(sum(run.tokens) / len(run.tokens) for run in runs),
        "cpu_seconds": statistics.median(run.usage.cpu_seconds for run in runs),
        "model_gflops": gflops,
        "utilisation": gflops / peak,
    }


def _against(pairs: Sequence[tuple[Run, Run]], warm_up: int) -> dict[str, Any]:
    speed = [a.steady_tokens_per_second(warm_up) / b.steady_tokens_per_second(warm_up) for a, b in pairs]
    memory = [a.usage.peak_memory / b.usage.peak_memory for a, b in pairs]
    return {
        "speed_ratio": {**asdict(Spread.of(speed)), "pairs": speed},
        "memory_ratio": {**asdict(Spread.of(memory)), "pairs": memory},
    }


def fastest_best(summary: dict[str, Any]) -> str | None:
    """TRL at its best: the faster of its precisions, of those that were run."""
    found = [name for name in BEST if name in summary]
    return max(found, key=lambda name: summary[name]["tokens_per_second"]["median"]) if found else None


def report(summary: dict[str, Any]) -> None:
    """The table, and whether each promise that could be checked is kept."""
    print()
    print_table(COLUMNS, [_cells(name, row) for name, row in summary.items()])
    best = fastest_best(summary)
    # Contender, measure, and the promise: at least so many times its speed, at most such a part of its memory.
    promises = ((best, "speed_ratio", 2.0), (best, "memory_ratio", 0.75), ("trl-defaults", "speed_ratio", 4.0))
    for name, measure, promised in promises:
        if name is None or measure not in summary.get(name, {}):
            continue
        found = summary[name][measure]
        median, speed = found["median"], measure == "speed_ratio"
        verdict = "kept" if (median >= promised if speed else median <= promised) else "MISSED"
        bound = f"{'at least' if speed else 'at most'} {promised}"
        pairs = ", ".join(f"{ratio:.2f}" for ratio in found["pairs"])
        print(f"{verdict}: {measure} to {name} is {median:.2f}, {bound} wanted; by pair {pairs}")


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    ratios = [_text(row[key], 2) if key in row else "" for key in ("speed_ratio", "memory_ratio")]
    return [
        name if name.endswith(row["precision"]) else f"{name} ({row['precision']})",
        _text(row["tokens_per_second"], 1),
        _text(row["peak_memory"], 2, unit=1e9),
        f"{row['tokens_per_step']:.0f}",
        f"{row['cpu_seconds']:.0f}",
        f"{row['utilisation']:.0%}",
        *ratios,
    ]


def _text(spread: dict[str, Any], digits: int, unit: float = 1.0) -> str:
    median, low, high = (f"{spread[key] / unit:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"
