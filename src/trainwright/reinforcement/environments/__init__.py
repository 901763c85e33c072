"""The environments by name."""

from __future__ import annotations

import inspect
from typing import Any

from trainwright.errors import RequestError
from trainwright.registries import ENVIRONMENTS
from trainwright.reinforcement.environments.base import Environment, VectorEnvironment

__all__ = ["Environment", "VectorEnvironment", "make"]


def make(name: str, **options: Any) -> Environment:
    """Return the environment of that name, or at that place ``module:Class``.

    Args:
        options: its own, such as ``size`` and ``horizon``; each has a default.
        Raises:
        RequestError: the environment or an option does not exist, or an option has an invalid value.
    """
    kind = ENVIRONMENTS.get(name)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise RequestError(f"environment {name}: has no option {option}; it has {', '.join(parameters)}")
    missing = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty and key not in options]
    if missing:
        raise RequestError(f"environment {name}: needs the option {missing[0]}")
    made: Environment = kind(**options)
    made.name = name
    return made
