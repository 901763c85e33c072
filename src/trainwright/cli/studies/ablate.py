"""``trainwright ablate``: the effect of single keys of a recipe, each varied while the others are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import RequestError
from trainwright.text import say


def ablate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE…", help="A key to vary and its values; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Directory of the runs. Default: ablations/<recipe>.")
    ] = None,
) -> None:
    """Train the unchanged recipe, and once for every distinct value of every key; compare the final metrics.

    If stopped, the same command continues: finished runs are kept, and an unfinished one is resumed. Ends like the
    first run that does not finish.
    """
    import trainwright as tw

    found = tw.ablate(recipe, *(overrides or []), over=_values(over or []), out=out, progress=True)
    say(f"{found}\n\n{found.directory}/")


def _values(over: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every key."""
    if not over:
        raise RequestError("--over: pass a key and its values, such as --over train.seed=0,1,2")
    found: dict[str, list[str]] = {}
    for given in over:
        key, equals, values = given.partition("=")
        if not equals or not key or not values:
            raise RequestError(f"--over {given}: expected KEY=VALUE,VALUE…")
        found.setdefault(key, []).extend(_split(values))
    return found


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
