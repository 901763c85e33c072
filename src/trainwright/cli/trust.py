"""The option of commands that only read recipes, runs and models: whether to import the code that these name."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.recipe.extensions import trusting


def _trust(context: typer.Context, trusted: bool) -> bool:
    context.with_resource(trusting(trusted))  # until the command ends
    return trusted


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust,
        help="Import the code that a recipe names as module:Name. Without it nothing of it is run.",
    ),
]
