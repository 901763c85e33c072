"""Runs beside one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.observe.reports.comparing import (
    DIFFERENCE_HEAD,
    SUMMARY_HEAD,
    Difference,
    comparison_page,
    difference_row,
    notes_on,
    paired_differences,
    recipe_differences,
    summary_rows,
)
from trainwright.observe.reports.figures import RunFigures, is_run
from trainwright.utils.paths import user_path, write_file
from trainwright.utils.text import table


@dataclass(frozen=True)
class RunsCompared:
    """Runs beside one another; ``str()`` gives what ``trainwright compare`` prints.

    Attributes:
        recipes: the keys whose values differ, with the value of every run.
        evaluations: validation metrics beside those of the first run, best and last, after the same numbers of steps.
        notes: what cannot be compared, because the data are different, and what is wrong with the files of a run.
        page: the file that was written; None if none was asked for.
    """

    runs: Sequence[RunFigures]
    recipes: dict[str, list[str]]
    evaluations: Sequence[Difference]
    notes: Sequence[str] = ()
    page: Path | None = None

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield the comparison as text, see `text.table`."""
        yield from table([list(SUMMARY_HEAD), *summary_rows(self.runs)], width)
        yield ""
        yield from (f"warning: {note}".replace("\n", " ") for note in self.notes)
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


def compare(
    *runs: str | PathLike[str] | Iterable[str | PathLike[str]], out: str | PathLike[str] | None = None
) -> RunsCompared:
    """Compare runs: recipes, curves and evaluations; what ``trainwright compare`` does.

    Args:
        runs: at least two run directories, one by one or as a list; the others are compared with the first. A directory
            that is not a run stands for the runs in it, by name.
        out: an HTML page to write.

    Raises:
        RequestError: fewer than two runs, a directory is not a run's, or the page cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.compare(["runs/tiny", "runs/tiny"])
        >>> found.recipes, [each.last[1] - each.last[0] for each in found.evaluations][:1]
        ({}, [0.0])
    """
    paths = [Path(each) for run in runs for each in ([run] if isinstance(run, (str, PathLike)) else run)]
    directories = [directory for each in paths for directory in _runs_in(each)]
    figures = [RunFigures.read(directory) for directory in directories]
    if len(figures) < 2:
        only = f", and {directories[0]} is one" if directories else ""
        raise RequestError(
            f"compare needs at least two runs{only}; name another one, or a directory with several: "
            "trainwright compare runs/a runs/b"
        )
    file = None if out is None else user_path(out)
    if file is not None:
        try:
            write_file(file, comparison_page(figures))
        except OSError as error:
            raise RequestError(f"{file}: {error.strerror}") from None
    return RunsCompared(figures, recipe_differences(figures), paired_differences(figures), notes_on(figures), file)


def _runs_in(directory: Path) -> list[Path]:
    """Return the directory if it is a run, else the runs in it; if there is none the directory, to be refused."""
    folder = user_path(directory)
    if is_run(folder) or not folder.is_dir():
        return [directory]
    return sorted(filter(is_run, folder.iterdir())) or [directory]
