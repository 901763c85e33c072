"""When and what to save of a run, and how to resume it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainwright.engine.checkpoints.background import Background, BackgroundChoice
from trainwright.engine.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    SavedCheckpoint,
    own_blocks,
)
from trainwright.engine.checkpoints.export import check_checkpoint
from trainwright.engine.checkpoints.manifest import UnreadableCheckpoint
from trainwright.engine.checkpoints.parent import KEY, ParentCheckpoint, has_same_batches
from trainwright.engine.checkpoints.saving import Saving, SlowedSteps
from trainwright.engine.checkpoints.uploader import Copies
from trainwright.engine.events import CheckpointWritten, Fault, Notice
from trainwright.engine.policies.base import StepPolicy, TrainingContext
from trainwright.engine.progress import EVALUATION, Patience, TrainingProgress
from trainwright.errors import EXIT_FAULT, EXIT_MACHINE, EXIT_REQUEST, RequestError, TrainingError, build_error
from trainwright.parallel.layout import Shard
from trainwright.utils import heartbeat

# checkpoint.on_failure: stop.
_MAX_FAILURES = 3
# What another try of the machine would not change; other errors of a disk are its failure.
_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE, errno.ENFILE)
_CANNOT = tuple(map(os.strerror, _CODES))


class NothingSaved(TrainingError):
    """No checkpoint can be written any more; raised on every rank, between two steps."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.exit_code = EXIT_MACHINE if any(words in message for words in _CANNOT) else EXIT_FAULT


