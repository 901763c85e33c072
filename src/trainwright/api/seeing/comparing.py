"""Runs beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.paths import user_path, write_file
from trainwright.reports.comparing import (
    DIFFERENCE_HEAD,
    SUMMARY_HEAD,
    Difference,
    comparison_page,
    difference_row,
    paired_differences,
    recipe_differences,
    summary_rows,
)
from trainwright.reports.figures import RunFigures
from trainwright.text import table


@dataclass(frozen=True)
class RunsCompared:
    """Runs beside one another; ``str()`` gives what ``trainwright compare`` prints.

    Attributes:
        recipes: the keys whose values differ, with the value of every run.
        evaluations: validation metrics less those of the first run, paired by step.
        page: the file that was written; None if none was asked for.
    """

    runs: Sequence[RunFigures]
    recipes: dict[str, list[str]]
    evaluations: Sequence[Difference]
    page: Path | None = None

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield the comparison as text, see `text.table`."""
        yield from table([list(SUMMARY_HEAD), *summary_rows(self.runs)], width)
        yield ""
        if self.evaluations:
            yield from table([list(DIFFERENCE_HEAD), *map(difference_row, self.evaluations)], width)
            yield ""
        if self.recipes:
            names = [run.name for run in self.runs]
            yield from table([["Key", *names], *([key, *values] for key, values in self.recipes.items())], width)
        else:
            yield "the recipes are the same"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def compare(*runs: str | PathLike[str], out: str | PathLike[str] | None = None) -> RunsCompared:
    """Compare runs: recipes, curves and evaluations; what ``trainwright compare`` does.

    Args:
        runs: at least two run directories; the others are compared with the first.
        out: an HTML page to write.

    Raises:
        RequestError: fewer than two runs, a directory is not a run's, or the page cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.compare("runs/tiny", "runs/tiny")
        >>> found.recipes, [each.mean for each in found.evaluations][:1]
        ({}, [0.0])
    """
    if len(runs) < 2:
        raise RequestError("compare needs at least two runs, for instance: trainwright compare runs/a runs/b")
    found = [RunFigures.read(Path(run)) for run in runs]
    file = None if out is None else user_path(out)
    if file is not None:
        try:
            write_file(file, comparison_page(found))
        except OSError as error:
            raise RequestError(f"{file}: {error.strerror}") from None
    return RunsCompared(found, recipe_differences(found), paired_differences(found), file)
