"""The environments by their names."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from trainwright.errors import RequestError
from trainwright.reinforcement.environments.base import Environment, VectorEnvironment

__all__ = ["NAMES", "Environment", "VectorEnvironment", "make"]

_PLACES = {
    "darkroom": ("grid", "Darkroom"),
    "darkroom-hard": ("grid", "DarkroomHard"),
    "darkroom-permuted": ("grid", "DarkroomPermuted"),
    "key-to-door": ("key_to_door", "KeyToDoor"),
    "bandit": ("bandit", "Bandit"),
    "gymnasium": ("user", "UserEnvironment"),
}
NAMES = tuple(_PLACES)


def make(name: str, **options: Any) -> Environment:
    """The environment of that name.

    Args:
        options: its own, such as ``size`` and ``horizon``; each has a default.
    Raises:
        RequestError: there is no such environment, or it has no such option, or not with such a value.
    """
    if name not in _PLACES:
        near = get_close_matches(name, NAMES, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise RequestError(f"environment {name}: is not known; {meant}")
    module, attribute = _PLACES[name]
    kind = getattr(import_module(f"{__name__}.{module}"), attribute)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise RequestError(f"environment {name}: has no option {option}; it has {', '.join(parameters)}")
    missing = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty and key not in options]
    if missing:
        raise RequestError(f"environment {name}: needs the option {missing[0]}")
    made: Environment = kind(**options)
    return made
