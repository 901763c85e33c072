"""This process of a run: what its counters are, and what makes it slow."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from trainwright.machine.detect import detect
from trainwright.machine.measured.contention import usable_cores
from trainwright.machine.usage.causes import Cause, causes_of
from trainwright.machine.usage.counters import Counters, clocks
from trainwright.machine.usage.gpu import gpu_of


@dataclass(frozen=True)
class OwnProcess:
    """This process of a run.

    Attributes:
        threads: that it computes with.
        processes: of the run on this machine.
        gpu: index of its GPU among those of this machine; None if it computes on the processor.
    """

    threads: int
    processes: int = 1
    gpu: int | None = None

    @property
    def parent(self) -> int | None:
        """The process whose children are the ranks on this machine; None if this is the only one."""
        return os.getppid() if self.processes > 1 else None

    @property
    def gpu_address(self) -> str | None:
        """The PCI address of its GPU, if there is one here."""
        if self.gpu is None:
            return None
        machine = detect()
        return machine.gpus[self.gpu].address if machine.is_here and self.gpu < len(machine.gpus) else None

    def counters(self) -> Counters:
        """Return what the kernel has counted."""
        return Counters.now(self.parent)

    def since(self, before: Counters) -> dict[str, float]:
        """Return what happened since then: see `Counters.since`, with what `causes_of` wants to know beside it."""
        known = {"threads": self.threads, "processes": self.processes, "cores": usable_cores()}
        return {**known, **self.counters().since(before)}

    def causes(
        self, before: Counters, *, elsewhere: float, planned_threads: float | None = None, sleeps: bool = True
    ) -> list[Cause]:
        """Return what has made this process slow since then, largest first.

        Args:
            elsewhere: seconds for which it waited for other ranks.
            planned_threads, sleeps: see `causes_of`.
        """
        address = self.gpu_address
        return causes_of(
            {**dict(clocks()), **self.since(before)},
            elsewhere=elsewhere / max(time.monotonic() - before.wall, 1e-6),
            planned_threads=planned_threads,
            sleeps=sleeps or self.gpu is not None,
            gpu=None if address is None else gpu_of(address),
        )
