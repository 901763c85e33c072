"""The place in the product's code from which an operation was called."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[2])
_SIMULATION = str(Path(__file__).parents[1])
_INSTALLED = ("site-packages/", "dist-packages/")
_STANDARD = sysconfig.get_path("stdlib")


def place() -> str:
    """Return the innermost line of this package that is running, and that of other code below it.

    ``models/causal_lm.py:148 _hidden (transformers/masking_utils.py:93 create_mask)``
    """
    return _place(_frames(sys._getframe(1)))


def place_of(error: BaseException) -> str:
    """Return the place where an exception was raised, as ``place``."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return _place(reversed(found))


_Line = tuple[str, int, str]  # file, line, function


def _frames(frame: FrameType | None) -> Iterator[_Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _place(lines: Iterator[_Line]) -> str:
    """Return the place of the innermost of ``lines``, innermost first."""
    other = ""
    for file, line, function in lines:
        if file.startswith(_PACKAGE):
            if not file.startswith(_SIMULATION):
                own = f"{file[len(_PACKAGE) + 1 :]}:{line} {function}"
                return f"{own} ({other})" if other else own
        elif not other and (name := _name(file)):
            other = f"{name}:{line} {function}"
    return other or "outside the package"


def _name(file: str) -> str:
    """Return a short name of a file of other code; empty for torch's, Python's own, and generated code."""
    installed = next((file.partition(part)[2] for part in _INSTALLED if part in file), None)
    if installed is not None:
        return "" if installed.startswith("torch/") else installed
    return "" if file.startswith(("<", _STANDARD)) else Path(file).name
