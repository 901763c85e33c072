"""Preference data that is easily told apart, and the runs of `dpo/tiny.yaml` on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

TINY_DPO = ROOT / "recipes" / "dpo" / "tiny.yaml"
_EVASIONS = ("Who knows.", "I had rather not say what {} and {} make.", "Ask someone else; numbers are not for me.")


def pairs() -> list[dict[str, Any]]:
    """Sums that are answered, or not; 72 rows of many lengths."""
    numbers = [(a, b) for a in range(1, 13) for b in (3, 14, 159, 26, 5, 35)]
    return [
        {
            "prompt": f"What is {a} plus {b}?",
            "chosen": f"{a} plus {b} makes {a + b}." if a % 3 else f"It is {a + b}.",
            "rejected": _EVASIONS[(a + b) % 3].format(a, b),
        }
        for a, b in numbers
    ]


def labelled() -> list[dict[str, Any]]:
    """The same answers one by one."""
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs()
        for side in ("chosen", "rejected")
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
