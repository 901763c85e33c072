"""The arguments of functions and commands, checked as the keys of a recipe are: same types, same words."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trainwright.errors import RequestError
from trainwright.recipe.problems import describe_mismatch

T = TypeVar("T")


def to_request(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return a function's or a command's arguments as a request, a dataclass: paths and steps as text, several names as
    one text.

    Raises:
        RequestError: a value does not have the type of its field, or is not within its bounds.
    """

    def text(name: str, value: Any) -> Any:
        if isinstance(value, PathLike):
            return fspath(value)
        if name == "checkpoint" and value is not None:
            return str(value)
        return ",".join(value) if isinstance(value, (list, tuple)) else value

    options = {name: text(name, value) for name, value in arguments.items() if name not in ("progress", "trust_code")}
    request: T = _check_value("", kind, options, extra="forbid")
    return request


def check_argument(name: str, kind: Any, value: Any) -> None:
    """Raise RequestError if the argument called ``name`` is not of the type ``kind``, such as ``Count``."""
    _check_value(name, kind, value)


def _check_value(name: str, kind: Any, value: Any, **options: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value, **options)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        items = [item for item in problems if item["loc"][:1] == problems[0]["loc"][:1]]
        raise RequestError(f"{name or items[0]['loc'][0]}: {describe_mismatch(*items)}") from None
