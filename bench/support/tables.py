"""Tables of the page of benchmarks, made from the files in bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
HEADER = ("What", "Target", "Measured", "Command")

Row = tuple[str, str, str, str]
Results = dict[str, Any]


def read(name: str) -> Results:
    content: Results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def measured(*tables: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """Yield the tables, named as their files of results, whose benches have been run."""
    for each in tables:
        if (RESULTS / f"{each.__name__}.json").exists():
            yield each


def table(rows: Sequence[Row], *results: Results) -> str:
    """The rows, and under them the machines that ``results`` were measured on."""
    machines = dict.fromkeys(_machine(each["machine"]) for each in results)
    under = f"\nMachine: {'; or '.join(machines)}.\n" if machines else ""
    return markdown(HEADER, [as_code(row) for row in rows]) + under


def as_code(row: Row) -> Row:
    return (*row[:3], f"`{row[3]}`")


def _machine(machine: Results) -> str:
    units = ", bf16 instructions" if machine["bf16_instructions"] else ""
    gpus = "".join(f"{each['name']} (driver {each['driver']}), " for each in machine.get("gpus", ()))
    return (
        f"{gpus}{machine['processor']} ({machine['cores_in_machine']} cores{units}), {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}"
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
