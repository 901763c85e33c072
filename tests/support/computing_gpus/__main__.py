"""GPUs that compute in the memory of the host, by the kernels of the CPU: the product's code for GPUs, for real.

    python -m tests.support.computing_gpus 2xT4 train recipe.yaml ...       a command of `trainwright` on two such GPUs

GPUs of AMD are cuda devices of a build of torch that says it is for ROCm; those of Intel are xpu devices, by the same
C++ with the other names.

Unlike `--simulate`, a run is one like every other: each rank is a process, ranks exchange by gloo, and losses are those
of the same run on CPUs. An operation that mixes devices fails as it does on GPUs. Needs a C++ compiler and a build of
torch for CPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.machine.cache import find_cache_root
from trainwright.machine.describe import VARIABLE, Cluster, resolve_machine
from trainwright.planning.simulation.start import SHIM, load_shim, select_visible, write_machine

_NOT_HERE = "runs on GPUs alone, and this one is simulated"


def main() -> None:
    """Run a command of `trainwright` on the GPUs that the first argument describes."""
    compute_on(sys.argv.pop(1))
    from trainwright.__main__ import main as command

    command()


def compute_on(machine: str) -> None:
    """Replace this machine, for this process and those it forks, with one node of simulated GPUs that compute.

    This process must not have imported torch.
    """
    cluster = select_visible(resolve_machine(machine)[0])
    sources = SHIM, Path(__file__).with_name("host_memory.cpp")
    libraries = tuple(load_shim(_named_for(cluster.device, source)) for source in sources)
    _replace_machine(cluster)
    _Device(cluster, *libraries).install()


def _named_for(device_type: str, source: Path) -> Path:
    """Return a C++ source for CUDA, or its copy with the names that torch has for devices of another type."""
    if device_type == "cuda":
        return source
    text = source.read_text(encoding="utf-8").replace("explicit CUDAHooks(CUDAHooksArgs) {}", _MORE_HOOKS)
    for name in ("CUDA", "cuda"):
        text = text.replace(name, device_type.upper() if name.isupper() else device_type)
    copy = find_cache_root() / "simulation" / f"{source.stem}_{device_type}.cpp"
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not copy.is_file() or copy.read_text(encoding="utf-8") != text:
        copy.write_text(text, encoding="utf-8")
    return copy


# What torch asks of the hooks of XPU and not of those of CUDA.
_MORE_HOOKS = """
  bool hasXPU() const override { return true; }
  DeviceIndex getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  void deviceSynchronize(DeviceIndex) const override {}
"""


def _replace_machine(cluster: Cluster) -> None:
    file = find_cache_root() / "simulation" / f"{cluster.devices_per_node}x{cluster.card.name}.json"
    write_machine(cluster, file)
    os.environ[VARIABLE] = str(file)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(cluster.devices_per_node)))


class _Device:
    """The GPUs of a node to one process. It is the ``SimulatedMemory`` of the current one."""

    def __init__(self, cluster: Cluster, guards: ctypes.CDLL, memory: ctypes.CDLL) -> None:
        self._cluster = cluster
        self._guards = guards
        self._memory = memory
        for name in ("trainwright_live_bytes", "trainwright_peak_bytes"):
            getattr(memory, name).restype = ctypes.c_int64
        memory.trainwright_resize.argtypes = (ctypes.c_void_p, ctypes.c_int64)

    @property
    def live(self) -> int:
        """Bytes of the tensors that there are now."""
        return int(self._memory.trainwright_live_bytes())

    @property
    def peak(self) -> int:
        """The most that there have been at once."""
        return int(self._memory.trainwright_peak_bytes())

    def reset_peak(self) -> None:
        """Forget the peak."""
        self._memory.trainwright_reset_peak()

    def install(self) -> None:
        """Replace what of torch would ask a driver or NCCL, and the kernels that only CUDA has."""
        import torch

        from trainwright.models.attention import packs
        from trainwright.planning.simulation.device import SimulatedGpu, install_card
        from trainwright.planning.simulation.recorders import Phases, WaitLog

        card, count, device_type = self._cluster.card, self._cluster.devices_per_node, self._cluster.device
        gpu = SimulatedGpu(card.name, card.memory_bytes, card.capability, count, device_type)
        install_card(gpu, self, WaitLog(Phases()))
        if card.vendor == "AMD":
            torch.version.hip = "7.0"
        self._guards.trainwright_devices(count)
        own: dict[str, Any] = {
            "current_device": self._current,
            "set_device": self._set_device,
            "device": self._on,
            "manual_seed": torch.default_generator.manual_seed,
            "manual_seed_all": torch.default_generator.manual_seed,
            "default_generators": (torch.default_generator,) * count,
        }
        for name, value in own.items():
            setattr(torch.get_device_module(device_type), name, value)
        torch.accelerator.current_device_index = self._current
        self._resizing()
        _exchange_by_gloo()
        missing = tuple((name, _NOT_HERE) for name in ("flash_attn_4", "flash_attn_3", "varlen", "flash_attn", "flex"))
        packs.list_missing_kernels = lambda: missing  # type: ignore[assignment]

    def _current(self) -> int:
        return int(self._guards.trainwright_current())

    def _set_device(self, device: Any) -> None:
        import torch

        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            self._guards.trainwright_set_current(index)

    @contextlib.contextmanager
    def _on(self, device: Any) -> Iterator[None]:
        before = self._current()
        self._set_device(device)
        try:
            yield
        finally:
            self._set_device(before)

    def _resizing(self) -> None:
        import torch

        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device.type == "cpu":
                return plain(storage, size)
            self._memory.trainwright_resize(storage._cdata, size)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]


def _exchange_by_gloo() -> None:
    """Have gloo exchange the tensors of GPUs too, in place of NCCL or XCCL."""
    import torch.distributed as dist

    group: Any = dist
    begin = group.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        begin(backend.replace("nccl", "gloo").replace("xccl", "gloo"), *args, **kwargs)

    group.init_process_group = init_process_group


if __name__ == "__main__":
    main()
