"""A machine that a file describes, used instead of this one. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.files import read_json

VARIABLE = "TRAINWRIGHT_MACHINE"
_LEAST_ONE = ("cpu_cores", "memory_bytes")


def described_machine() -> Machine | None:
    """Return the machine of the file that ``$TRAINWRIGHT_MACHINE`` names; None if it is not set.

    Raises:
        RequestError: the file cannot be read or does not describe a machine.
    """
    file = os.environ.get(VARIABLE)
    return read_machine(Path(file)) if file else None


def read_machine(file: Path) -> Machine:
    """Return the machine that ``trainwright machine --json`` has written to ``file``.

    Raises:
        RequestError: the file cannot be read or does not describe a machine.
    """
    from pydantic import TypeAdapter, ValidationError

    from trainwright.machine.written import measured_in

    try:
        values = read_json(file)
    except RequestError as error:
        raise RequestError(f"{VARIABLE}: {error}; {_ADVICE}") from None
    if not isinstance(values, dict) or values.get("machine") is None:
        raise RequestError(f"{VARIABLE}: {file} has no key `machine`; {_ADVICE}")
    measured_in(values, "measurement", file)
    try:
        found: Machine = TypeAdapter(Machine).validate_json(json.dumps(values["machine"]))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("machine", *first["loc"])))
        raise RequestError(f"{VARIABLE}: {file}: {key}: {first['msg']}; {_ADVICE}") from error
    for key in _LEAST_ONE:
        if getattr(found, key) < 1:
            raise RequestError(f"{VARIABLE}: {file}: machine.{key}: expected at least 1, not {getattr(found, key)}")
    if not (math.isfinite(found.processor.clock) and found.processor.clock > 0):
        expected = f"expected a finite number above 0, not {found.processor.clock}"
        raise RequestError(f"{VARIABLE}: {file}: machine.processor.clock: {expected}")
    return replace(found, described_by=str(file), is_here=False)


_ADVICE = "write the file with `trainwright machine --json` on that machine"
