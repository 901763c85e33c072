"""The compilers that torch.compile uses on this machine. Imports no torch.

On a CPU it writes C++, for $CXX or g++ (cxx in torch/_inductor/config.py). On a GPU it writes Triton code, whose
launchers are C, for $CC, gcc, clang or cc with the headers of Python (triton/runtime/build.py); without a compiler it
stops with "Failed to find C compiler".
"""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which

_LEAST_CAPABILITY = (7, 0)  # is_triton_capable in torch/_dynamo/device_interface.py


def why_not_compiled(device: str, capability: tuple[int, int] = _LEAST_CAPABILITY) -> str | None:
    """Return why torch.compile cannot be used here for ``device``, "cuda" or "cpu", or None if it can."""
    if device == "cpu":
        return _without(_compiler(os.environ.get("CXX"), "g++"), "C++ compiler (g++, or the one in $CXX)")
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 7.0 or higher, this GPU has {capability[0]}.{capability[1]}"
    return why_no_triton()


@cache
def why_no_triton() -> str | None:
    """Return why Triton code cannot be compiled here, or None if it can."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    found = _compiler(os.environ.get("CC"), "gcc", "clang", "cc")
    return _without(found, "C compiler (gcc or clang, or the one in $CC)") or (
        None if headers.is_file() else f"needs the headers of Python, such as {headers} (Debian: python3-dev)"
    )


def _compiler(asked: str | None, *names: str) -> str | None:
    """Return the compiler that the environment names, which replaces the others, or the first that is installed."""
    for name in (asked,) if asked else names:
        if name and (found := which(name.split()[0])) is not None:
            return found
    return None


def _without(found: str | None, what: str) -> str | None:
    return None if found is not None else f"needs a {what}, which is not installed"
