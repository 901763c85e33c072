"""``trainwright ablate`` and ``unlearn-study``: compare variants of a recipe, and unlearning objectives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import RequestError
from trainwright.utils.text import say, table, table_width

if TYPE_CHECKING:
    from trainwright.tasks.unlearn.evaluation.study.results import Results


def ablate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE…", help="A key to vary and its values; repeatable."),
    ] = None,
    combinations: Annotated[
        bool | None,
        typer.Option(
            "--grid/--one-at-a-time",
            help="All combinations of the values (the default), or the unchanged recipe and once every value.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--sample", min=1, metavar="N", help="Train N random combinations; 1e-5..1e-3 is a range."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sample.")] = 0,
    halving: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Continue only the best of every N, for N times as many steps."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Validation metric to compare by. Default: loss, if it shows how good a model is."),
    ] = None,
    highest: Annotated[
        bool | None,
        typer.Option("--highest/--lowest", help="Which value of the metric is the best. Default: by its name."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at once. Default: as many as there are GPUs for, on a CPU one."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Directory of the runs. Default: runs/<recipe>-sweep.")
    ] = None,
) -> None:
    """Train a recipe with other values of its keys; compare the final metrics.

    Without --one-at-a-time or --sample: all combinations of the values. Variants with the same values are trained once.
    If stopped, the same command continues: finished runs are kept, and an unfinished one is resumed. Ends like the
    first run that does not finish.
    """
    import trainwright as tw

    if combinations is not None and number is not None:
        option = "--grid" if combinations else "--one-at-a-time"
        raise RequestError(f"{option} and --sample choose the combinations in different ways; pass one of them")
    ablation = tw.ablate(
        recipe,
        *(overrides or []),
        over=_values(over or []),
        combine="sample" if number is not None else "one at a time" if combinations is False else "grid",
        number=number or 1,
        seed=seed,
        halving=halving,
        metric=metric,
        highest=highest,
        jobs=jobs,
        out=out,
        progress=True,
    )
    say(f"{ablation}\n\n{ablation.directory}/")


def _values(over: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every key."""
    if not over:
        raise RequestError("--over: pass a key and its values, such as --over train.seed=0,1,2")
    values_by_key: dict[str, list[str]] = {}
    for variation in over:
        key, equals, values = variation.partition("=")
        if not equals or not key or not values:
            raise RequestError(f"--over {variation}: expected KEY=VALUE,VALUE…")
        values_by_key.setdefault(key, []).extend(_split(values))
    return values_by_key


def _split(values: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


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
    from trainwright.run.request import is_override

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
