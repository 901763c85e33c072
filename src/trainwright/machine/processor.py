"""A CPU as a device to train on: nominal rates from its clock and instruction sets; and compilers.

On a CPU torch.compile writes C++, for $CXX or g++ (cxx in torch/_inductor/config.py). On a GPU it writes Triton code,
whose launchers are C, for $CC, gcc, clang or cc with the headers of Python (triton/runtime/build.py); without a
compiler it stops with "Failed to find C compiler". Imports no torch.
"""

from __future__ import annotations

import os
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from trainwright.machine.catalog import Card
from trainwright.machine.links import memory
from trainwright.machine.system_files import read

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine


# fp32 multiply-adds of a core per cycle, times two; two vector units.
_AVX512, _AVX2, _NEON = 64, 32, 16
_AMX_BF16 = 2048
_BYTES_PER_CORE, _MOST_BYTES = 10e9, 200e9  # one core of a server, and its whole socket
_CLOCK = 2.5e9  # if the kernel does not report it
_WATTS_PER_CORE = 5
_FIRST_AMD_WITH_WIDE_UNITS = 26  # the family of Zen 5; Zen 4 processes 512 bits in two passes
# The instruction sets that rates depend on; Arm processors also use the name bf16.
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_INSTRUCTIONS = _BF16 | {"avx2", "avx512f"}


@dataclass(frozen=True)
class Processor:
    """Properties that determine a core's rates, named as in /proc/cpuinfo. ``clock``: in Hz, of the fastest core."""

    vendor: str = ""
    family: int = 0
    instructions: tuple[str, ...] = ()
    clock: float = _CLOCK

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies in bf16 rather than converting to fp32."""
        return not _BF16.isdisjoint(self.instructions)

    @property
    def rates(self) -> dict[str, float]:
        """Peak operations per second of one core, by precision."""
        if "avx512f" in self.instructions:
            narrow = self.vendor == "AuthenticAMD" and 0 < self.family < _FIRST_AMD_WITH_WIDE_UNITS
            single = _AVX2 if narrow else _AVX512
        else:
            single = _AVX2 if "avx2" in self.instructions else _NEON
        per_cycle = {"fp32": single}
        if "amx_bf16" in self.instructions:
            per_cycle["bf16"] = _AMX_BF16
        elif self.has_bf16:
            per_cycle["bf16"] = 2 * single
        return {precision: count * self.clock for precision, count in per_cycle.items()}


def detect_processor() -> Processor:
    """Return the processor that this process runs on, as far as the kernel reports it."""
    text = read(Path("/proc/cpuinfo"))
    flags = (_field(text, "flags") or _field(text, "Features")).split()
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    family = _field(text, "cpu family")
    return Processor(
        vendor=_field(text, "vendor_id"),
        family=int(family) if family.isdigit() else 0,
        instructions=tuple(sorted(_INSTRUCTIONS.intersection(flags))),
        clock=max(map(float, clocks)) * 1e6 if clocks else _CLOCK,
    )


def cpu_card(machine: Machine) -> Card:
    """Return all cores that ``machine`` lets this process use as one device, with nominal rates."""
    bandwidth = min(_MOST_BYTES, _BYTES_PER_CORE * machine.cpu_cores)
    return Card(
        name=machine.cpu_name,
        vendor="CPU",
        architecture="CPU",
        capability=(0, 0),
        memory_bytes=machine.memory_bytes,
        nominal_bytes=machine.memory_bytes,
        memory_bandwidth=bandwidth,
        rates={precision: rate * machine.cpu_cores for precision, rate in machine.processor.rates.items()},
        link=memory(bandwidth),
        host_link=memory(bandwidth),
        watts=_WATTS_PER_CORE * machine.cpu_cores,
    )


def _field(text: str, name: str) -> str:
    """Return the value of the first line of ``text`` with this name."""
    match = re.search(rf"^{re.escape(name)}\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


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
    compiler = _compiler(os.environ.get("CC"), "gcc", "clang", "cc")
    return _without(compiler, "C compiler (gcc or clang, or the one in $CC)") or (
        None if headers.is_file() else f"needs the headers of Python, such as {headers} (Debian: python3-dev)"
    )


def _compiler(chosen: str | None, *names: str) -> str | None:
    """Return the compiler that the environment names, which replaces the others, or the first that is installed."""
    for name in (chosen,) if chosen else names:
        if name and (program := which(name.split()[0])) is not None:
            return program
    return None


def _without(program: str | None, what: str) -> str | None:
    return None if program is not None else f"needs a {what}, which is not installed"
