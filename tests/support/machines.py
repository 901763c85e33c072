"""Machines of many kinds, as `trainwright machine --json` describes them there; for TRAINWRIGHT_MACHINE."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from trainwright.machine.links import Link, build_fabric_link, build_pcie_link
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.processor import Processor

GIB = 2**30

_AVX2 = ("avx2",)
_AVX512 = ("avx2", "avx512f")
_BF16 = ("avx2", "avx512_bf16", "avx512f")
_AMX = ("amx_bf16", *_BF16)
_HASWELL = Processor("GenuineIntel", 6, _AVX2, 2.3e9)
_SKYLAKE = Processor("GenuineIntel", 6, _AVX512, 2.0e9)
_SAPPHIRE_RAPIDS = Processor("GenuineIntel", 6, _AMX, 2.0e9)
_ROME = Processor("AuthenticAMD", 23, _AVX2, 2.25e9)


def _cores(name: str, cores: int, gib: int, processor: Processor, free: float | None = 0.9) -> Machine:
    memory = gib * GIB
    left = None if free is None else int(memory * free)
    return Machine("described", name, cores, memory, (), left, 200 * GIB, processor)


def _gpus(*gpus: Gpu, cores: int, gib: int, processor: Processor = _SAPPHIRE_RAPIDS) -> Machine:
    return Machine("described", "a processor", cores, gib * GIB, gpus, gib * GIB * 9 // 10, 2000 * GIB, processor)


def _gpu(name: str, gib: float, capability: tuple[int, int], link: Link | None, host_link: Link) -> Gpu:
    return Gpu(name, int(gib * GIB), capability, int(gib * 0.98 * GIB), link, host_link)


_H100 = _gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0), build_fabric_link("nvlink", 4, 450e9, 8), build_pcie_link(5))
_T4 = _gpu("Tesla T4", 14.7, (7, 5), build_pcie_link(3, direct=False), build_pcie_link(3))
_P100 = _gpu("Tesla P100-PCIE-16GB", 15.9, (6, 0), build_pcie_link(3, direct=False), build_pcie_link(3))

MACHINES: dict[str, Machine] = {
    # Without units for bf16.
    "1-core": _cores("a virtual core", 1, 2, Processor("GenuineIntel", 6, _AVX2, 2.2e9), free=0.6),
    "2-cores-no-vectors": _cores("Intel(R) Atom(TM) CPU", 2, 4, Processor("GenuineIntel", 6, (), 1.6e9)),
    "4-cores-avx2": _cores("Intel(R) Core(TM) i5-8350U CPU", 4, 8, Processor("GenuineIntel", 6, _AVX2, 3.6e9)),
    "6-cores-zen-2": _cores("AMD Ryzen 5 3600 6-Core Processor", 6, 16, Processor("AuthenticAMD", 23, _AVX2, 4.2e9)),
    "28-cores-haswell": _cores("Intel(R) Xeon(R) CPU E5-2695 v3 @ 2.30GHz", 28, 256, _HASWELL),
    "40-cores-avx512": _cores("Intel(R) Xeon(R) Gold 6138 CPU @ 2.00GHz", 40, 192, _SKYLAKE),
    "128-cores-zen-2": _cores("AMD EPYC 7742 64-Core Processor", 128, 1024, _ROME),
    # With them, or with an instruction that does not say how fast they are.
    "2-cores-avx512-bf16": _cores("Intel(R) Xeon(R) Processor", 2, 8, Processor("GenuineIntel", 6, _BF16, 2.1e9)),
    "2-cores-amx": _cores("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", 2, 8, _SAPPHIRE_RAPIDS),
    "112-cores-amx": _cores("Intel(R) Xeon(R) Platinum 8480+", 112, 512, _SAPPHIRE_RAPIDS),
    "16-cores-zen-4": _cores("AMD Ryzen 9 7950X", 16, 64, Processor("AuthenticAMD", 25, _BF16, 4.5e9)),
    "96-cores-zen-5": _cores("AMD EPYC 9655", 96, 768, Processor("AuthenticAMD", 26, _BF16, 2.6e9)),
    # Of Arm; what is not Linux tells neither clock nor instructions.
    "4-cores-neon": _cores("aarch64", 4, 4, Processor(clock=1.8e9)),
    "80-cores-neon": _cores("Neoverse-N1", 80, 256, Processor(clock=3.0e9)),
    "64-cores-neon-bf16": _cores("Neoverse-V1", 64, 128, Processor(instructions=("bf16",), clock=2.6e9)),
    "8-cores-apple": _cores("arm", 8, 16, Processor(), free=None),
    # With GPUs, used or not.
    "rtx-4090": _gpus(
        _gpu("NVIDIA GeForce RTX 4090", 23.6, (8, 9), build_pcie_link(4, direct=False), build_pcie_link(4)),
        cores=24,
        gib=64,
        processor=Processor("GenuineIntel", 6, _AVX2, 5.5e9),
    ),
    "8-h100": _gpus(*[_H100] * 8, cores=128, gib=1024),
    "t4-and-p100": _gpus(_T4, _P100, cores=8, gib=30, processor=_SKYLAKE),
    "amd-gpus-unused": Machine(
        *("described", "AMD EPYC 9554 64-Core Processor", 64, 1024 * GIB, (), 900 * GIB, 2000 * GIB),
        processor=Processor("AuthenticAMD", 25, _BF16, 3.1e9),
        unusable=("there are 8 AMD GPUs (ROCm), and torch 2.13.0+cpu is a build for CPUs",),
    ),
}


def write(name: str, directory: Path) -> Path:
    """A file in ``directory`` that describes the machine ``name``."""
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"machine": asdict(MACHINES[name])}), encoding="utf-8")
    return file
