"""The machine a measurement was made on, and the fastest it multiplies matrices."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = (1024, 2048, 3072)
SECONDS_PER_SIZE = 1.5


def describe(cores: list[int]) -> dict[str, Any]:
    """What a reader needs to judge the numbers: processor, memory, versions, and how busy the machine was."""
    processor = _field("/proc/cpuinfo", "model name") or platform.processor()
    memory = _field("/proc/meminfo", "MemTotal") or "0"
    return {
        "processor": processor,
        "bf16_instructions": "avx512_bf16" in (_field("/proc/cpuinfo", "flags") or ""),
        "cores_in_machine": os.cpu_count(),
        "cores_used": cores,
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
        **({"gpus": gpus} if (gpus := _gpus()) else {}),
    }


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of each GPU, by NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # without the library or a driver there are none
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    driver = pynvml.nvmlSystemGetDriverVersion()
    return [
        {
            "name": pynvml.nvmlDeviceGetName(handle),
            "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
            "driver": driver,
        }
        for handle in handles
    ]


def use_cores(count: int) -> list[int]:
    """Keep this process and all it starts to ``count`` cores, and say which.

    Raises:
        SystemExit: the machine has fewer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count:
        raise SystemExit(f"this bench needs {count} cores; {len(allowed)} may be used here")
    os.sched_setaffinity(0, allowed[:count])
    return allowed[:count]


def matrix_peak(threads: int) -> dict[str, float]:
    """GFLOP/s of the fastest square matrix product, by precision, measured in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    output = subprocess.run([sys.executable, __file__], env=env, check=True, capture_output=True, text=True).stdout
    peaks: dict[str, float] = json.loads(output)
    return peaks


def _measure() -> dict[str, float]:
    import torch

    return {
        name: max(_product_gflops(size, dtype) for size in SIZES)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


def _product_gflops(size: int, dtype: Any) -> float:
    import torch

    left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out = torch.mm(left, right)
    best, end = float("inf"), time.perf_counter() + SECONDS_PER_SIZE
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / 1e9


def _field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


if __name__ == "__main__":
    print(json.dumps(_measure()))
