"""Compile a shim once, and load it into this process before torch. Imports no torch."""

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

from trainwright.errors import MachineError
from trainwright.machine.accelerators import installed_build
from trainwright.machine.cache import cache_root
from trainwright.utils.activity import doing

SHIM = Path(__file__).with_name("no_cuda.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_loaded: dict[Path, ctypes.CDLL] = {}


def load() -> None:
    """Make a build of torch for CPUs believe in a CUDA device; a build for CUDA does as much itself.

    Raises:
        MachineError: there is no C++ compiler, or it cannot compile against the installed torch.
    """
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        load_shim(SHIM)


def load_shim(source: Path) -> ctypes.CDLL:
    """Return the library of a source file, compiled and loaded; before torch is imported. Raises as ``load``."""
    if source not in _loaded:
        assert "torch" not in sys.modules, "torch asks for its hooks once, when it is imported"
        _loaded[source] = ctypes.CDLL(str(_compiled(_torch(), source)), mode=ctypes.RTLD_GLOBAL)
    return _loaded[source]


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency of this package"
    return Path(spec.origin).parent


def _compiled(root: Path, source: Path) -> Path:
    """Return the compiled shim for the torch in ``root``, from the cache if it was compiled before."""
    identity = f"{installed_build()} {root} {sys.platform}".encode() + source.read_bytes()
    shared_object = cache_root() / "simulation" / f"{source.stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if shared_object.exists():
        return shared_object
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise MachineError(
            f"--simulate: compiles {source.stat().st_size // 1024 + 1} KiB of C++ once, and there is no compiler "
            f"({', '.join(_COMPILERS)}); install one (apt install g++), or set CXX to its path"
        )
    doing("compiling the simulated device")
    try:
        shared_object.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"--simulate: {shared_object.parent} cannot be written: {error.strerror}; set TRAINWRIGHT_CACHE"
        ) from None
    scratch = shared_object.with_suffix(f".{secrets.token_hex(4)}")
    library = root / "lib"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source), f"-L{library}"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}", "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise MachineError(
            f"--simulate: {compiler} could not compile {source.name} for {installed_build().version}: {first}"
        )
    scratch.replace(shared_object)
    return shared_object
