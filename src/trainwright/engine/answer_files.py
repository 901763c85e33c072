"""The answers of evaluations during training: their files, and a warning where they are cut."""

from __future__ import annotations

import json
from pathlib import Path

from trainwright import text
from trainwright.engine.event_log import EventLog
from trainwright.engine.events import Notice
from trainwright.engine.task import Measured
from trainwright.paths import write_file

DIRECTORY = "evaluations"


class AnswerFiles:
    """Write the answers of each evaluation to ``evaluations/step-<n>/samples.jsonl`` of the run."""

    def __init__(self, run: Path, events: EventLog) -> None:
        self._run, self._events = run, events
        self._warned = ""

    def keep(self, step: int, measured: Measured) -> Path | None:
        """Write the answers, on the rank that has them; return their file. A disk error ends nothing."""
        if not measured.samples:
            return None
        file = self._run / DIRECTORY / f"step-{step}" / "samples.jsonl"
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in measured.samples)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, lines)
        except OSError as error:
            self._events.emit(Notice(message=f"{file}: the answers could not be written: {error.strerror or error}"))
            return None
        return file

    def warn(self, step: int, measured: Measured, file: Path | None) -> None:
        """Say that answers were cut, once as long as it is some or all of them."""
        total, cut = len(measured.samples), measured.cut
        which = "all" if cut == total else "some"
        if not cut or not total:
            self._warned = ""
        elif which != self._warned:
            self._warned = which
            names = ", ".join(measured.samples[0]["scores"])
            of = f"all {text.plural(total, 'answer')} were" if which == "all" else f"{cut} of {total} answers were"
            consequence = (
                f"{names} of step {step} tell little about the model"
                if which == "all"
                else f"{names} of step {step} count what was written up to there"
            )
            kept = f"; the answers are in {file}" if file is not None else ""
            self._events.emit(
                Notice(
                    message=f"{of} cut at {text.plural(measured.limit, 'token')} (evaluate.max_new_tokens), so "
                    f"{consequence}; raise evaluate.max_new_tokens{kept}"
                )
            )
