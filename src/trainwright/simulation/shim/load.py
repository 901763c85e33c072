"""Compile the shim once, and load it into this process before torch. Imports no torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from trainwright.activity import doing
from trainwright.errors import MachineError
from trainwright.machine.accelerators import installed_build
from trainwright.machine.cache import cache_root

_SOURCE = Path(__file__).with_name("no_cuda.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_loaded = False


def load() -> None:
    """Make a build of torch for CPUs believe in a CUDA device; a build for CUDA does as much itself.

    Raises:
        MachineError: there is no C++ compiler, or it cannot compile against the installed torch.
    """
    global _loaded
    if _loaded:
        return
    assert "torch" not in sys.modules, "torch asks for its hooks once, when it is imported"
    root = _torch()
    if not (root / "lib" / "libtorch_cuda.so").exists():
        ctypes.CDLL(str(_compiled(root)), mode=ctypes.RTLD_GLOBAL)
    _loaded = True


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency of this package"
    return Path(spec.origin).parent


def _compiled(root: Path) -> Path:
    """Return the compiled shim for the torch in ``root``, from the cache if it was compiled before."""
    identity = f"{installed_build()} {root} {sys.platform}".encode() + _SOURCE.read_bytes()
    made = cache_root() / "simulation" / f"no_cuda-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if made.exists():
        return made
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise MachineError(
            f"--simulate: compiles {_SOURCE.stat().st_size // 1024 + 1} KiB of C++ once, and there is no compiler "
            f"({', '.join(_COMPILERS)}); install one (apt install g++), or set CXX to its path"
        )
    doing("compiling the simulated device")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"--simulate: {made.parent} cannot be written: {error.strerror}; set TRAINWRIGHT_CACHE"
        ) from None
    scratch = made.with_suffix(f".{secrets.token_hex(4)}")
    library = root / "lib"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(_SOURCE), f"-L{library}"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}", "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise MachineError(
            f"--simulate: {compiler} could not compile {_SOURCE.name} for {installed_build().version}: {first}"
        )
    scratch.replace(made)
    return made
