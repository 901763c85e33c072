"""The output of an evaluation on a benchmark: a directory, written completely or not at all, and a table.

metrics.json   every metric, by set log.json       the same with the numbers of every item; see log.py samples.jsonl
prompts, references and answers, if the model generated any
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.evaluation.report import complete_directory, number_text, table_lines, write_text
from trainwright.evaluation.unlearning.findings import Findings
from trainwright.evaluation.unlearning.log import NAME, log_of

METRICS_FILE = "metrics.json"


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of an evaluation on a benchmark.

    Attributes:
        metrics: values by metric and set.
        rows: the number of items of each set.
        about: the fields at the top of the log.
    """

    metrics: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    about: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: list[str]
    log: Mapping[str, Any]
    samples: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        found: Findings,
        values: Mapping[str, Mapping[str, float]],
        about: Mapping[str, Any],
        settings: Mapping[str, Any],
        notes: list[str],
    ) -> BenchmarkReport:
        """Build the report from the findings."""
        samples = [
            {"set": name, "row": number + 1, "prompt": item.prompt, "reference": wanted, "answer": answer}
            for name, answers in found.answers.items()
            for number, (item, wanted, answer) in enumerate(
                zip(found.sets[name].items, found.references[name], answers, strict=True)
            )
        ]
        rows = {name: len(each.items) for name, each in found.sets.items()}
        return cls(values, rows, about, settings, notes, log_of(found, values, about), samples)

    def save(self, file: Path) -> None:
        """Write the object to a file or directory."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> BenchmarkReport:
        """Read what ``save`` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def lines(self) -> list[str]:
        """Return the table and its notes."""
        rows = [
            [metric, name, number_text(value), f"{self.rows[name]:,}" if name in self.rows else ""]
            for metric, values in self.metrics.items()
            for name, value in values.items()
        ]
        return [*table_lines(rows, ("metric", "set", "value", "rows")), *(f"note: {note}" for note in self.notes)]

    def write(self, directory: Path) -> None:
        """Write all files to the new ``directory``. Raises RequestError if they cannot be written."""
        with complete_directory(directory) as scratch:
            found = {**self.about, "settings": self.settings, "metrics": self.metrics, "rows": self.rows}
            write_text(scratch / METRICS_FILE, json.dumps({**found, "notes": self.notes}, indent=2) + "\n")
            write_text(scratch / NAME, json.dumps(self.log) + "\n")
            if self.samples:
                lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in self.samples)
                write_text(scratch / "samples.jsonl", "".join(lines))
