"""The machine that a run uses: its devices, memory and processor. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.machine.links import Link
from trainwright.machine.processor import Processor
from trainwright.machine.vendors import Vendor, look_up_device_type
from trainwright.utils.text import format_plural


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it.

    ``memory_bytes``: memory for programs, without the driver's own; ``free_bytes``: free memory now. ``link``: to the
    other GPUs of this machine. ``host_link``: to the machine's memory. ``address``: on the PCI bus, as in sysfs.
    ``unified``: its memory is the machine's. ``uuid``: None for NVIDIA's, whose library is asked for it.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    free_bytes: int | None = None
    link: Link | None = None
    host_link: Link | None = None
    address: str | None = None
    unified: bool = False
    vendor: Vendor = "NVIDIA"
    uuid: str | None = None


@dataclass(frozen=True)
class Machine:
    """The machine a run starts on. ``cpu_cores`` and ``memory_bytes`` respect affinity and cgroup limits.

    ``unusable``: reasons why accelerators in it cannot be trained on. ``memory_free_bytes``: memory available now.
    ``disk_free_bytes``: in the working directory. ``described_by``: the file that describes the machine. ``is_here``:
    the machine itself was detected, so it can be measured.
    """

    hostname: str
    cpu_name: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    memory_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    processor: Processor = field(default_factory=Processor)
    described_by: str | None = None
    unusable: tuple[str, ...] = ()
    is_here: bool = False

    @property
    def device(self) -> str:
        """The type of the device to compute on, as in torch."""
        return look_up_device_type(self.gpus[0].vendor if self.gpus else "CPU")

    @property
    def usable_bytes(self) -> int:
        """Host memory available now; all of it if that is unknown."""
        return self.memory_bytes if self.memory_free_bytes is None else self.memory_free_bytes

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 matrix products are computed by the hardware rather than emulated."""
        if self.gpus:
            return all(gpu.vendor != "NVIDIA" or gpu.capability >= (8, 0) for gpu in self.gpus)
        return self.processor.has_bf16

    def describe(self) -> str:
        """Describe the machine in one line."""
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0].name}, {self.gpus[0].memory_bytes / 2**30:.0f} GiB each"
        return f"{self.cpu_name}, {format_plural(self.cpu_cores, 'core')}, {self.memory_bytes / 2**30:.0f} GiB"
