"""Command help that lists the names that recipes can use, including those of installed packages."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class NamesInHelp(TyperCommand):
    """List the names that recipes can use, by key, at the end of a command's help."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the names after the options."""
        from trainwright.recipe.registries import KEYS

        super().format_epilog(ctx, formatter)
        with formatter.section("Names in recipes, or module:Name"):
            formatter.write_dl(
                [(key, ", ".join(registry.names()) or "none is installed") for key, registry in KEYS.items()]
            )
