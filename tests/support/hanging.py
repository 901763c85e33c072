"""A step policy that makes one rank hang, as the variable HANG names it: KIND:RANK:STEP.

It makes the file that HANG_FILE names, if it does, just before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright import extension
from trainwright.engine.policies.base import StepPolicy, TrainingContext

LONG = 600


class Hanging(StepPolicy):
    """Hangs once, or for SECONDS of the variable HANG_SECONDS."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self.kind, rank, step = os.environ["HANG"].split(":")
        self.rank, self.step = int(rank), int(step)
        self.seconds = float(os.environ.get("HANG_SECONDS", LONG))
        self.now = 0
        training.strategy.module.register_forward_pre_hook(self._forward)
        self._wrap(training.strategy, "state", "checkpoint")
        self._wrap(training.task, "generate", "generation")

    def before(self, step: int, batch: Any, gradients: Any) -> None:
        self.now = step
        self._hang("data")
        if self._begins("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._begins("gil"):
            ctypes.PyDLL(None).sleep(int(self.seconds))

    def skips(self, step: int, found: Any) -> bool:
        self._hang("optimizer")
        return False

    def metrics(self, step: int, found: Any) -> dict[str, float]:
        while self._begins("loop"):
            pass
        return {}

    def after(self, step: int) -> None:
        self._hang("collective")
        if self.kind == "collective":
            dist.barrier()
        self._begins("missing")
        if self.kind == "missing" and self.now == self.step and self.training.world.rank != self.rank:
            dist.all_reduce(torch.ones(3))
        if self.kind == "order" and self.now == self.step:
            self._begins("order")
            calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(5), src=0)]
            for call in reversed(calls) if self._is("order") else calls:
                call()
        if self.kind == "dtype":
            dist.all_reduce(torch.ones(3, dtype=torch.float64 if self._is("dtype") else torch.float32))
        if self.kind == "shape":
            dist.all_reduce(torch.ones(1000000 if self._is("shape") else 3))

    def _is(self, kind: str) -> bool:
        return (kind, self.training.world.rank, self.now) == (self.kind, self.rank, self.step)

    def _begins(self, kind: str) -> bool:
        file = os.environ.get("HANG_FILE")
        if self._is(kind) and file is not None and not Path(file).exists():
            Path(file).touch()
        return self._is(kind)

    def _hang(self, kind: str) -> None:
        if self._begins(kind):
            time.sleep(self.seconds)

    def _forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._hang("forward" if module.training else "evaluation")

    def _wrap(self, target: Any, name: str, kind: str) -> None:
        function = getattr(target, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            self._hang(kind)
            return function(*given, **named)

        object.__setattr__(target, name, wrapped)


@extension("observer")
def slow_to_finish(run: Path) -> Callable[[dict[str, Any]], None]:
    """An observer that takes the seconds of the variable HANG_SECONDS at the end of the run."""

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "finish":
            time.sleep(float(os.environ["HANG_SECONDS"]))

    return observe


class Failing(StepPolicy):
    """Raises at step 10 of every launch that reaches it."""

    def before(self, step: int, batch: Any, gradients: Any) -> None:
        if step == 10:
            raise ValueError("this step always fails")
