"""What recipes and runs need to know of an observer, and the settings of observers in a recipe.

Observers are registered in ``recipe/registries.py``, by an entry point of the group ``trainwright.observers`` (those
that no key turns on or off: ``trainwright.always_on``), or named in a recipe as ``module:Name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from trainwright.errors import RequestError
from trainwright.recipe.extensions import OWN
from trainwright.recipe.registries import OBSERVERS
from trainwright.recipe.sections.fields import is_entry_point
from trainwright.utils.installation import install_command

OBSERVERS_KEY = ("logging", "observers")
Settings = dict[str, Any]  # of observers by name
AUTO = "auto"


@dataclass(frozen=True)
class ObserverSpec:
    """An observer, which may do any of five things: each is the name of a function, ``module:function``, or None.

    Attributes:
        summary: one line for references.
        create: on rank 0, returns for an ``ObservedRun`` and the observer's setting what gets every event, or None.
        after_failure: called by the launcher with the directory of a run that has failed, the observer's setting, the
            seconds since the run was launched, and whether it may take long.
        beside: on every rank, returns for an ``ObservedRank`` a context in which the rank trains. This and what follows
            is for observers that are always on.
        samples: returns for a run's directory and its number of ranks a function that returns what their machines do.
        after_workers: called by the launcher with a run's directory and the ranks that have ended here without failure.
        setting: the type of the observer's setting, without options.
        options: the section with the options that may be set instead.
        default: the setting where a recipe has none; only that of built-in observers is used.
        library: a module that must be installed.
        extra: the extra of Trainwright with this library.
    """

    summary: str
    create: str | None = None
    after_failure: str | None = None
    beside: str | None = None
    samples: str | None = None
    after_workers: str | None = None
    setting: Any = bool
    options: type[BaseModel] | None = None
    default: Any = False
    library: str | None = None
    extra: str | None = None

    @property
    def is_installed(self) -> bool:
        """Return whether its library is installed."""
        try:
            return self.library is None or find_spec(self.library) is not None
        except ModuleNotFoundError:  # not even the package of the module
            return False


def _load_specs() -> dict[str, ObserverSpec]:
    """Return the built-in observers that are present, by name."""
    names = [name for name in OBSERVERS.names() if OBSERVERS.is_built_in(name) and OBSERVERS.is_present(name)]
    return {name: _look_up_spec(name) for name in names}


def _look_up_spec(name: str) -> ObserverSpec:
    """Return what is known of an observer; nothing of a function, or of one that a recipe names as `module:Name`."""
    spec = _OWN if is_entry_point(name) else OBSERVERS.get(name)
    return spec if isinstance(spec, ObserverSpec) else _OWN


def check_installed(settings: Settings) -> None:
    """Raise RequestError if the library of an observer is missing that is turned on."""
    for name, setting in settings.items():
        spec = None if setting in (False, AUTO) else OBSERVERS.get(name)
        if isinstance(spec, ObserverSpec) and not spec.is_installed:
            command = install_command(spec.extra) if spec.extra else f"pip install {spec.library}"
            why = f"{spec.library} is not installed; {command}, or set it to false"
            raise RequestError(f"logging.observers.{name}: {why}")


def convert_names(value: Any, earlier: Any = None) -> Any:
    """Return the settings that a list of names stands for, and any other value as it is.

    Args:
        earlier: the settings that the list is written over. It replaces the observers that they turn on by name; what
            is on by default, has options or is off stays.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return value
    settings = convert_names(earlier)
    by_default = [name for name, spec in _load_specs().items() if spec.default is not False]
    items = settings.items() if isinstance(settings, dict) else ()
    stays = {name: setting for name, setting in items if setting is not True or name in by_default}
    return stays | dict.fromkeys(value, True)


def check_settings(settings: Settings) -> Settings:
    """Return the settings of a recipe, checked, and the defaults of observers that it does not set; for pydantic."""
    checked_values = {name: spec.default for name, spec in _load_specs().items() if spec.default is not False}
    problems: list[InitErrorDetails] = []
    for name, setting in settings.items():
        if setting in (False, AUTO) and OBSERVERS.is_built_in(name) and not OBSERVERS.is_present(name):
            continue  # as in a recipe that was written where its room was there
        try:
            checked_values[name] = _check_setting(name, setting)
        except RequestError as error:
            about = PydanticCustomError("extension", "{reason}", {"reason": str(error)})
            problems.append({"type": about, "loc": (name,), "input": setting})
        except ValidationError as error:
            for item in error.errors(include_url=False):
                option = item["loc"][:1] if isinstance(setting, dict) else ()  # without the members of unions
                context = item.get("ctx", {})
                problems.append({"type": item["type"], "loc": (name, *option), "input": item["input"], "ctx": context})
    if problems:
        raise ValidationError.from_exception_data("observers", problems)
    return checked_values


def _check_setting(name: str, setting: Any) -> Any:
    if is_entry_point(name):
        OBSERVERS.check_origin(name)
    elif OBSERVERS.is_built_in(name) and not OBSERVERS.is_present(name):
        OBSERVERS.get(name)  # raises
    elif name not in (names := _list_names()):
        context = {"expected": f"{', '.join(map(repr, names))} (your own: {OWN})"}
        unknown: InitErrorDetails = {"type": "literal_error", "loc": (), "input": name, "ctx": context}
        raise ValidationError.from_exception_data(name, [unknown])
    spec = _look_up_spec(name)
    if not isinstance(setting, dict):
        return TypeAdapter(spec.setting).validate_python(setting)
    if spec.options is None:
        return setting if spec is _OWN else TypeAdapter(spec.setting).validate_python(setting)
    if unknown_options := [key for key in setting if key not in spec.options.model_fields]:
        choices = ", ".join(spec.options.model_fields)
        raise RequestError(f"unknown option {unknown_options[0]}; choose from {choices}")
    return spec.options.model_validate(setting).model_dump()


def _list_names() -> list[str]:
    """Return the observers that a recipe can name."""
    return [name for name in OBSERVERS.names() if OBSERVERS.is_present(name)]


def complete_schema(schema: dict[str, Any]) -> None:
    """Give the JSON schema of the key, for editors, the names of observers and their settings."""
    built_in = _load_specs()
    settings = {name: _build_schema(built_in.get(name, _OWN)) for name in _list_names()}
    del schema["type"], schema["additionalProperties"]
    by_name = {"type": "object", "properties": settings, "additionalProperties": _build_schema(_OWN)}
    schema["anyOf"] = [by_name, {"type": "array", "items": {"type": "string"}}]


def _build_schema(spec: ObserverSpec) -> dict[str, Any]:
    options = [{"type": "object"}] if spec is _OWN else []
    options += [] if spec.options is None else [spec.options.model_json_schema()]
    return {"description": spec.summary, "anyOf": [TypeAdapter(spec.setting).json_schema(), *options]}


_OWN = ObserverSpec("An observer of your own, with any options.")
