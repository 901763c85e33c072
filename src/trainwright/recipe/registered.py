"""The type of a key whose value names something registered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, PydanticKnownError, ValidationError, core_schema

from trainwright.errors import RequestError
from trainwright.recipe.extensions import OWN, Registry

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
            expected = f"{detail['ctx']['expected']} (your own: {OWN})"
            raise PydanticKnownError("literal_error", {"expected": expected}) from None
        try:
            if not self.imports:
                self.registry.check_origin(name)
            elif name not in self.others and not self.registry.is_built_in(name):
                self.registry.get(name)
        except RequestError as error:
            raise PydanticCustomError("extension", "{reason}", {"reason": str(error)}) from None
        return name
