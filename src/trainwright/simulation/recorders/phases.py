"""The step and the phase that a run is in, by the calls that its strategy receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.engine.task import Task
    from trainwright.parallel.strategy import Strategy

# Of a step; a run is also in "load", "evaluation", "checkpoint" and "export".
STEP_PHASES = ("forward", "backward", "optimizer")


class Phases:
    """Where a run is. ``step``: the step that runs, 0 before the first one; ``finished``: the steps that are done."""

    def __init__(self, entered: Callable[[str], None] = lambda phase: None) -> None:
        self.step = 0
        self.phase = "load"
        self.finished = 0
        self._entered = entered
        self._inside = False

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self._entered(phase)

    def watch(self, task: Task, strategy: Strategy) -> None:
        """Follow a run from now on; it repeats the largest step, and an evaluation is cut to one batch."""
        stream = task.stream
        asked, stream.total_examples = stream.total_examples, None
        largest = stream.global_batch(stream.largest_step())
        stream.total_examples = asked
        stream.global_batch = lambda step: largest  # type: ignore[method-assign]
        if task.validation is not None and task.validation.total_examples is not None:
            batch = task.validation.global_batch_size
            task.validation.total_examples = min(task.validation.total_examples, batch)
        strategy.module.register_forward_pre_hook(self._passes, prepend=True)
        self._mark(strategy, "backward", "backward")
        self._mark(strategy, "gradient_norm", "optimizer")
        self._mark(strategy, "step", "optimizer")
        self._mark(strategy, "state", "checkpoint")
        self._mark(strategy, "parameters", "export")

    def _passes(self, module: Any, inputs: Any) -> None:
        if module.training:
            self.step = self.finished + 1
        self.enter("forward" if module.training else "evaluation")

    def _mark(self, strategy: Strategy, name: str, phase: str) -> None:
        """Begin ``phase`` when the method is called, except by another method of the strategy."""
        method = getattr(strategy, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self.enter(phase)
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self.finished += name == "step"

        setattr(strategy, name, call)
