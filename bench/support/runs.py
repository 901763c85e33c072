"""What one run of any contender came to, and the file of results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.processes import Usage


@dataclass(frozen=True)
class Run:
    """One whole process: its steps from inside, its cost from outside. Times in seconds, memory in bytes."""

    contender: str
    pair: int
    step_ends: list[float]  # by the wall clock
    tokens: list[int]  # of each step, padding not counted
    targets: list[int]
    losses: list[float]
    settings: dict[str, Any]
    usage: Usage

    def steady_tokens_per_second(self, warm_up: int) -> float:
        """Over all steps but the first ``warm_up``, from the end of one step to the end of the next."""
        return sum(self.tokens[warm_up:]) / (self.step_ends[-1] - self.step_ends[warm_up - 1])

    def steady_targets_per_token(self, warm_up: int) -> float:
        return sum(self.targets[warm_up:]) / sum(self.tokens[warm_up:])

    @property
    def precision(self) -> str:
        """That of the matrix products: bf16 or fp32."""
        return "bf16" if self.settings.get("bf16") or self.settings.get("mixed_precision") == "bf16" else "fp32"

    def in_words(self, warm_up: int) -> str:
        """The run in a line."""
        usage = self.usage
        return (
            f"{self.steady_tokens_per_second(warm_up):.1f} tokens/s in {self.precision}, "
            f"{usage.peak_memory / 1e9:.2f} GB, "
            f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}, {usage.wall_seconds:.0f} s "
            f"({usage.user_seconds:.0f} user, {usage.system_seconds:.0f} system; "
            f"others on the machine {usage.others_seconds:.0f})"
        )

    def as_json(self, warm_up: int) -> dict[str, Any]:
        """Every measured number, and the rate they come to."""
        return {**asdict(self), "tokens_per_second": self.steady_tokens_per_second(warm_up)}


@dataclass(frozen=True)
class Spread:
    """Median and range of a few measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells))


def write_results(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"All numbers: {path}")
