"""A machine that a file describes, in place of the one at hand. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.machine.detect import Machine

VARIABLE = "TRAINWRIGHT_MACHINE"


def described_machine() -> Machine | None:
    """The machine of the file that ``$TRAINWRIGHT_MACHINE`` names; None where it is not set.

    Raises RequestError where the file cannot be read or describes no machine.
    """
    file = os.environ.get(VARIABLE)
    return read_machine(Path(file)) if file else None


def read_machine(file: Path) -> Machine:
    """The machine that ``trainwright machine --json`` has written to ``file``.

    Raises RequestError where the file cannot be read or describes no machine.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{VARIABLE}: {file}: {_reason(error)}; {_ADVICE}") from error
    if not isinstance(values, dict) or values.get("machine") is None:
        raise RequestError(f"{VARIABLE}: {file} has no key `machine`; {_ADVICE}")
    try:
        found: Machine = TypeAdapter(Machine).validate_json(json.dumps(values["machine"]))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("machine", *first["loc"])))
        raise RequestError(f"{VARIABLE}: {file}: {key}: {first['msg']}; {_ADVICE}") from error
    return replace(found, described_by=str(file))


_ADVICE = "write the file with `trainwright machine --json` on the machine that is meant"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"not JSON: {error}"
