"""What a run took in time and memory, to be held against what was predicted of it."""

from __future__ import annotations

import os
from statistics import median

import torch

from trainwright.machine.measured.waiting import Waiting, usable_cores

# The first steps are slower than the rest: memory is had for the first time, kernels are chosen or compiled.
_WARM_UP_STEPS = 2


class Measured:
    """Gathers what the steps of this process's run took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._rates: list[float] = []
        self._memory_bytes = 0
        self._before: Waiting | None = None

    def step(self, seconds: float, tokens: int, memory_bytes: int) -> None:
        """One step: its time, its tokens, and the peak on the worst rank up to it."""
        if self._before is None or len(self._seconds) == _WARM_UP_STEPS - 1:
            self._before = Waiting.now()
        self._seconds.append(seconds)
        self._rates.append(tokens / seconds)
        self._memory_bytes = max(self._memory_bytes, memory_bytes)

    def summary(self) -> dict[str, float]:
        """Peak memory of the worst rank, and the medians of the steps after the first; empty where there was none.

        ``tensors_bytes`` beside ``memory_bytes`` where the latter is of tensors alone, as it is on a GPU.
        ``steps``: how many there were after the first, 0 where the medians are of those. ``threads`` of this process,
        how many ``processes`` and ``cores`` there are beside it, and what kept it from computing: see `Waiting.since`.
        """
        if not self._seconds or self._before is None:
            return {}
        found: dict[str, float] = {"memory_bytes": self._memory_bytes}
        if self._device.type == "cuda":
            found["tensors_bytes"] = self._memory_bytes
        seconds, rates = (values[_WARM_UP_STEPS:] or values for values in (self._seconds, self._rates))
        return {
            **found,
            "step_time": median(seconds),
            "tokens_per_second": median(rates),
            "steps": max(0, len(self._seconds) - _WARM_UP_STEPS),
            "threads": torch.get_num_threads(),
            "processes": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "cores": usable_cores(),
            **Waiting.now().since(self._before),
        }
