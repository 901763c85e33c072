"""A run as a page."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.utils.paths import user_path, write_file

REPORT = "report.html"


def report(run: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write a run as one HTML page that needs no network; what ``trainwright report`` does.

    Args:
        run: a run directory, of a run that has ended or is training.
        out: where to write. Default: ``report.html`` in the run directory.

    Returns:
        The file.

    Raises:
        RequestError: the directory is not a run's, the file cannot be written, or vl-convert-python is missing.

    Examples:
        >>> import trainwright as tw
        >>> tw.report("runs/tiny").name
        'report.html'
    """
    from trainwright.observe.report import ENDED
    from trainwright.observe.reports.figures import RunFigures
    from trainwright.observe.reports.page import report_of

    figures = RunFigures.read(Path(run), ended=ENDED in os.environ)
    file = figures.directory / REPORT if out is None else user_path(out)
    page = report_of(figures)
    try:
        write_file(file, page)
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    return file
