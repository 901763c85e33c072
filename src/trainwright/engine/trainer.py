"""The training loop, with what it measures and the answers that it writes."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, NoReturn

import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.checkpoints.checkpointing import Checkpointing, NothingSaved
from trainwright.engine.checkpoints.export import export
from trainwright.engine.checkpoints.parent import ParentCheckpoint
from trainwright.engine.evaluate import evaluate, generate
from trainwright.engine.events import Evaluate, EventLog, Fault, Finish, Generate, Notice, Rewind, Step
from trainwright.engine.optimizer import Schedule
from trainwright.engine.out_of_memory import catch_shortage, read_peak_memory
from trainwright.engine.passes import StepPasses
from trainwright.engine.policies.base import (
    MAX_IN_A_ROW,
    Corrupted,
    GradientNoise,
    LossLimit,
    LossScale,
    LossSpikes,
    NonFinite,
    RewindRequested,
    StepGradients,
    StepPolicy,
    TrainingContext,
    WrongNumbers,
    check_skips,
)
from trainwright.engine.policies.micro_batch_halving import Halving
from trainwright.engine.policies.replay import Replay
from trainwright.engine.policies.stragglers import Stragglers
from trainwright.engine.progress import EVALUATION, GENERATION, TrainingProgress
from trainwright.engine.task import Measured
from trainwright.errors import TrainingError
from trainwright.machine.counters import Counters
from trainwright.machine.usage import OwnProcess
from trainwright.parallel.strategy import swap_in_averages
from trainwright.parallel.world import StopRequested
from trainwright.recipe.registries import SCHEDULES
from trainwright.utils import heartbeat, text
from trainwright.utils.paths import write_file

# torch's ReduceLROnPlateau: a loss has to fall by this part of itself.
_THRESHOLD = 1e-4


class _StepResult(NamedTuple):
    """What all ranks know after a step: whether to stop, to save, and how far they are with the last checkpoint."""

    stop: bool
    save: bool
    written: Sequence[float]


@dataclass
class Trainer:
    """Train a task's model with a strategy, step by step.

    Args:
        stop_requested: called after every step; true on any rank ends the run after a checkpoint.
        updating: called before the weights are changed.
        change_requested: called on rank 0 after a checkpoint; true ends the run there, to continue with another
            plan. None: never.
        policies: the step policies of the recipe, called after the built-in ones.
        save_requested: called on every rank after every pass over a batch; true on rank 0 saves a checkpoint after the
            step.
        stop_after: end the run after this step and its evaluation, with a checkpoint; None: at the end.
    """

    training: TrainingContext
    schedule: Schedule
    checkpoints: Checkpoints
    stop_requested: Callable[[], bool]
    updating: Callable[[], None] = lambda: None
    change_requested: Callable[[], bool] | None = None
    policies: Sequence[Callable[[TrainingContext], StepPolicy]] = ()
    save_requested: Callable[[], bool] = lambda: False
    stop_after: int | None = None

    def __post_init__(self) -> None:
        training = self.training
        self.task, self.strategy, self.events = training.task, training.strategy, training.events
        self.world = training.world
        self._memory_warned = False
        self._save_requested = False  # until it is saved: the reports of a pass that is not the step's own are not used
        self._first_step = 0  # the step at which this launch began
        self._halving, self._replay = Halving(self.training), Replay(self.training)
        ours = (LossScale, GradientNoise, LossLimit, LossSpikes, NonFinite, Stragglers)
        self._added = [policy(self.training) for policy in self.policies]
        self._policies = [self._halving, self._replay, *(policy(training) for policy in ours), *self._added]
        self._checkpointing = Checkpointing(
            self.training, self.checkpoints, self._policies, lambda: self._replay.trusted_before
        )
        self._passes = StepPasses(
            self.training,
            self._halving,
            self._replay,
            self._policies,
            self._collect_requests,
            self._compute_learning_rate,
        )
        self._answers = AnswerFiles(self.checkpoints.directory.parent, self.events)
        self._measured = RunMeasurements(self.world.device, self.world.local_size)

    @property
    def progress(self) -> TrainingProgress:
        """Return the progress of the run."""
        return self.training.progress

    @property
    def max_steps(self) -> int:
        """Return the number of steps of the run."""
        return len(self.task.stream)

    @property
    def is_over(self) -> bool:
        """Return whether the step after which the run ends has been taken, and later ones are left."""
        return self.stop_after is not None and self.stop_after <= self.progress.step < self.max_steps

    @property
    def _is_stopped(self) -> bool:
        """Whether evaluations have not improved for as long as the recipe allows."""
        early = self.training.recipe.evaluate.early_stopping
        return early is not None and self.progress.stopping.since >= early.patience

    def find_newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, the same on every rank, or None. Raises RequestError."""
        return self._checkpointing.newest()

    def fork(self, parent: ParentCheckpoint) -> None:
        """Start from a checkpoint of another run. Raises RequestError if it is damaged or of another model."""
        self._checkpointing.fork(parent)

    @property
    def parent(self) -> dict[str, Any] | None:
        """Return the checkpoint of another run that this run started from."""
        return self._checkpointing.parent

    def resume(self, checkpoint: Checkpoint) -> None:
        """Load the state of a checkpoint. Raises RequestError if it has other examples or other frozen weights."""
        self._checkpointing.resume(checkpoint)

    def run(self, final: Path) -> bool:
        """Train to the last step and write the model to ``final``; return False if a signal stopped the run first.

        A stop during an evaluation or the export interrupts it; it is repeated when the run is resumed.
        """
        started_at = time.monotonic()
        try:
            with self.task.stream.open_reading(self.world):
                self._train()
            self.events.announce(f"writing the model to {final}", self.progress.step)
            heartbeat.begin_phase("export", self.progress.step)
            with swap_in_averages(self.strategy):
                notice = export(self.task, self.strategy, final, self.progress.step, self._checkpointing.step)
            if notice is not None:
                self.events.emit(Notice(message=notice))
        except NothingSaved as error:
            self._checkpointing.close()
            error.args = (f"{error}; {self._save_weights()}",)
            raise
        except WrongNumbers:
            self._checkpointing.close()  # what it wrote is still good
            raise
        except StopRequested:
            if self.progress.step:
                self._checkpointing.save(required=True)
            self._checkpointing.close()
            self._finish(
                "stopped", started_at, self.checkpoints.path(self.progress.step) if self.progress.step else None
            )
            return False
        self._checkpointing.copy_model(final)
        self._checkpointing.close()
        self._finish("finished", started_at, final)
        return True

    def _save_weights(self) -> str:
        """Write the weights where they fit, as no checkpoint does; return where, in words."""
        step, run = self.progress.step, self.checkpoints.directory.parent
        folders = [Path(copies) / run.name for copies in self.training.recipe.checkpoint.copies if "://" not in copies]
        for directory in [run, *folders]:
            target = directory / f"weights-step-{step}"
            try:
                if self.world.is_main:
                    with suppress(OSError):
                        directory.mkdir(parents=True, exist_ok=True)
                with swap_in_averages(self.strategy):
                    export(self.task, self.strategy, target, step, None)
            except TrainingError as error:
                self.events.emit(Fault(kind="export", rank=0, detail=str(error).partition("; ")[0], action="continue"))
                continue
            key = "model.name" if self.task.base is None else "model.adapter.start_from"
            return f"the weights of step {step} are in {target}; a new run can begin with them ({key})"
        return f"the weights of step {step} could not be saved anywhere else either"

    def _train(self) -> None:
        self._first_step = self.progress.step
        if self.progress.step == 0:
            self.progress.pending = EVALUATION
        self._evaluate()
        self.strategy.module.train()
        if self.is_over:  # a restart after the last checkpoint
            raise StopRequested
        self.events.announce(self._mention_compiling("taking the first step"))
        while self.progress.step < self.max_steps and not self._is_stopped:
            try:
                result = self._step()
                last = self.progress.step == self.max_steps
                every = self.training.recipe.evaluate.every
                evaluates = last or (every is not None and self.progress.step % every == 0)
                if result.stop or result.save or evaluates or self.is_over:
                    heartbeat.begin_phase("replay", self.progress.step)
                    self._replay.compare_weights(self.progress.step)  # before they are written
            except RewindRequested as fault:
                self._rewind(fault)
                self._evaluate()  # what was pending at the checkpoint
                continue
            self._checkpointing.advance(result.written)
            if evaluates:
                self.progress.pending = EVALUATION
            if result.stop:
                raise StopRequested
            improved = self._evaluate()
            last = last or self._is_stopped
            if last or improved or result.save:
                self._save_requested = False
                self._checkpointing.save(required=False, wait=last)
                if not last and self._should_change_plan():
                    raise StopRequested
            if self.is_over:
                raise StopRequested

    def _should_change_plan(self) -> bool:
        """Return whether the run, which has just been saved, continues with another plan; the same on every rank.

        If the checkpoint cannot be completed, as on a full disk, the run goes on as it is.
        """
        if self.change_requested is None or self._checkpointing.started_step != self.progress.step:
            return False
        if not self.world.broadcast(self.world.is_main and self.change_requested()):
            return False
        return self._checkpointing.complete() == self.progress.step

    def run_steps(self, steps: int, *, largest: bool = False) -> bool:
        """Take the first steps of the run and keep only their events; return False if a signal stopped it first.

        With ``largest``, repeat the step with the largest micro-batch ``steps`` times instead: if it fits, all steps
        fit.

        Raises:
            OutOfMemory: where a run would continue with smaller micro-batches.
        """
        self._halving.enabled = False
        self.strategy.module.train()
        steps = steps if largest else min(steps, self.max_steps)
        with self.task.stream.open_reading(self.world):
            first = self.task.stream.find_largest_step() if largest else 0
            for index in range(steps):
                self.progress.step = first if largest else index
                if self._step().stop and index < steps - 1:
                    return False
        return True

    def _step(self) -> _StepResult:
        """Take one optimizer step; return the decisions that follow from it on every rank."""
        started_at, step = time.perf_counter(), self.progress.step + 1
        if step in self.progress.left_out:
            self.progress.step = step
            requests = self.world.gather(self._collect_requests(step))
            stop, save, write_progress = zip(*requests, strict=True)
            return _StepResult(any(stop), bool(save[0]), write_progress)
        heartbeat.begin_phase("data", step)
        batch = self.task.stream.global_batch(step - 1)
        for policy in self._policies:
            policy.before(step, batch, functools.partial(self._passes.gradients, step))
        gradients = self._passes.gradients(step, batch)
        if self._replay.is_due(step):
            heartbeat.begin_phase("replay", step)
            self._replay.check(step, functools.partial(self._passes.repeat, step, gradients.batch))
        heartbeat.begin_phase("metrics", step)
        metrics = self._metrics(step, gradients)
        learning_rate = self._compute_learning_rate(step)
        self._checkpointing.before_update()
        heartbeat.begin_phase("optimizer", step)
        self.updating()
        # Every policy is called, as each may count.
        decisions = [policy.skips(step, gradients) for policy in self._policies]
        check_skips(step, self._added, decisions[len(decisions) - len(self._added) :], self.world)
        if any(decisions):
            self.strategy.discard_gradients()
        else:
            scale = self._clip_factor(gradients.norm) / self.progress.loss_scale
            if self.strategy.bf16_weights is not None:
                self.strategy.bf16_weights.step = step
            shortage = catch_shortage(functools.partial(self.strategy.step, learning_rate, scale))
            if shortage is not None:  # a partial update must not be used
                raise self._halving.error(step, gradients.batch, shortage)
            self.task.after_step(metrics)
        heartbeat.begin_phase("step policies and observers", step)
        seconds = time.perf_counter() - started_at
        self._record(step, gradients, learning_rate, metrics, seconds)
        self._checkpointing.after_step(seconds, gradients.batch.tokens)
        for policy in self._policies:
            policy.after(step)
        reports = gradients.reports
        return _StepResult(any(rank.stop for rank in reports), bool(reports[0].save), [r.written for r in reports])

    def _compute_learning_rate(self, step: int) -> float:
        """Return the learning rate of a step: the schedule's, and what is left of it on a plateau."""
        factor = max(self.progress.rate, self.training.recipe.optimizer.final_learning_rate_ratio)
        return self.schedule(step) * (factor if self.progress.rate < 1.0 else 1.0)

    def _rewind(self, fault: RewindRequested) -> None:
        """Go back to the newest checkpoint that verifies and, if asked to, leave out the batch of the step that failed.

        To leave out a batch before the first checkpoint, the run goes on from where it is: the weights are still those
        of the step before.

        Raises:
            WrongNumbers: too many batches in a row would be left out.
            Corrupted, WrongNumbers: there is no checkpoint from before a machine's fault.
        """
        step, left_out = self.progress.step + 1, self.progress.left_out
        self.strategy.discard_gradients()
        if fault.leave_out:
            left_out = sorted({*left_out, step})
        if all(step - before in left_out for before in range(MAX_IN_A_ROW + 1)):
            raise WrongNumbers(f"training stopped after leaving out {MAX_IN_A_ROW} batches in a row: {fault.detail}")
        checkpoint = self._checkpointing.newest(fault.before, phase="rewinding")
        back = "there is no checkpoint yet" if checkpoint is None else f"back to {checkpoint.path}"
        action = f"{back}; the global batch of step {step} is left out" if fault.leave_out else back
        # No field `step`: events of a step are discarded when that step is repeated.
        self.events.emit(Fault(kind=fault.kind, rank=fault.rank, detail=fault.detail, action=action))
        if checkpoint is not None:
            self.resume(checkpoint)
            rewound = Rewind(resumed_from=self.progress.step, left_out=left_out, pending=self.progress.pending)
            self.events.emit(rewound)
        elif not fault.leave_out:
            self._end_without_checkpoint(fault)
        self.progress.left_out = left_out

    def _end_without_checkpoint(self, fault: RewindRequested) -> NoReturn:
        """End a run that has no checkpoint from before the fault of a machine."""
        if fault.before == 1:  # there cannot be one, and later ones were removed
            raise Corrupted(
                f"training stopped: {fault.detail}; none of the checkpoints is known to be right, so they were "
                "removed; test the memory and the processor, then --resume, which begins at the first step"
            )
        raise WrongNumbers(
            f"training stopped: {fault.detail}; no checkpoint from before step {fault.before} can be used, and later "
            "ones, which are kept, may have wrong values; test the memory and the processor, and start a new run"
        )

    def _collect_requests(self, step: int) -> tuple[bool, bool, float]:
        self._save_requested = self.save_requested() or self._save_requested
        save = self._save_requested or self._checkpointing.is_due(step)
        return self.stop_requested(), save, self._checkpointing.report

    def _metrics(self, step: int, gradients: StepGradients) -> dict[str, float]:
        metrics = self.task.metrics(gradients.statistics) if gradients.statistics else {}
        metrics.pop("loss", None)
        for policy in self._policies:
            metrics.update(policy.metrics(step, gradients))
        return metrics

    def _clip_factor(self, norm: float) -> float:
        """Return the factor that clips the gradients to ``optimizer.max_grad_norm``; `Strategy.step` multiplies by it.

        torch's ``clip_grad_norm_`` is not used, because the norm is a sum over the shards of all ranks.
        """
        limit = self.training.recipe.optimizer.max_grad_norm
        return 1.0 if limit is None or norm <= limit else limit / norm

    def _record(
        self, step: int, gradients: StepGradients, learning_rate: float, metrics: dict[str, float], seconds: float
    ) -> None:
        progress, batch = self.progress, gradients.batch
        progress.step = step
        progress.tokens += batch.tokens
        progress.target_tokens += batch.targets
        memory_bytes = int(max(rank.memory for rank in gradients.reports))
        self._measured.step(seconds, batch.tokens, memory_bytes)
        self.events.emit(
            Step(
                step=step,
                loss=gradients.loss,
                grad_norm=gradients.norm,
                learning_rate=learning_rate,
                tokens=progress.tokens,
                target_tokens=progress.target_tokens,
                tokens_per_second=batch.tokens / seconds,
                step_time=seconds,
                memory_bytes=memory_bytes,
                resident_bytes=int(max(rank.resident for rank in gradients.reports)),
                metrics=metrics,
            )
        )

    def _evaluate(self) -> bool:
        """Run the pending evaluation and samples; return whether the result is a new best to be kept.

        Raises:
            StopRequested: on every rank; what was interrupted stays pending.
        """
        with swap_in_averages(self.strategy):
            return self._evaluate_weights()

    def _evaluate_weights(self) -> bool:
        step, progress, improved = self.progress.step, self.progress, False
        if progress.pending == EVALUATION and self.task.validation is not None:
            self.events.announce(self._mention_compiling("evaluating"), step)
            heartbeat.begin_phase("evaluation", step)
            started_at = time.monotonic()
            measurements = evaluate(
                self.task,
                self.strategy,
                functools.partial(self._halving.evaluation, step),
                self._warn_low_memory,
                self.events,
                step,
                self.training.recipe.evaluate.main_set,
            )
            metrics, answers = measurements.metrics, self._answers.keep(step, measurements)
            seconds = time.monotonic() - started_at
            self.events.emit(
                Evaluate(step=step, metrics=metrics, seconds=seconds, intervals=measurements.intervals, answers=answers)
            )
            self._answers.warn(step, measurements, answers)
            improved = step > 0 and (progress.best_loss is None or metrics["loss"] < progress.best_loss)
            if improved:
                progress.best_loss, progress.best_step = metrics["loss"], step
            self._follow(step, metrics)
        if progress.pending is not None:
            progress.pending = GENERATION
            heartbeat.begin_phase("generation", step)
            if self.task.prompts:
                self.events.announce("generating samples", step)
            for prompt, text in generate(self.task, self.strategy, self._warn_low_memory, self.events):
                self.events.emit(Generate(step=step, prompt=prompt, text=text))
            progress.pending = None
        return improved and self.training.recipe.checkpoint.keep_best is True

    def _follow(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decide by the metrics of an evaluation whether the run ends, and whether the learning rate is reduced.

        Raises:
            TrainingError: evaluations do not have the metric.
        """
        progress, recipe = self.progress, self.training.recipe
        early, optimizer = recipe.evaluate.early_stopping, recipe.optimizer
        if early is not None and early.metric not in metrics:
            raise TrainingError(
                f"evaluate.early_stopping.metric: evaluations have no {early.metric}; they have {', '.join(metrics)}"
            )
        if not step:
            return
        if early is not None:
            value, delta = early.sign * metrics[early.metric], early.min_delta
            progress.stopping.add(value, lambda best: best - delta)
            if self._is_stopped:
                message = (
                    f"the run ends at step {step}: {early.metric} has not improved in the last "
                    f"{text.format_plural(early.patience, 'evaluation')} (evaluate.early_stopping)"
                )
                self.events.emit(Notice(message=message))
        if SCHEDULES.get(optimizer.schedule).on_plateau:
            since = progress.plateau.add(metrics["loss"], lambda best: best - _THRESHOLD * abs(best))
            if since > optimizer.plateau_patience:
                progress.rate, progress.plateau.since = progress.rate * optimizer.plateau_factor, 0
                self.events.emit(
                    Notice(message=f"the learning rate is reduced to {self._compute_learning_rate(step):.3g}")
                )

    def _mention_compiling(self, what: str) -> str:
        """Return ``what`` in words that add the compilation, if there is one at this step."""
        compiles = self.training.recipe.train.compile is True and self.progress.step == self._first_step
        return f"compiling the model and {what}" if compiles else what

    def _warn_low_memory(self, reason: str) -> None:
        if not self._memory_warned:
            self._memory_warned = True
            action = "texts are generated by gathering the weights in every pass, which is slower"
            self.events.emit(Fault(kind="memory", rank=0, detail=reason, action=action, step=self.progress.step))

    def _finish(self, status: str, started_at: float, path: Path | None) -> None:
        seconds = time.monotonic() - started_at
        measurements, step = self._measured.summary(), self.progress.step
        heartbeat.begin_phase("finishing", step)
        self.events.announce("finishing the report and the curves", step)
        self.events.emit(Finish(status=status, step=step, seconds=seconds, path=path, measured=measurements))


DIRECTORY = "evaluations"


class AnswerFiles:
    """Write the answers of each evaluation to ``evaluations/step-<n>/samples.jsonl`` of the run."""

    def __init__(self, run: Path, events: EventLog) -> None:
        self._run, self._events = run, events
        self._warned = ""

    def keep(self, step: int, measured: Measured) -> Path | None:
        """Write the answers, on the rank that has them; return their file. A disk error ends nothing."""
        if not measured.samples:
            return None
        file = self._run / DIRECTORY / f"step-{step}" / "samples.jsonl"
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in measured.samples)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, lines)
        except OSError as error:
            self._events.emit(Notice(message=f"{file}: the answers could not be written: {error.strerror or error}"))
            return None
        return file

    def warn(self, step: int, measured: Measured, file: Path | None) -> None:
        """Say that answers were cut, once as long as it is some or all of them."""
        total, cut = len(measured.samples), measured.cut
        which = "all" if cut == total else "some"
        if not cut or not total:
            self._warned = ""
        elif which != self._warned:
            self._warned = which
            names = ", ".join(measured.samples[0]["scores"])
            of, consequence = (
                (f"all {text.format_plural(total, 'answer')} were", "tell little about the model")
                if which == "all"
                else (f"{cut} of {total} answers were", "count what was written up to there")
            )
            location = f"; the answers are in {file}" if file is not None else ""
            self._events.emit(
                Notice(
                    message=f"{of} cut at {text.format_plural(measured.limit, 'token')} (evaluate.max_new_tokens), so "
                    f"{names} of step {step} {consequence}; raise evaluate.max_new_tokens{location}"
                )
            )


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
            self._before = self._process.counters(), heartbeat.sum_collective_seconds()
        self._seconds.append(seconds)
        self._rates.append(tokens / seconds)
        self._memory_bytes = max(self._memory_bytes, memory_bytes)

    def summary(self) -> dict[str, float]:
        """Return the largest peak memory of any rank in a step, or of this one up to now, and the speed of the steps
        after the first; empty without such steps.

        ``tokens_per_second``: the median of the steps. ``step_time``: of a step with the mean number of tokens at that
        speed, as plans predict it: steps differ in their tokens. ``tensors_bytes`` is added to ``memory_bytes`` if the
        latter counts only tensors, as on a GPU. ``steps``: the number of steps after the first, 0 if the speed is of
        the first ones. ``threads`` of this process, the number of ``processes`` and ``cores``, the part of the time
        ``in_collectives``, and what kept it from computing: see `Counters.since`.
        """
        if not self._seconds or self._before is None:
            return {}
        before, wait_seconds = self._before
        memory_bytes = max(self._memory_bytes, int(read_peak_memory(self._device)))  # an export reads the model back
        summary: dict[str, float] = {"memory_bytes": memory_bytes}
        if self._device.type != "cpu":
            summary["tensors_bytes"] = memory_bytes
        seconds, rates = (values[_WARM_UP_STEPS:] or values for values in (self._seconds, self._rates))
        tokens, rate = mean(time * rate for time, rate in zip(seconds, rates, strict=True)), median(rates)
        return {
            **summary,
            "step_time": tokens / rate if rate else median(seconds),
            "tokens_per_second": rate,
            "steps": max(0, len(self._seconds) - _WARM_UP_STEPS),
            "in_collectives": (heartbeat.sum_collective_seconds() - wait_seconds)
            / max(time.monotonic() - before.wall, 1e-6),
            **self._process.since(before),
        }
