"""The types of a recipe's keys, registered names among them, the base class of sections, and contradictions of keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, PydanticKnownError, ValidationError, core_schema

from trainwright.errors import RequestError
from trainwright.recipe.extensions import OWN, Registry

Auto = Literal["auto"]


def reject_bool(value: object) -> object:
    """Reject true and false as whole numbers."""
    # In Python True equals 1; a user who writes `max_steps: true` means something else.
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def _check_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


def _check_steps(value: object) -> object:
    # A float is a fraction and an int is a count, so 1.0 is ambiguous and rejected.
    if not is_count(value, least=0) and not (isinstance(value, float) and 0 <= value < 1):
        raise PydanticCustomError("steps", "a whole number of steps or a fraction below 1")
    return value


def _check_validation_rows(value: object) -> object:
    is_fraction = isinstance(value, float) and 0 < value < 1
    if not (value is None or is_fraction or isinstance(value, str) or is_count(value, least=1)):
        raise PydanticCustomError("rows", "a fraction between 0 and 1, a whole number of rows, a source or null")
    return value


def is_count(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


Text = Annotated[str, StringConstraints(min_length=1)]
# More tokens than exist; a plan or a stream far beyond that would not finish.
Count = Annotated[int, Field(ge=1, le=10**15), BeforeValidator(reject_bool)]
# Tokens of a row: kernels count its positions in int32.
Length = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(reject_bool)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_check_number)]
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(_check_number)]
RouterWeight = Annotated[
    NotNegative | Literal["model"],
    Field(
        description="Weight of the loss that balances the load of experts (arXiv 2101.03961, equations 4 to 6), "
        "of each example, weighted by its targets. model: the weight in the model's configuration, "
        "router_aux_loss_coef. Not part of the validation loss."
    ),
]
Proportion = Annotated[float, Field(ge=0, le=1), BeforeValidator(_check_number)]
BelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_check_number)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5), BeforeValidator(_check_number)]
Steps = Annotated[Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)], BeforeValidator(_check_steps)]
HeldOutRows = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | Text, BeforeValidator(_check_validation_rows)
]
ValidationRows = Annotated[HeldOutRows | None, BeforeValidator(_check_validation_rows)]


def _check_pattern(value: object) -> object:
    try:
        assert isinstance(value, str) and value
        re.compile(f"(?:{value})")  # so that patterns can be joined
    except (AssertionError, re.error) as error:
        why = f": {error}" if isinstance(error, re.error) else ""
        raise PydanticCustomError("pattern", f"a regular expression{why}") from None
    return value


Pattern = Annotated[Text, BeforeValidator(_check_pattern)]


# A number and a unit.
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|seconds?|min|minutes?|h|hours?)")
_LONGEST = 168 * 3600.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(time: str) -> float:
    """Return the seconds of a time such as ``10 min``, ``600 s`` or ``1.5 h``. Raises ValueError if it is malformed."""
    match = _TIME.fullmatch(time.strip())
    seconds = float(match[1]) * _UNITS[match[2][0]] if match else 0.0
    if seconds <= 0:
        raise ValueError(time)
    return seconds


# A number of restarts within a time.
_RATE = re.compile(r"([0-9]+) per (hour|day)")
_RATE_SECONDS = {"hour": 3600.0, "day": 24 * 3600.0}
_MAX_PER_PERIOD = 1000


class Rate(NamedTuple):
    """At most ``times`` within ``seconds``."""

    times: int
    seconds: float


def parse_rate(rate: str) -> Rate:
    """Return a rate such as ``3 per hour``, ``10 per day`` or ``off``. Raises ValueError if it is malformed."""
    if rate == "off":
        return Rate(0, _RATE_SECONDS["hour"])
    match = _RATE.fullmatch(rate.strip())
    if match is None or int(match[1]) > _MAX_PER_PERIOD:
        raise ValueError(rate)
    return Rate(int(match[1]), _RATE_SECONDS[match[2]])


def _check_rate(value: object) -> object:
    if value is False or (value == 0 and not isinstance(value, bool)):  # YAML reads `off` as false
        return "off"
    try:
        assert isinstance(value, str)
        parse_rate(value)
    except (AssertionError, ValueError):
        raise PydanticCustomError(
            "rate", f"a number of restarts such as 3 per hour or 10 per day (at most {_MAX_PER_PERIOD}), 0 or off"
        ) from None
    return value


def _check_interval(value: object) -> object:
    if value is None or value == "auto" or is_count(value, least=1):
        return value
    try:
        assert isinstance(value, str)
        parse_seconds(value)
    except (AssertionError, ValueError):
        raise PydanticCustomError(
            "interval", "a whole number of steps, a time such as 10 min or 600 s, auto, or null"
        ) from None
    return value


class Until(NamedTuple):
    """A point of a run: after so many steps, or with the first step after which so many tokens were trained on."""

    number: int
    unit: Literal["steps", "tokens"]


_UNTIL = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([kMBT]?) ?(steps?|tokens?)")
_THOUSANDS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_until(text: str) -> Until:
    """Return a point such as ``1000 steps`` or ``2.5B tokens``. Raises ValueError if it is malformed."""
    match = _UNTIL.fullmatch(text.strip())
    count = Decimal(match[1].replace("_", "")) * _THOUSANDS[match[2]] if match else Decimal(0)
    if match is None or not 1 <= count <= 10**15 or count != int(count):
        raise ValueError(text)
    return Until(int(count), "steps" if match[3].startswith("step") else "tokens")


def _check_until(value: object) -> object:
    try:
        assert isinstance(value, str)
        parse_until(value)
    except (AssertionError, ValueError):
        message = "a number of steps or tokens since the first step, such as 1000 steps, 500M tokens or 2.5B tokens"
        raise PydanticCustomError("until", message) from None
    return value


UntilText = Annotated[Text, BeforeValidator(_check_until)]


def _check_time(value: object) -> object:
    try:
        assert isinstance(value, str)
        seconds = parse_seconds(value)
        assert 1 <= seconds <= _LONGEST
    except (AssertionError, ValueError):
        raise PydanticCustomError("time", "a time such as 10 min or 600 s, of at least 1 s and at most 168 h") from None
    return value


Time = Annotated[Text, BeforeValidator(_check_time)]
Restarts = Annotated[Text, BeforeValidator(_check_rate)]
Interval = Annotated[Annotated[int, Field(ge=1)] | Text | None, BeforeValidator(_check_interval)]


class Section(BaseModel):
    """A section of a recipe. Unknown keys are rejected; a recipe is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    def changed(self) -> list[str]:
        """Return the keys whose values are not the defaults: a resolved recipe has every key, written or not."""
        fields = type(self).model_fields.items()
        return [key for key, field in fields if getattr(self, key) != field.get_default(call_default_factory=True)]


