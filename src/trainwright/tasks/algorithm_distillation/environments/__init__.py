"""The environments by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trainwright.errors import RequestError
from trainwright.models.usage import has_user_code
from trainwright.recipe.registries import ENVIRONMENTS
from trainwright.tasks.algorithm_distillation.environments.base import Environment, VectorEnvironment

__all__ = ["Environment", "VectorEnvironment", "check_stored", "make"]


def check_stored(environment: Mapping[str, Any], file: str) -> None:
    """Check the ``name`` and ``options`` of an environment that a file names: a file is data, and names no code.

    Raises:
        RequestError: they are of another type, or name code (``module:Class``) rather than a registered environment.
    """
    name, options = environment["name"], environment["options"]
    if not isinstance(name, str) or not isinstance(options, dict):
        raise RequestError(f"{file}: its environment needs a name, and options by name")
    if has_user_code(environment):
        raise RequestError(
            f"{file}: its environment is the code {options.get('entry_point', name)!r}, which is imported only if your "
            "own recipe names it with equal options; use that recipe or its run, or install a package that registers "
            "the environment"
        )


def make(name: str, **options: Any) -> Environment:
    """Return the environment of that name, or at that place ``module:Class``.

    Args:
        options: its own, such as ``size`` and ``horizon``; each has a default.

    Raises:
        RequestError: the environment or an option does not exist, or an option has an invalid value.
    """
    kind = ENVIRONMENTS.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise RequestError(f"environment {name}: is not a subclass of {Environment.__module__}.Environment")
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise RequestError(f"environment {name}: has no option {option}; it has {', '.join(parameters)}")
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in options
    ]
    if missing:
        raise RequestError(f"environment {name}: needs the option {missing[0]}")
    environment: Environment = kind(**options)
    environment.name = name
    return environment
