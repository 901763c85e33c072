"""A CPU as a device to train on: nominal rates from its clock and instruction sets. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from trainwright.machine.catalogue import Card
from trainwright.machine.detect import Machine, cpu_flags
from trainwright.machine.links import memory

# Multiply-adds of fp32 a core finishes in a cycle, times two; two vector units.
_AVX512, _AVX2, _NEON = 64, 32, 16
_AMX_BF16 = 2048
_BYTES_PER_CORE, _MOST_BYTES = 10e9, 200e9  # a server's core alone, and its whole socket
_CLOCK = 2.5e9  # where the kernel does not tell
_WATTS_PER_CORE = 5
_FIRST_AMD_WITH_WIDE_UNITS = 26  # the family of Zen 5; Zen 4 does 512 bits in two passes


def cpu_card(machine: Machine) -> Card:
    """All cores that ``machine`` lets this process use, as one device. Nominal: measuring is better."""
    text = _read("/proc/cpuinfo")
    per_cycle = _operations_per_cycle(text)
    speed = machine.cpu_cores * _clock(text)
    bandwidth = min(_MOST_BYTES, _BYTES_PER_CORE * machine.cpu_cores)
    return Card(
        name=machine.cpu_name,
        vendor="CPU",
        architecture="CPU",
        capability=(0, 0),
        memory_bytes=machine.memory_bytes,
        nominal_bytes=machine.memory_bytes,
        memory_bandwidth=bandwidth,
        rates={precision: count * speed for precision, count in per_cycle.items()},
        link=memory(bandwidth),
        host_link=memory(bandwidth),
        watts=_WATTS_PER_CORE * machine.cpu_cores,
    )


def _operations_per_cycle(text: str) -> dict[str, int]:
    flags = cpu_flags()
    if "avx512f" in flags:
        family = re.search(r"^cpu family\s*:\s*(\d+)", text, re.MULTILINE)
        narrow = "AuthenticAMD" in text and family and int(family[1]) < _FIRST_AMD_WITH_WIDE_UNITS
        single = _AVX2 if narrow else _AVX512
    else:
        single = _AVX2 if "avx2" in flags else _NEON
    rates = {"fp32": single}
    if "amx_bf16" in flags:
        rates["bf16"] = _AMX_BF16
    elif flags & {"avx512_bf16", "bf16"}:
        rates["bf16"] = 2 * single
    return rates


def _clock(text: str) -> float:
    found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return max(float(value) for value in found) * 1e6 if found else _CLOCK


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
