"""The cause of a failed run, from its logs."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.diagnosis.explain import Diagnosis
from trainwright.diagnosis.explain import explain as diagnose
from trainwright.diagnosis.log import LogText, read_file, read_run
from trainwright.errors import RequestError
from trainwright.paths import user_path

if TYPE_CHECKING:
    from trainwright.api.run import Run


def explain(log: Run | str | PathLike[str]) -> Diagnosis:
    """Find in the log of a failed run what the cause was; what ``trainwright doctor --explain`` does.

    Args:
        log: a log file of any program, or a run (or its directory), of which all logs are read.

    Returns:
        The cause, what only followed from it, and facts of the log about the cause; line numbers count through all
        logs of a run.

    Raises:
        RequestError: the log cannot be read.

    Examples:
        >>> import trainwright as tw
        >>> tw.explain("runs/tiny").cause is None
        True
    """
    return diagnose(read_log(log).text)


def read_log(log: Run | str | PathLike[str]) -> LogText:
    """Return the text of a log file, or of all logs of a run directory.

    Raises:
        RequestError: it cannot be read.
    """
    path = user_path(log)
    try:
        return read_run(path) if path.is_dir() else LogText(read_file(Path(path)))
    except OSError as error:
        fix = "pass the log file or the directory of a run"
        raise RequestError(f"--explain: {log}: {error.strerror or error}; {fix}") from None
