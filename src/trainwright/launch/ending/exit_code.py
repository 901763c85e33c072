"""The run's exit code, for a launcher that ends with a code of its own."""

from __future__ import annotations

import os
from contextlib import suppress

from trainwright.errors import EXIT_FINISHED

CODES_FILE = "TRAINWRIGHT_EXIT_CODES"


def record_exit_code(code: int) -> int:
    """Tell the command that runs this process's launcher, if there is one, with which code the run ends; return it."""
    if (file := os.environ.get(CODES_FILE)) is not None and code != EXIT_FINISHED:
        with suppress(OSError), open(file, "a", encoding="ascii") as out:
            out.write(f"{code}\n")
    return code
