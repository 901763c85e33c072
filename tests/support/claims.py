"""Begin the runs of an array as `train --resume auto` does, up to their first files: for races between many starters.

python -m tests.support.claims SWEEP NAME      in an element of a job array
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.runs import ON_ROWS, TINY
from trainwright.errors import RequestError, Stopped
from trainwright.run import run_directory
from trainwright.run.request import build_request

BEGUN = "begun"  # a line for each starter that has begun the run


def claim(sweep: Path, element: int, who: str) -> bool:
    """Begin the run of an element unless another starter has; whether it was begun."""
    os.environ[run_directory.ARRAY_ELEMENT] = str(element)
    request = build_request(TINY, [ON_ROWS, f"logging.run_directory={sweep}"], "auto")
    if request.run is not None:
        return False
    try:
        with request.open_directory(cast(Any, SimpleNamespace(recipe=request.recipe))) as run:
            run_directory.record(run, run_directory.format_recipe(request.recipe), who, ())
            with (run / BEGUN).open("a") as file:
                file.write(f"{who}\n")
    except (RequestError, Stopped):
        return False
    return True


def check(sweep: Path, elements: int) -> None:
    """Assert that each run was begun by one starter, which has written all of its files."""
    assert sorted(int(each.name) for each in sweep.iterdir() if each.name.isdigit()) == list(range(elements))
    for element in range(elements):
        run = sweep / str(element)
        (who,) = (run / BEGUN).read_text().splitlines()
        assert run_directory.read_plan(run)["recipe"] == who
        left = {each.name for each in run.iterdir()} - {run_directory.RECIPE, run_directory.PLAN, BEGUN, "logs"}
        assert all(name == ".lock" for name in left), left


if __name__ == "__main__":
    claim(Path(sys.argv[1]), int(os.environ[run_directory.ARRAY_ELEMENT]), sys.argv[2])
