"""The training loop."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.data.stream import GlobalBatch
from trainwright.engine.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.engine.evaluate import evaluate, generate
from trainwright.engine.events import EventLog
from trainwright.engine.export import export
from trainwright.engine.halving import Halving
from trainwright.engine.measured import Measured
from trainwright.engine.memory import Shortage, peak_memory
from trainwright.engine.progress import EVALUATION, GENERATION, Progress
from trainwright.engine.read_back import check_checkpoint
from trainwright.engine.saving import Saving
from trainwright.engine.schedule import Schedule
from trainwright.engine.seeding import seed_dropout
from trainwright.engine.task import Task
from trainwright.errors import RequestError, TrainingError
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import StopRequested
from trainwright.recipe.loading import dump_recipe
from trainwright.recipe.schema import Recipe

# As torch.amp.GradScaler has them.
_FIRST_LOSS_SCALE = 2.0**16
_GROW_LOSS_SCALE_EVERY = 2000
# Among how many steps, or examples, the fullest is looked for.
_LOOKED_AT_STEPS, _LOOKED_AT_EXAMPLES = 300, 30_000


class _Said(NamedTuple):
    """What all ranks agree on after a step: whether any was asked to stop, and whether a checkpoint is due."""

    stop: bool
    save: bool


class Trainer:
    """Runs a task's stream through a strategy's model, step by step.

    Args:
        stop_requested: asked after every step; true on any rank ends the run after a checkpoint.
        keep_recipe: called on every rank with a recipe that the run goes on with, and why; gives its text.
        updating: called before the weights are changed.
        change_asked: asked on rank 0 after a checkpoint; true ends the run there, to go on in another way. None: never.
    """

    def __init__(
        self,
        recipe: Recipe,
        recipe_text: str,
        task: Task,
        strategy: Strategy,
        schedule: Schedule,
        checkpoints: Checkpoints,
        events: EventLog,
        max_steps: int,
        stop_requested: Callable[[], bool],
        keep_recipe: Callable[[Recipe, str], str] = lambda recipe, reason: dump_recipe(recipe),
        updating: Callable[[], None] = lambda: None,
        change_asked: Callable[[], bool] | None = None,
    ) -> None:
        self.recipe = recipe
        self.task = task
        self.strategy = strategy
        self.world = strategy.world
        self.schedule = schedule
        self.checkpoints = checkpoints
        self.events = events
        self.max_steps = max_steps
        self.stop_requested = stop_requested
        self._updating = updating
        self._change_asked = change_asked
        self._scaled = recipe.train.mixed_precision == "fp16"
        self.progress = Progress(loss_scale=_FIRST_LOSS_SCALE if self._scaled else 1.0)
        self._saved_step: int | None = None
        self._told_of_room = False
        self._halving = Halving(recipe, recipe_text, task, strategy, events, keep_recipe)
        self._measured = Measured(self.world.device)
        self._saving = Saving(recipe.checkpoint.every)

    def run(self, final: Path) -> bool:
        """Train to the last step and write the model to ``final``; False when a signal ended it before.

        Where a stop comes in an evaluation or in the export, that is broken off and done again when the run is resumed.
        """
        begun = time.monotonic()
        try:
            self._train()
            self.events.announce(f"writing the model to {final}", self.progress.step)
            export(self.task, self.strategy, final, self.progress.step, self._saved_step)
        except StopRequested:
            if self.progress.step:
                self._checkpoint(last_chance=True)
            self._finish("stopped", begun, self.checkpoints.path(self.progress.step) if self.progress.step else None)
            return False
        self._finish("finished", begun, final)
        return True

    def _train(self) -> None:
        if self.progress.step == 0:
            self.progress.pending = EVALUATION
        self._evaluate()
        self.strategy.module.train()
        self.events.announce("compiling" if self.recipe.train.compile is True else "the first step")
        while self.progress.step < self.max_steps:
            said = self._step()
            last = self.progress.step == self.max_steps
            every = self.recipe.evaluate.every
            if last or (every is not None and self.progress.step % every == 0):
                self.progress.pending = EVALUATION
            if said.stop:
                raise StopRequested
            improved = self._evaluate()
            if last or improved or said.save:
                self._checkpoint(last_chance=False)
                if not last and self._is_to_change():
                    raise StopRequested

    def _is_to_change(self) -> bool:
        """Whether the run, which has just been saved, goes on in another way; the same on every rank."""
        if self._change_asked is None or self._saved_step != self.progress.step:
            return False
        return bool(self.world.broadcast(self.world.is_main and self._change_asked()))

    def rehearse(self, steps: int, *, fullest: bool = False) -> bool:
        """Take the first steps of the run and keep nothing of them but their events; False when a signal ended it.

        With ``fullest``, take the step with the largest micro-batch so many times instead: what fits then fits.

        Raises:
            OutOfMemory: where a run would go on with smaller micro-batches.
        """
        self._halving.enabled = False
        self.strategy.module.train()
        steps = steps if fullest else min(steps, self.max_steps)
        first = self._fullest_step() if fullest else 0
        for done in range(steps):
            self.progress.step = first if fullest else done
            if self._step().stop and done < steps - 1:
                return False
        return True

    def _fullest_step(self) -> int:
        looked_at = min(_LOOKED_AT_STEPS, _LOOKED_AT_EXAMPLES // self.recipe.train.global_batch_size)
        return self.task.stream.fullest(max(1, looked_at))

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take up the state of a checkpoint.

        Raises:
            RequestError: the examples are not those the run was trained on.
        """
        if checkpoint.state.get("data") != self.task.stream.dataset.fingerprint:
            key, parts = self.recipe.spec.examples
            raise RequestError(
                f"{key}: the examples are not those of {checkpoint.path}: {parts} has changed; put back what the run "
                "began with, or start a new run"
            )
        if checkpoint.state.get("base") != self.task.base:
            raise RequestError(
                f"model: the frozen weights are not those of {checkpoint.path}; put back the model, and the adapter "
                "beneath if there is one, that the run began with, or start a new run"
            )
        if checkpoint.state.get("start") != self.task.start:
            raise RequestError(
                f"model: the weights to start from are not those that {checkpoint.path} was started from, and what is "
                "trained is compared with them; put back the model that the run began with, or start a new run"
            )
        try:
            progress = Progress.of(checkpoint.state.get("progress", {}))
            own = {str(name): float(value) for name, value in checkpoint.state.get("task", {}).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(f"{checkpoint.path}/state.json is not the state of a run: {error}") from error
        with checkpoint.reader() as reader:
            self.strategy.load_state(reader)
        self.progress = progress
        self.task.state.update(own)
        self._saved_step = self.progress.step

    def _step(self) -> _Said:
        """One optimizer step; what follows from it on every rank."""
        begun = time.perf_counter()
        step = self.progress.step + 1
        batch = self.task.stream.global_batch(step - 1)
        small = self._small_gradient(step, batch)
        loss, norm, ranks, statistics = self._gradients(step, batch)
        metrics = self.task.metrics(self.world.sum(statistics)) if statistics else {}
        metrics.pop("loss", None)
        if small and (noise := self.progress.noise.add(small, (norm, float(batch.examples)))) is not None:
            metrics["gradient_noise_scale"] = noise
        learning_rate = self.schedule(step)
        self._updating()
        if self._is_spike(step, loss):
            self.strategy.discard_gradients()
        else:
            scale = self._clip(norm) / self.progress.loss_scale
            self._halving.update(step, batch, lambda: self.strategy.step(learning_rate, scale))
            self.task.after_step(metrics)
        self.progress.step = step
        self.progress.tokens += batch.tokens
        self.progress.target_tokens += batch.targets
        seconds = time.perf_counter() - begun
        memory_bytes = int(max(rank[2] for rank in ranks))
        self._measured.step(seconds, batch.tokens, memory_bytes)
        self.events.emit(
            "step",
            step=step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            tokens=self.progress.tokens,
            target_tokens=self.progress.target_tokens,
            tokens_per_second=batch.tokens / seconds,
            step_time=seconds,
            memory_bytes=memory_bytes,
            **({"metrics": metrics} if metrics else {}),
        )
        self._grow_loss_scale()
        return _Said(stop=any(rank[1] for rank in ranks), save=bool(ranks[0][4]))

    def _gradients(self, step: int, batch: GlobalBatch) -> tuple[float, float, list[list[float]], list[float]]:
        """Gradients of the global batch; its mean loss, their norm, what every rank has to say, and own statistics.

        A step whose fp16 gradients overflow is done again at half the loss scale, and one that runs out of memory in
        micro-batches of half the rows, so no example is lost to either.
        """
        while True:
            done = self._halving.passes(step, batch, functools.partial(self._passes, step, batch))
            shortage = done if isinstance(done, Shortage) else None
            losses, norm, statistics = ([0.0], 0.0, []) if isinstance(done, Shortage) else done
            memory, due = peak_memory(self.world.device), self._saving.is_due(step)
            state = [float(self.stop_requested()), memory, float(shortage is not None), float(due)]
            ranks = self.world.gather_floats([sum(losses), *state])
            if any(rank[3] for rank in ranks):
                batch = self._halving.again(step, batch, shortage)
                continue
            loss = sum(rank[0] for rank in ranks) / batch.weight
            if math.isfinite(loss) and math.isfinite(norm):
                return loss, norm, ranks, statistics
            if not (self._scaled and math.isfinite(loss) and self.progress.loss_scale > 1):
                self._refuse(step, batch, losses, loss, norm)
            self.strategy.discard_gradients()
            self.progress.loss_scale /= 2
            self.progress.steps_at_scale = 0
            action = f"the step is done again at loss scale {self.progress.loss_scale:g}"
            self.events.emit("fault", kind="overflow", rank=0, detail="fp16 gradients", action=action, step=step)

    def _grow_loss_scale(self) -> None:
        self.progress.steps_at_scale += 1
        if self._scaled and self.progress.steps_at_scale >= _GROW_LOSS_SCALE_EVERY:
            self.progress.loss_scale *= 2
            self.progress.steps_at_scale = 0

    def _passes(self, step: int, batch: GlobalBatch) -> tuple[list[float], float, list[float]]:
        """Gradients of this rank's share of the global batch; the summed loss of each of its micro-batches, the norm of
        what the ranks' gradients make together, and the task's statistics of the share."""
        share = batch.for_rank(self.world.rank, self.world.size)
        self.task.before_passes(self.strategy, batch, validation=False)
        totals, statistics = [], []
        for position, micro in enumerate(share, 1):
            # By the micro-batch and not by the rank: dropout is the same on any number of processes.
            seed_dropout(self.world.device, self.recipe.train.seed, step, micro.index)
            part = self.task.loss(self.strategy.module, micro, self.world.device)
            assert part.weight == micro.weight or not micro.weight, "the task's weights are not the stream's"
            # A pass that only keeps other ranks company has weight 0 and adds nothing.
            total = part.total if micro.weight else part.total * 0.0
            scale = self.progress.loss_scale / batch.weight
            self.strategy.backward(total * scale, last=position == len(share))
            totals.append(total.detach())
            if part.statistics is not None:
                statistics.append(part.statistics * float(micro.weight > 0))
        norm = self.strategy.gradient_norm() / self.progress.loss_scale
        return torch.stack(totals).tolist(), norm, torch.stack(statistics).sum(0).tolist() if statistics else []

    def _small_gradient(self, step: int, batch: GlobalBatch) -> tuple[float, float] | None:
        """Norm of the mean gradient of the first half of a batch, and its size, where the noise is to be estimated."""
        every, size = self.recipe.train.gradient_noise_scale, batch.examples // 2
        if every is None or step % every or not size:
            return None
        half = self.task.stream.divide(self.task.stream.examples(step - 1)[:size], batch.rows)
        _, norm, _, _ = self._gradients(step, half)
        self.strategy.discard_gradients()
        return norm, float(half.examples)

    def _is_spike(self, step: int, loss: float) -> bool:
        """Whether the step's update is to be left out; the same on every rank."""
        limit = self.recipe.train.skip_loss_spikes
        if limit is None or not self.progress.losses.is_spike(loss, limit):
            return False
        detail = f"loss {loss:.4g} at step {step}, {self.progress.losses.mean:.4g} in the mean before"
        self.events.emit("fault", kind="loss_spike", rank=0, detail=detail, action="its update is left out", step=step)
        return True

    def _clip(self, norm: float) -> float:
        """What gradients are multiplied by to have at most the recipe's norm."""
        limit = self.recipe.optimizer.max_grad_norm
        return 1.0 if limit is None or norm <= limit else limit / norm

    def _refuse(self, step: int, batch: GlobalBatch, losses: list[float], loss: float, norm: float) -> None:
        """Stop before a loss or gradient that is no number reaches the weights, naming the examples."""
        share = batch.for_rank(self.world.rank, self.world.size)
        own = [e for m, value in zip(share, losses, strict=True) if not math.isfinite(value) for e in m.examples]
        by_rank = self.world.gather(own)
        bad = sorted({example for found in by_rank for example in found})
        examples = bad or sorted(example for micro in batch.micro_batches for example in micro.examples)
        shown = "; ".join(f"{index}: {self.task.describe_example(index)}" for index in examples[:4])
        detail = (
            f"loss {loss} and gradient norm {norm} at step {step}; the weights are those of step {step - 1}. "
            f"Examples in the batch: {', '.join(map(str, examples))} ({shown})"
        )
        self.strategy.discard_gradients()
        rank = next((rank for rank, found in enumerate(by_rank) if found), self.world.rank)
        self.events.emit("fault", kind="non_finite", rank=rank, detail=detail, action="stop", step=step)
        raise TrainingError(f"training stopped: {detail}")

    def _evaluate(self) -> bool:
        """Measure on the validation split and sample, as far as pending; whether this is a new best that is to be kept.

        Raises:
            StopRequested: on every rank; what was broken off is still pending.
        """
        step, progress, improved = self.progress.step, self.progress, False
        if progress.pending == EVALUATION and self.task.validation is not None:
            self.events.announce("evaluating", step)
            begun = time.monotonic()
            metrics = evaluate(
                self.task, self.strategy, functools.partial(self._halving.evaluation, step), self._tell_of_room
            )
            self.events.emit("evaluate", step=step, metrics=metrics, seconds=time.monotonic() - begun)
            improved = step > 0 and (progress.best_loss is None or metrics["loss"] < progress.best_loss)
            if improved:
                progress.best_loss, progress.best_step = metrics["loss"], step
        if progress.pending is not None:
            progress.pending = GENERATION
            if self.task.prompts:
                self.events.announce("generating samples", step)
            for prompt, text in generate(self.task, self.strategy, self._tell_of_room):
                self.events.emit("generate", step=step, prompt=prompt, text=text)
            progress.pending = None
        return improved and self.recipe.checkpoint.keep_best is True

    def _tell_of_room(self, reason: str) -> None:
        if not self._told_of_room:
            self._told_of_room = True
            action = "texts are generated with the weights gathered in every pass, which is slower"
            self.events.emit("fault", kind="memory", rank=0, detail=reason, action=action, step=self.progress.step)

    def _checkpoint(self, *, last_chance: bool) -> None:
        """Write a checkpoint; when that fails the earlier ones are still there and training goes on.

        Raises:
            TrainingError: it failed at the ``last_chance``: the run ends here, and would be taken for saved.
        """
        step, begun = self.progress.step, time.monotonic()
        if self._saved_step == step:
            return
        self.events.announce("writing a checkpoint", step)
        data, base, shards = self.task.stream.dataset.fingerprint, self.task.base, self.strategy.state()
        state: dict[str, Any] = {
            "progress": asdict(self.progress),
            "data": data,
            "base": base,
            "start": self.task.start,
            "task": dict(self.task.state),
        }
        try:
            saved = self.checkpoints.save(self.world, step, shards, state, self._halving.recipe_text)
            if base is not None:
                check_checkpoint(self.task, self.world, saved.path, shards)
        except CheckpointError as error:
            self._saving.saved(time.monotonic() - begun)
            action = "stop" if last_chance else "continue"
            self.events.emit("fault", kind="checkpoint", rank=0, detail=str(error), action=action, step=step)
            if last_chance:
                before = self._saved_step
                stands = "there is none before it" if before is None else f"the one of step {before} stands"
                hint = "" if before is None else "; make room, then --resume this run from there"
                raise TrainingError(f"stopped by a signal, but the {error}; {stands}{hint}") from error
            return
        self._saved_step = step
        self._saving.saved(time.monotonic() - begun)
        self.events.emit("checkpoint", step=step, path=saved.path, seconds=saved.seconds, blocked_seconds=saved.seconds)
        if self.world.is_main:
            self._prune()

    def _prune(self) -> None:
        """Remove older checkpoints; those that cannot be removed stay, and training goes on."""
        try:
            self.checkpoints.prune(self.progress.best_step)
        except OSError as error:
            detail = f"older checkpoints were not removed: {error}"
            self.events.emit(
                "fault", kind="checkpoint", rank=0, detail=detail, action="continue", step=self.progress.step
            )

    def _finish(self, status: str, begun: float, path: Path | None) -> None:
        seconds = time.monotonic() - begun
        found = self._measured.summary()
        self.events.emit("finish", status=status, step=self.progress.step, seconds=seconds, path=path, measured=found)
