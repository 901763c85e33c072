"""How a command is declared, other than by its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def command(**options: Any) -> Callable[[F], F]:
    """Declare arguments for typer's ``command``, with which ``main`` registers the function."""

    def declare(function: F) -> F:
        function.__dict__["command_options"] = options
        return function

    return declare