class Checkpointing:
    """Save and resume a run.

    Args:
        policies: whose state is saved.
        trusted_before: returns a step; the newest checkpoint from before it is kept.

    Attributes:
        step: the step of the newest checkpoint that is complete; None if there is none.
        parent: the checkpoint of another run that the run started from, as recorded; None without one.
    """

    def __init__(
        self,
        training: TrainingContext,
        checkpoints: Checkpoints,
        policies: Sequence[StepPolicy],
        trusted_before: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._trusted_before = trusted_before
        self.step: int | None = None
        self.parent: dict[str, Any] | None = None
        # The lowest validation loss and its step, as of the newest complete checkpoint and of the one being written.
        self._best: tuple[float | None, int | None] = (None, None)
        self._best_at_start: tuple[float | None, int | None] = (None, None)
        self._training = training
        self._checkpoints = checkpoints
        self._policies = _index_by_name(policies)
        # What they begin with: a checkpoint has no state that is set later.
        self._first_task_state = dict(training.task.state)
        self._first_states = {name: dict(policy.state) for name, policy in self._policies.items()}
        self._saving = Saving(training.recipe.checkpoint.every, training.recipe.faults.mean_time_between)
        self._background = Background(checkpoints, training.world)
        self._choice = BackgroundChoice(training.recipe.checkpoint.background, training.world)
        urls = training.recipe.checkpoint.copies if training.world.is_main else []
        self._copies = Copies(urls, checkpoints.directory)
        self._is_ready = False
        self._failures = 0  # in a row
        self._is_ending = False
        self._blocked = 0.0  # seconds that training has waited for the checkpoint that is being written
        self._slowed = SlowedSteps()
        if training.recipe.checkpoint.background is True and training.task.base is not None:
            raise RequestError(
                "checkpoint.background: true cannot be used with an adapter, whose checkpoints are small and compared "
                "with the weights of every rank before training goes on; set it to auto or false"
            )

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``; time intervals are measured by rank 0's clock."""
        return self._saving.is_due(step, writing=self._background.step is not None)

    @property
    def started_step(self) -> int | None:
        """The step of the newest checkpoint, complete or being written."""
        return self.step if self._background.step is None else self._background.step

    @property
    def report(self) -> float:
        """What the other ranks need to know of this rank's checkpoint, to be passed to ``advance``."""
        return self._background.report

    def save(self, *, required: bool, wait: bool = False) -> None:
        """Write a checkpoint; if that fails, earlier ones still exist and training continues.

        One that is still being written is completed first. With ``required`` or ``wait`` the checkpoint is complete
        when this returns.

        Raises:
            TrainingError: a ``required`` checkpoint failed, so that the end of the run would not be saved.
            NothingSaved: as many in a row have failed as ``checkpoint.on_failure`` allows, and steps are left.
        """
        self._is_ending = self._is_ending or required
        training, step = self._training, self._training.progress.step
        self._flush()  # counted in the time of the checkpoint that it completes
        if self.step == step:
            return
        started_at = time.monotonic()
        self._best_at_start = training.progress.best_loss, training.progress.best_step
        training.events.announce("writing a checkpoint", step)
        heartbeat.begin_phase("checkpoint", step)
        shards = training.strategy.state()
        if not required and not wait and self._uses_background(shards):
            changing = {buffer.data_ptr() for buffer in training.strategy.module.buffers()}
            self._background.begin(step, shards, self._state(), training.recipe_text, changing)
            self._saving.started()
            self._blocked = time.monotonic() - started_at
            return
        cpu_started_at = time.process_time()
        try:
            saved_checkpoint = self._checkpoints.save(training.world, step, shards, self._state(), training.recipe_text)
            if training.task.base is not None:
                check_checkpoint(training.task, training.world, saved_checkpoint.path, shards)
        except CheckpointError as error:
            self._saving.started()
            self._failed(step, error, time.monotonic() - started_at, required=required)
        else:
            self._saving.started()
            self._blocked = time.monotonic() - started_at
            self._choice.written(_own_bytes(shards), (time.process_time() - cpu_started_at) / self._blocked)
            self._saved(step, saved_checkpoint)

    def before_update(self) -> None:
        """Wait until the checkpoint that is being written no longer needs the weights; call it before they change."""
        if not self._background.is_copied:
            started_at = time.monotonic()
            heartbeat.begin_phase("checkpoint", self._background.step or -1)
            self._background.wait_copied()
            self._blocked += time.monotonic() - started_at

    def advance(self, reports: Sequence[float]) -> None:
        """Continue the checkpoint being written as far as every rank's ``report`` allows; call it after each step."""
        if not self._is_ready:
            self._get_ready()
        self._conclude(lambda: self._background.advance(reports))

    def after_step(self, seconds: float, tokens: int) -> None:
        """Count what the checkpoint that is being written has cost a step; call it before ``advance``."""
        more = self._slowed.add(seconds, tokens, beside=self._background.step is not None)
        if (local_heartbeat := heartbeat.find_own_heartbeat()) is not None:
            local_heartbeat.slowed += more

    def _get_ready(self) -> None:
        """Allocate memory for the copy, once the state has its size: after the first step."""
        self._is_ready = True
        if self._training.recipe.checkpoint.every is None:
            return
        shards = self._training.strategy.state()
        if self._uses_background(shards):
            self._background.get_ready(_own_bytes(shards))

    def copy_model(self, final: Path) -> None:
        """Copy the model of the run, a directory ``final``, to ``checkpoint.copies``; ``close`` waits for it."""
        if self._training.world.is_main:
            self._copies.add_model(final)

    def close(self) -> None:
        """Complete the checkpoint that is being written, and the copies."""
        self._is_ending = True
        self._flush()
        self._background.close()
        heartbeat.begin_phase("copies", self._training.progress.step)
        self._copies.wait()
        self._report_copies()

    def _report_copies(self) -> None:
        for problem in self._copies.problems():
            self._report(problem, "continue")
        for line in self._copies.take_recovered():
            self._training.events.emit(Notice(message=line))

    def complete(self) -> int | None:
        """Complete the checkpoint that is being written; return the step of the newest one that is complete."""
        self._flush()
        return self.step

    def _flush(self, may_stop: bool = True) -> None:
        if self._background.step is not None:
            heartbeat.begin_phase("checkpoint", self._background.step)
            self._conclude(self._background.flush, waits=True, may_stop=may_stop)

    def _conclude(
        self, work: Callable[[], SavedCheckpoint | None], *, waits: bool = False, may_stop: bool = True
    ) -> None:
        """Do a part of the work on the checkpoint that is being written, which may end it.

        Args:
            waits: whether ``work`` waits for the disk, which later checkpoints are not expected to do.
            may_stop: whether a failure may end the run.
        """
        started_at, step = time.monotonic(), self._background.step
        if step is None:
            return
        try:
            saved_checkpoint = work()
        except CheckpointError as error:
            later = "" if self._background.usable else "; training waits for checkpoints from now on"
            seconds = 0.0 if waits else time.monotonic() - started_at
            self._failed(step, CheckpointError(f"{error}{later}"), self._blocked + seconds, may_stop=may_stop)
            return
        seconds = time.monotonic() - started_at
        self._blocked += seconds
        if saved_checkpoint is not None:
            self._saved(step, saved_checkpoint, waited=seconds if waits else 0.0)

    def _saved(self, step: int, saved: SavedCheckpoint, waited: float = 0.0) -> None:
        self.step, self._best, started_at, self._failures = step, self._best_at_start, time.monotonic(), 0
        heartbeat.begin_phase("checkpoint", step)  # one from the background is complete while another phase goes on
        if self._training.world.is_main:
            self._prune()
            self._copies.add(saved.path)
            self._report_copies()
        self._training.world.barrier()  # it may have removed for long
        self._blocked += time.monotonic() - started_at
        slowed_seconds = self._slowed.take()
        self._saving.record_seconds(self._blocked - waited + slowed_seconds)
        self._training.events.emit(
            CheckpointWritten(
                step=step,
                path=saved.path,
                seconds=saved.seconds,
                blocked_seconds=self._blocked,
                slowed_seconds=slowed_seconds,
                copy_seconds=self._copies.seconds,
            )
        )

    def _failed(
        self, step: int, error: CheckpointError, seconds: float, *, required: bool = False, may_stop: bool = True
    ) -> None:
        self._saving.failed(seconds + self._slowed.take())
        progress = self._training.progress
        if progress.best_step == step:  # which is lost: the one before is the best that there is
            progress.best_loss, progress.best_step = self._best
        self._failures += 1
        stops = self._failures >= _MAX_FAILURES and may_stop and self._stops
        self._report(str(error), "stop" if required or stops else "continue")
        if stops and not required:
            earlier = "none was written" if self.step is None else f"the newest is of step {self.step}"
            raise NothingSaved(
                f"{self._failures} checkpoints in a row could not be written to {self._checkpoints.directory}, and "
                f"{earlier}: {error}; free space there, or make it writable (checkpoint.on_failure: continue trains on)"
            ) from error
        if required:
            earlier = (
                "there is no earlier checkpoint"
                if self.step is None
                else f"the checkpoint of step {self.step} is valid"
            )
            hint = "" if self.step is None else "; free disk space, then --resume this run from it"
            raise TrainingError(f"the run was to stop, but the {error}; {earlier}{hint}") from error

    @property
    def _stops(self) -> bool:
        """Whether a run that cannot write checkpoints ends now; its last step is saved by the export in any case."""
        training = self._training
        has_steps = training.progress.step < len(training.task.stream)
        return has_steps and not self._is_ending and training.recipe.checkpoint.on_failure == "stop"

    def _uses_background(self, shards: Mapping[str, Shard]) -> bool:
        """Return whether to write in the background; the same on every rank."""
        usable = self._training.task.base is None and self._background.usable
        return usable and self._choice.is_worth_it(_own_bytes(shards))

    def newest(self, before: int | None = None, *, phase: str = "resuming") -> Checkpoint | None:
        """Return the newest checkpoint that verifies, once the one that is being written is complete; None without any.

        Rank 0 reads all of it, the others rely on rank 0. Checkpoints of step ``before`` and later ones are passed
        over. They are removed if there is an earlier one, or if there cannot be one, as the run then begins again. One
        that cannot be completed does not end the run now: the present weights may be wrong, so it goes back first.

        Args:
            phase: that the heartbeat reports, as reading a large checkpoint or restoring a copy takes long.

        Raises:
            RequestError: there are checkpoints, and none can be used.
            FaultError, MachineError: none can be used, and the machine could not read some of them.
        """
        self._flush(may_stop=False)
        world, events = self._training.world, self._training.events
        heartbeat.begin_phase(phase)
        # The step, as the path on another node may be another one; and the exit code and message if none can be used.
        newest_step: int | None = None
        unusable: tuple[int, str] | None = None
        if world.is_main:
            events.announce("checking the newest checkpoint")
            checkpoint, errors = self._checkpoints.find_latest(before)
            copy = self._copies.newest(None if checkpoint is None else checkpoint.step, Checkpoint.open, before)
            for reason in errors:
                action = "use the one before it" if copy is None else "use a copy"
                events.emit(Fault(kind="checkpoint", rank=0, detail=str(reason), action=action))
            self._report_copies()
            if copy is not None:
                checkpoint = copy
                events.emit(Notice(message=f"{copy.path} is restored from a copy"))
            newest_step = None if checkpoint is None else checkpoint.step
            if newest_step is None and errors:
                unusable = _explain_none_usable(errors)
            if before is not None and (newest_step is not None or before == 1):
                self._copies.remove_from(before)  # first, so that none is restored if this process ends now
                self._checkpoints.remove_from(before)
        newest_step, unusable = world.broadcast((newest_step, unusable))
        if unusable is not None:
            raise build_error(*unusable)
        return None if newest_step is None else Checkpoint.open(self._checkpoints.path(newest_step), verify=False)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Load the state of a checkpoint.

        Raises:
            RequestError: the examples or the frozen weights differ from those that the run was trained on.
        """
        training, saved_state = self._training, checkpoint.state
        self._check(checkpoint)
        try:
            progress = TrainingProgress.of(saved_state.get("progress", {}))
            task_state, *of_policies = (
                {str(name): float(value) for name, value in values.items()}
                for values in (saved_state.get("task", {}), *saved_state.get("policies", {}).values())
            )
            states = dict(zip(saved_state.get("policies", {}), of_policies, strict=True))
            training.task.stream.resume(saved_state.get("stream", {}))
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(f"{checkpoint.path}/state.json is not the state of a run: {error}") from error
        with checkpoint.open_reader() as reader:
            training.strategy.load_state(reader)
        training.strategy.world.barrier()  # some ranks may have read for longer than others
        training.progress = progress
        # Nothing stays of the steps that a rewind takes back.
        _replace(training.task.state, self._first_task_state | task_state)
        for name, policy in self._policies.items():
            _replace(policy.state, self._first_states[name] | states.get(name, {}))
        self.step, self.parent = progress.step, saved_state.get("parent")
        self._best = progress.best_loss, progress.best_step

    def fork(self, parent: ParentCheckpoint) -> None:
        """Start from a checkpoint of another run: its weights, and its optimizer state if it has the same tensors.

        With the same global batches the run goes on behind the checkpoint's step, otherwise it begins at step 0.

        Raises:
            RequestError: the checkpoint is damaged, of another model or other frozen weights, or as long as this run.
        """
        training, world = self._training, self._training.world
        heartbeat.begin_phase("resuming")
        checkpoint = parent.open(world)
        self._check_weights(checkpoint)
        try:
            before = TrainingProgress.of(checkpoint.state.get("progress", {}))
            stream = dict(checkpoint.state.get("stream", {}))
        except (ValueError, TypeError) as error:
            raise RequestError(f"{KEY}: {checkpoint.path}/state.json is not the state of a run: {error}") from error
        same_rows = checkpoint.state.get("data") == training.task.stream.dataset.fingerprint
        progress = TrainingProgress(pending=EVALUATION)
        if same_rows and has_same_batches(training.recipe, checkpoint.path):
            steps = len(training.task.stream)
            if before.step >= steps:
                raise RequestError(
                    f"{KEY}: {checkpoint.path} is at step {before.step}, and this run ends after step {steps} of the "
                    "same batches; make it longer (train.max_steps, epochs or max_tokens), or change data or seed"
                )
            training.task.stream.resume(stream)
            progress = replace(before, best_loss=None, best_step=None, pending=EVALUATION)
            progress.stopping, progress.plateau, progress.rate = Patience(), Patience(), 1.0
        names: set[str] = set()

        def seen(name: str, shard: Shard) -> torch.Tensor:
            names.add(name)
            return torch.zeros(shard.local.shape, dtype=shard.local.dtype)

        training.strategy.load_state(seen)
        tensors = {name for rank in world.gather(sorted(names)) for name in rank if name.startswith("optimizer.")}
        goes_on = checkpoint.has_optimizer(training.recipe.optimizer.name, tensors)
        try:
            with checkpoint.open_reader() as reader:
                training.strategy.load_state(reader, optimizer=goes_on)
        except RequestError as error:
            raise RequestError(f"{KEY}: {error}; start from a run of the same model") from error
        world.barrier()  # some ranks may have read for longer than others
        training.progress = progress
        position = f"goes on behind step {progress.step}" if progress.step else "begins at step 0"
        state = "weights and optimizer state" if goes_on else "weights, without optimizer state"
        training.events.announce(f"{state} of {parent.run}, step {parent.step}; the run {position}")
        self.parent = {**parent.fields, "optimizer_state": goes_on}

    def _state(self) -> dict[str, Any]:
        task = self._training.task
        policies = {name: dict(policy.state) for name, policy in self._policies.items() if policy.state}
        stream = task.stream.state(self._training.progress.step)
        return {
            "progress": asdict(self._training.progress),
            "data": task.stream.dataset.fingerprint,
            "base": task.base,
            "start": task.start,
            "task": dict(task.state),
            **({"policies": policies} if policies else {}),
            **({"stream": stream} if stream else {}),
            **({"parent": self.parent} if self.parent else {}),
        }

    def _check(self, checkpoint: Checkpoint) -> None:
        recipe, task = self._training.recipe, self._training.task
        if checkpoint.state.get("data") != task.stream.dataset.fingerprint:
            key, parts = recipe.spec.examples
            raise RequestError(
                f"{key}: the examples are not those of {checkpoint.path}: {parts} has changed; restore the original, "
                "or start a new run"
            )
        self._check_weights(checkpoint)

    def _check_weights(self, checkpoint: Checkpoint) -> None:
        task = self._training.task
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
            self._checkpoints.prune(self._best[1], self._background.remove, self._trusted_before())
        except OSError as error:
            self._report(f"older checkpoints were not removed: {error}", "continue")

    def _report(self, detail: str, action: str) -> None:
        step = self._training.progress.step
        self._training.events.emit(Fault(kind="checkpoint", rank=0, detail=detail, action=action, step=step))


def _explain_none_usable(refused: Sequence[CheckpointError]) -> tuple[int, str]:
    """Return the exit code and the message for a run none of whose checkpoints can be used."""
    why = f"no checkpoint of this run can be used: {'; '.join(map(str, refused))}"
    unread = {reason.exit_code for reason in refused if isinstance(reason, UnreadableCheckpoint)}
    if not unread:
        return EXIT_REQUEST, f"{why}; start a new run"
    if unread == {EXIT_MACHINE}:
        return EXIT_MACHINE, f"{why}; let this user read them, then --resume the run"
    return EXIT_FAULT, f"{why}; they may be whole: check the disk or the file system, then --resume the run"


def _own_bytes(shards: Mapping[str, Shard]) -> int:
    return sum(shard.local.numel() * shard.local.element_size() for shard in own_blocks(shards).values())


def _index_by_name(policies: Sequence[StepPolicy]) -> dict[str, StepPolicy]:
    """Return the policies by the names that checkpoints have their state under."""
    by_name: dict[str, StepPolicy] = {}
    for policy in policies:
        name = type(policy).__name__
        if name in by_name:
            classes = " and ".join(f"{type(namesake).__module__}:{name}" for namesake in (by_name[name], policy))
            raise RequestError(
                f"train.step_policies: {classes} have the same name, under which a checkpoint saves the state of one "
                "of them; rename a class, or list it once"
            )
        by_name[name] = policy
    return by_name


def _replace(state: dict[str, float], values: Mapping[str, float]) -> None:
    state.clear()
    state.update(values)
