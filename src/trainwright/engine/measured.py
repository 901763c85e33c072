"""The measured time and memory of a run, to compare with the plan's prediction."""

from __future__ import annotations

import time
from statistics import mean, median

import torch

from trainwright import heartbeat
from trainwright.machine.usage.counters import Counters
from trainwright.machine.usage.own_process import OwnProcess

# The first steps are slower than the rest: memory is allocated, kernels are chosen or compiled.
_WARM_UP_STEPS = 2


class RunMeasurements:
    """Collect the measured time and memory of the steps in this process."""

    def __init__(self, device: torch.device, processes: int = 1) -> None:
        self._device = device
        self._process = OwnProcess(torch.get_num_threads(), processes)
        self._seconds: list[float] = []
        self._rates: list[float] = []
        self._memory_bytes = 0
        self._before: tuple[Counters, float] | None = None

    def step(self, seconds: float, tokens: int, memory_bytes: int) -> None:
        """Record one step: its time, its tokens, and the largest peak of any rank so far."""
        if self._before is None or len(self._seconds) == _WARM_UP_STEPS - 1:
            self._before = self._process.counters(), heartbeat.in_collectives()
        self._seconds.append(seconds)
        self._rates.append(tokens / seconds)
        self._memory_bytes = max(self._memory_bytes, memory_bytes)

    def summary(self) -> dict[str, float]:
        """Return the largest peak memory of any rank, and the speed of the steps after the first; empty without such
        steps.

        ``tokens_per_second``: the median of the steps. ``step_time``: of a step with the mean number of tokens at that
        speed, as plans predict it: steps differ in their tokens. ``tensors_bytes`` is added to ``memory_bytes`` if the
        latter counts only tensors, as on a GPU. ``steps``: the number of steps after the first, 0 if the speed is of
        the first ones. ``threads`` of this process, the number of ``processes`` and ``cores``, the part of the time
        ``in_collectives``, and what kept it from computing: see `Counters.since`.
        """
        if not self._seconds or self._before is None:
            return {}
        before, waited = self._before
        found: dict[str, float] = {"memory_bytes": self._memory_bytes}
        if self._device.type == "cuda":
            found["tensors_bytes"] = self._memory_bytes
        seconds, rates = (values[_WARM_UP_STEPS:] or values for values in (self._seconds, self._rates))
        tokens, rate = mean(time * rate for time, rate in zip(seconds, rates, strict=True)), median(rates)
        return {
            **found,
            "step_time": tokens / rate if rate else median(seconds),
            "tokens_per_second": rate,
            "steps": max(0, len(self._seconds) - _WARM_UP_STEPS),
            "in_collectives": (heartbeat.in_collectives() - waited) / max(time.monotonic() - before.wall, 1e-6),
            **self._process.since(before),
        }
