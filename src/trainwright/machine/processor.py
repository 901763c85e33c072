"""A CPU as a device to train on: nominal rates from its clock and instruction sets; and compilers.

On a CPU torch.compile writes C++, for $CXX or g++ (cxx in torch/_inductor/config.py). On a GPU it writes Triton code,
whose launchers are C, for $CC, gcc, clang or cc with the headers of Python (triton/runtime/build.py); without a
compiler it stops with "Failed to find C compiler". Imports no torch.

Bind a process to the cores and the memory of its GPU's NUMA node. Imports no torch.

Copies between a GPU and memory of another node pass the link between processors, which all GPUs there share. See
Documentation/ABI/testing/sysfs-bus-pci and Documentation/ABI/stable/sysfs-devices-node of the kernel.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from trainwright.machine.catalog import Card
from trainwright.machine.cgroups import iterate_groups, read_text
from trainwright.machine.links import build_memory_link
from trainwright.utils.text import format_plural

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
    def has_amx(self) -> bool:
        """Return whether the processor multiplies matrices in bf16 by units of their own."""
        return "amx_bf16" in self.instructions

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
        if self.has_amx:
            per_cycle["bf16"] = _AMX_BF16
        elif self.has_bf16:
            per_cycle["bf16"] = 2 * single
        return {precision: count * self.clock for precision, count in per_cycle.items()}


def detect_processor() -> Processor:
    """Return the processor that this process runs on, as far as the kernel reports it."""
    text = read_text(Path("/proc/cpuinfo"))
    flags = (_find_field(text, "flags") or _find_field(text, "Features")).split()
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    family = _find_field(text, "cpu family")
    return Processor(
        vendor=_find_field(text, "vendor_id"),
        family=int(family) if family.isdigit() else 0,
        instructions=tuple(sorted(_INSTRUCTIONS.intersection(flags))),
        clock=max(map(float, clocks)) * 1e6 if clocks else _CLOCK,
    )


def build_cpu_card(machine: Machine) -> Card:
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
        link=build_memory_link(bandwidth),
        host_link=build_memory_link(bandwidth),
        watts=_WATTS_PER_CORE * machine.cpu_cores,
    )


def has_amx(card: Card) -> bool:
    """Return whether a CPU as a device has AMX, by its nominal rates."""
    return card.rates.get("bf16", 0.0) >= _AMX_BF16 / _AVX512 * card.rates["fp32"]


def _find_field(text: str, name: str) -> str:
    """Return the value of the first line of ``text`` with this name."""
    match = re.search(rf"^{re.escape(name)}\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


_LEAST_CAPABILITY = (7, 0)  # is_triton_capable in torch/_dynamo/device_interface.py


def explain_no_compile(device: str, capability: tuple[int, int] = _LEAST_CAPABILITY) -> str | None:
    """Return why torch.compile cannot be used here for ``device``, "cuda" or "cpu", or None if it can."""
    if device == "cpu":
        return _explain_missing(_find_compiler(os.environ.get("CXX"), "g++"), "C++ compiler (g++, or the one in $CXX)")
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 7.0 or higher, this GPU has {capability[0]}.{capability[1]}"
    return explain_no_triton()


@cache
def explain_no_triton() -> str | None:
    """Return why Triton code cannot be compiled here, or None if it can."""
    if find_spec("triton") is None:
        return "needs Triton, which is not installed"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = _find_compiler(os.environ.get("CC"), "gcc", "clang", "cc")
    return _explain_missing(compiler, "C compiler (gcc or clang, or the one in $CC)") or (
        None if headers.is_file() else f"needs the headers of Python, such as {headers} (Debian: python3-dev)"
    )


def _find_compiler(chosen: str | None, *names: str) -> str | None:
    """Return the compiler that the environment names, which replaces the others, or the first that is installed."""
    for name in (chosen,) if chosen else names:
        if name and (program := which(name.split()[0])) is not None:
            return program
    return None


def _explain_missing(program: str | None, what: str) -> str | None:
    return None if program is not None else f"needs a {what}, which is not installed"


_NODES = "sys/devices/system/node"
# Number of set_mempolicy(2), which the C library does not wrap, and its policy to prefer a node but use others if it is
# full: offloaded states may be larger than one node.
_SET_MEMORY_POLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
_PREFERRED = 1
_MOST_NODES = 1024


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and those of its cores that this process may use."""

    number: int
    cores: frozenset[int]


def bind(address: str | None, root: Path = Path("/")) -> str | None:
    """Bind this process to the node of the device at PCI ``address``; return what was done, None if nothing.

    Call this before threads are started, which inherit it, and before memory is used, which stays where it is.

    Args:
        root: the directory of /proc and /sys.
    """
    if address is None or not hasattr(os, "sched_setaffinity"):
        return None
    node = find_node_to_bind(address, os.sched_getaffinity(0), root)
    if node is None:
        return None
    try:
        os.sched_setaffinity(0, node.cores)
    except OSError:  # the control group has changed since
        return None
    memory = " and its memory" if prefer_memory(node.number) else ""
    return f"bound to {format_plural(len(node.cores), 'core')} of NUMA node {node.number}, its GPU's{memory}"


def find_node_to_bind(address: str, allowed: Set[int], root: Path = Path("/")) -> NumaNode | None:
    """Return the node of the device at PCI ``address``, or None if the process should stay as it is.

    That is the case if the node is not known or the only one; if the process may not use its cores; and if it is bound
    already, by a launcher or by its user: to fewer cores than its control group has.

    Args:
        allowed: the cores that the process may run on.
    """
    number = read_text(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    if not number.isdigit() or len(_parse_number_list(read_text(root / _NODES / "online"))) < 2:
        return None
    cores = _parse_number_list(read_text(root / _NODES / f"node{number}/cpulist")) & allowed
    if not cores or cores == allowed or allowed < _read_available_cores(root):
        return None
    return NumaNode(int(number), frozenset(cores))


def prefer_memory(node: int) -> bool:
    """Have the kernel allocate this process's memory on ``node`` while it has any; return whether it does."""
    number = _SET_MEMORY_POLICY.get(platform.machine())
    if number is None or not sys.platform.startswith("linux") or node >= _MOST_NODES:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    # Fails where it is not permitted, as in some containers.
    return ctypes.CDLL(None, use_errno=True).syscall(number, _PREFERRED, mask, _MOST_NODES + 1) == 0


def _read_available_cores(root: Path) -> set[int]:
    """Return the cores that processes of this control group may use, those of the machine if it sets none."""
    for group, version in iterate_groups("cpuset", root):
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        if cores := next(filter(None, (_parse_number_list(read_text(group / name)) for name in names)), None):
            return cores
    return _parse_number_list(read_text(root / "sys/devices/system/cpu/online"))


def _parse_number_list(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
