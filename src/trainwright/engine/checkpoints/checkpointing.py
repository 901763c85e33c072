"""When and what to save of a run, and how to resume it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.engine.checkpoints.read_back import check_checkpoint
from trainwright.engine.checkpoints.saving import Saving
from trainwright.engine.events import CheckpointWritten, Fault
from trainwright.engine.policies.base import StepPolicy, Training
from trainwright.engine.progress import TrainingProgress
from trainwright.errors import RequestError, TrainingError


class Checkpointing:
    """Save and resume a run.

    Attributes:
        step: the step of the newest checkpoint; None if there is none.
    """

    def __init__(self, training: Training, checkpoints: Checkpoints, policies: Sequence[StepPolicy]) -> None:
        self.step: int | None = None
        self._training = training
        self._checkpoints = checkpoints
        self._policies = {type(policy).__name__: policy for policy in policies}
        self._saving = Saving(training.recipe.checkpoint.every)

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``; time intervals are measured by rank 0's clock."""
        return self._saving.is_due(step)

    def save(self, *, required: bool) -> None:
        """Write a checkpoint; if that fails, earlier ones still exist and training continues.

        Raises:
            TrainingError: a ``required`` checkpoint failed, so that the end of the run would not be saved.
        """
        training, world = self._training, self._training.strategy.world
        step, begun = training.progress.step, time.monotonic()
        if self.step == step:
            return
        training.events.announce("writing a checkpoint", step)
        shards = training.strategy.state()
        try:
            saved = self._checkpoints.save(world, step, shards, self._state(), training.recipe_text)
            if training.task.base is not None:
                check_checkpoint(training.task, world, saved.path, shards)
        except CheckpointError as error:
            self._saving.saved(time.monotonic() - begun)
            self._tell(str(error), "stop" if required else "continue")
            if required:
                earlier = (
                    "there is no earlier checkpoint"
                    if self.step is None
                    else f"the checkpoint of step {self.step} is valid"
                )
                hint = "" if self.step is None else "; free disk space, then --resume this run from it"
                raise TrainingError(f"stopped by a signal, but the {error}; {earlier}{hint}") from error
            return
        self.step = step
        self._saving.saved(time.monotonic() - begun)
        training.events.emit(
            CheckpointWritten(step=step, path=saved.path, seconds=saved.seconds, blocked_seconds=saved.seconds)
        )
        if world.is_main:
            self._prune()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Load the state of a checkpoint.

        Raises:
            RequestError: the examples or the frozen weights differ from those that the run was trained on.
        """
        training, saved = self._training, checkpoint.state
        self._check(checkpoint)
        try:
            progress = TrainingProgress.of(saved.get("progress", {}))
            own = {str(name): float(value) for name, value in saved.get("task", {}).items()}
            states = {name: _floats(state) for name, state in saved.get("policies", {}).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(f"{checkpoint.path}/state.json is not the state of a run: {error}") from error
        with checkpoint.reader() as reader:
            training.strategy.load_state(reader)
        training.progress = progress
        training.task.state.update(own)
        for name in states.keys() & self._policies.keys():
            self._policies[name].state.update(states[name])
        self.step = progress.step

    def _state(self) -> dict[str, Any]:
        task = self._training.task
        policies = {name: dict(policy.state) for name, policy in self._policies.items() if policy.state}
        return {
            "progress": asdict(self._training.progress),
            "data": task.stream.dataset.fingerprint,
            "base": task.base,
            "start": task.start,
            "task": dict(task.state),
            **({"policies": policies} if policies else {}),
        }

    def _check(self, checkpoint: Checkpoint) -> None:
        recipe, task = self._training.recipe, self._training.task
        if checkpoint.state.get("data") != task.stream.dataset.fingerprint:
            key, parts = recipe.spec.examples
            raise RequestError(
                f"{key}: the examples are not those of {checkpoint.path}: {parts} has changed; restore the original, "
                "or start a new run"
            )
        if checkpoint.state.get("base") != task.base:
            raise RequestError(
                f"model: the frozen weights are not those of {checkpoint.path}; restore the original model, and the "
                "original adapter below if there is one, or start a new run"
            )
        if checkpoint.state.get("start") != task.start:
            raise RequestError(
                f"model: the initial weights are not those of {checkpoint.path}, and the task uses them as the "
                "reference; restore the original model, or start a new run"
            )

    def _prune(self) -> None:
        """Remove older checkpoints; if some cannot be removed they stay, and training continues."""
        try:
            self._checkpoints.prune(self._training.progress.best_step)
        except OSError as error:
            self._tell(f"older checkpoints were not removed: {error}", "continue")

    def _tell(self, detail: str, action: str) -> None:
        step = self._training.progress.step
        self._training.events.emit(Fault(kind="checkpoint", rank=0, detail=detail, action=action, step=step))


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
