"""Run a check in a separate process, which may crash."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.doctor.checks.check import CheckContext, CheckEnded, Finding, Severity
from trainwright.errors import TrainingError
from trainwright.run.process import preload_libraries, run_in_child


def answer_of(work: Callable[[Path], None], what: str, context: CheckContext) -> Any:
    """Return the JSON that ``work`` writes to the file it is given.

    Args:
        what: a name of the work, for messages.

    Raises:
        CheckEnded: the process crashed or raised an exception.
    """
    preload_libraries()
    answer, log = context.work / "answer.json", context.work / "child.log"
    answer.unlink(missing_ok=True)
    try:
        run_in_child(functools.partial(work, answer), log, context.stopping)
    except TrainingError as error:
        raise CheckEnded(_failed(what, str(error), log)) from None
    return json.loads(answer.read_text(encoding="utf-8"))


def _failed(what: str, message: str, log: Path) -> Finding:
    from trainwright.doctor.diagnosis.explain import explain

    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    cause = explain(f"{message}\n{text}").cause
    said = message.splitlines()[0].removeprefix("preparation failed: ").removesuffix(f"; see {log}")
    said = said.replace("preparation ended", "its process ended")
    return Finding(
        Severity.BROKEN,
        f"{what}: {said}",
        cause.error.cause if cause is not None else "torch may be built for another processor or driver, or be damaged",
        "; ".join(cause.error.fixes)
        if cause is not None
        else "install torch again: https://pytorch.org/get-started/locally",
    )
