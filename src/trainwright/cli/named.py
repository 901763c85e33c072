"""Help that ends with the names that recipes can give, those of installed packages among them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class NamesInHelp(TyperCommand):
    """List what recipes can name, by key, at the end of a command's help."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the names under the options."""
        from trainwright.registries import KEYS

        super().format_epilog(ctx, formatter)
        with formatter.section("Names in recipes, or module:Name"):
            formatter.write_dl(
                [(key, ", ".join(registry.names()) or "none is installed") for key, registry in KEYS.items()]
            )
