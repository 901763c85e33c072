"""``trainwright unlearn-study``: compare unlearning objectives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.errors import RequestError
from trainwright.utils.text import say, table, table_width

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.evaluation.study.results import Results


def unlearn_study(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY [KEY=VALUE]...",
            help="The study's YAML file, and overrides.",
            show_default=False,
        ),
    ],
) -> None:
    """Fine-tune on all rows and on the retain rows only, unlearn with each objective, and measure all models.

    Every part is an ordinary run or evaluation in its own directory; finished parts are not repeated. Ends with 0:
    done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a signal.
    """
    import trainwright as tw
    from trainwright.recipe.loading import is_override

    files = [word for word in arguments if not is_override(word)]
    if len(files) != 1:
        raise RequestError("expected one study file; pass overrides as key=value")
    show(tw.unlearn_study(files[0], *filter(is_override, arguments), progress=True))


def show(results: Results) -> None:
    """Print the metrics of all models."""
    say(f"\n{results.benchmark}{f' (rows: {results.about})' if results.subset else ''}")
    # Metrics in rows and models in columns: there are more metrics, and a terminal is narrow.
    names, *columns = zip(*results.rows, strict=True)
    titles = [title for _, _, title in results.columns]
    rows = [["", *names], *([title, *values] for title, values in zip(titles, columns, strict=True))]
    for line in table(rows, table_width(sys.stdout), numbers=True):
        say(line, wrap=False)