class Contradiction(NamedTuple):
    """``keys``: the contradicting dotted keys, the most relevant first."""

    keys: tuple[str, ...]
    message: str


class Contradictions(ValueError):
    """All contradictions of a recipe; raised inside pydantic's validation, which wraps it."""

    def __init__(self, items: list[Contradiction]) -> None:
        super().__init__("; ".join(f"{item.keys[0]}: {item.message}" for item in items))
        self.items = items


_ENTRY_POINT = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"


def is_entry_point(value: Any) -> bool:
    """Return whether a value is a place ``module:Name`` or ``file.py:Name``."""
    return isinstance(value, str) and re.fullmatch(_ENTRY_POINT, value) is not None


@dataclass(frozen=True)
class Registered:
    """Annotate a key as ``Annotated[str, Registered(registry)]``: a name of the registry, or a place
    ``module:Name``.

    Args:
        others: additional values.
        imports: whether to import extensions when the recipe is read, because they say what it may contain.
    """

    registry: Registry[Any]
    others: tuple[str, ...] = ()
    imports: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._checked, core_schema.literal_schema([*self.others, *self.registry.names()])
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        names = {"enum": [*self.others, *self.registry.names()], "type": "string"}
        return {"anyOf": [names, {"type": "string", "pattern": f"^{_ENTRY_POINT}$"}]}

    def _checked(self, value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> str:
        try:
            name: str = value if is_entry_point(value) else handler(value)
        except ValidationError as error:
            (detail,) = error.errors()
            choices = f"{detail['ctx']['expected']} (your own: {OWN})"
            raise PydanticKnownError("literal_error", {"expected": choices}) from None
        try:
            if not self.imports:
                self.registry.check_origin(name)
            elif name not in self.others and not self.registry.is_built_in(name):
                self.registry.get(name)
        except RequestError as error:
            raise PydanticCustomError("extension", "{reason}", {"reason": str(error)}) from None
        return name
