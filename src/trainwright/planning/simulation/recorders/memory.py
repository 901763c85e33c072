"""Live bytes of the simulated device's tensors, and their peak in each phase.

Storages are followed, not tensors: views share theirs. A storage is freed when the last tensor of it is gone, or when
it is resized to nothing, as FSDP2 does with gathered parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_BLOCK = 512  # bytes; sizes of CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class MemoryLog:
    """Bytes on the simulated device, as ``torch.cuda.memory_allocated`` counts them."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.peaks: dict[str, int] = {}
        self.phase = "load"
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor on the device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._sizes.get(key)
        size = _rounded(storage.nbytes())
        if known is not None:
            if known[1] != size:
                self._sizes[key] = (known[0], size)
                self._add(size - known[1])
            return
        self._sizes[key] = (weakref.ref(storage, self._forgetting(key)), size)
        self._add(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew whose size was changed."""
        known = self._sizes.get(storage._cdata)
        if known is not None:
            size = _rounded(storage.nbytes())
            self._sizes[storage._cdata] = (known[0], size)
            self._add(size - known[1])

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self._add(0)

    def reset_peak(self) -> None:
        """Forget the peak of all phases together."""
        self.peak = self.live

    def _add(self, size: int) -> None:
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        if self.live > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.live

    def _forgetting(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.live -= self._sizes.pop(key)[1]

        return forget


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
