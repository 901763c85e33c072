"""Algorithm Distillation: train a model on learning histories, so that it learns in context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from trainwright.data.stream.stream import GlobalBatch, MicroBatch, Stream
from trainwright.engine.task import ForwardOnly, LossSum, Measured
from trainwright.errors import RequestError
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.algorithm_distillation.environments import Environment, make
from trainwright.tasks.algorithm_distillation.histories import Histories
from trainwright.tasks.algorithm_distillation.histories import build_task_key as _key
from trainwright.tasks.algorithm_distillation.in_context import (
    Trial,
    choose_context_stride,
    evaluate_model,
    mean_over_last,
)
from trainwright.tasks.algorithm_distillation.model import HistoryModel, HistoryShape, save_history_model
from trainwright.tasks.algorithm_distillation.objective import SUMS, HistoryObjective, LossWeights
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection, SourceAlgorithmSection
from trainwright.tasks.algorithm_distillation.windows import Cut, HistoryWindows
from trainwright.tasks.language_model import count_planned_examples, stream_of
from trainwright.utils.text import format_plural

_VALIDATION_WINDOWS = 512  # sampled from all held-out tasks


def prepare_once(recipe: RecipeSchema, cache: Path) -> int:
    """Check that the histories exist and fit the recipe; return the number of training windows."""
    section = recipe.own(AlgorithmDistillationSection)
    environment = build_environment(section)
    with open_histories(section, environment) as histories:
        goals = find_goals(section, environment, histories)
        return len(_build_windows(section, environment, histories, goals.train))


def build(recipe: RecipeSchema, cache: Path) -> AlgorithmDistillation:
    """Return the task of a resolved recipe."""
    section = recipe.own(AlgorithmDistillationSection)
    environment = build_environment(section)
    with open_histories(section, environment) as histories:
        goals = find_goals(section, environment, histories)
        train = _build_windows(section, environment, histories, goals.train)
        held_out = _build_windows(section, environment, histories, goals.held_out) if goals.held_out else None
        made_by = histories.source
    return AlgorithmDistillation(recipe, environment, goals, train, held_out, made_by)


class AlgorithmDistillation:
    """A transformer trained on windows of histories, and evaluated on tasks that are held out."""

    weights = None
    prompts: Sequence[str] = ()
    answers = True
    start: str | None = None
    base: str | None = None

    def __init__(
        self,
        recipe: RecipeSchema,
        environment: Environment,
        goals: Goals,
        train: HistoryWindows,
        held_out: HistoryWindows | None,
        made_by: Mapping[str, Any],
    ) -> None:
        self._recipe = recipe
        self.state: dict[str, float] = {}
        self._section = recipe.own(AlgorithmDistillationSection)
        self._environment = environment
        self._goals = goals
        self._train, self._held_out = train, held_out
        self._made_by = made_by
        model = HistoryModel(shape_of(self._section, environment), recipe.train.seed)
        section = self._section
        weights = LossWeights(
            section.label_smoothing, section.reward_weight, section.next_state_weight, section.mark_weight
        )
        self._objective = HistoryObjective(model, weights)
        self.module: nn.Module = self._objective
        self.stream: Stream[HistoryWindows] = stream_of(
            recipe, train, count_planned_examples(recipe, train), training=True, shuffle=True
        )
        # Without histories of the held-out tasks there is no validation loss, but the agent is still evaluated.
        windows = held_out or train
        few = min(_VALIDATION_WINDOWS, len(windows))
        self.validation: Stream[HistoryWindows] = stream_of(recipe, windows, few, training=False, shuffle=True)

    def blocks(self) -> list[nn.Module]:
        """Return the repeated units of the module, in order."""
        return self._objective.blocks()

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Warn about contexts shorter than an episode or longer than histories, and histories of another source."""
        for warning in (
            explain_other_source(self._section, self._made_by),
            explain_short_context(self._section, self._environment),
            explain_short_histories(self._train),
        ):
            if warning is not None:
                notify(warning)

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Do nothing: the loss of a micro-batch is independent of other micro-batches."""

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the summed losses of the windows of one micro-batch."""
        sums = module(self._train.batch(micro.examples).to(device))
        weight = float(sum(map(self._train.target_count, micro.examples)))
        return LossSum(sums[0], weight, sums.detach().double())

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return the sums of ``HistoryObjective``."""
        windows = self._held_out or self._train
        sums: torch.Tensor = module(windows.batch(micro.examples).to(device))
        return sums.double() * float(micro.weight > 0)

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        sums = dict(zip(SUMS, statistics, strict=True))
        metrics = {
            "loss": sums["total"] / sums["actions"],
            "action_loss": sums["action_loss"] / sums["actions"],
            "action_accuracy": sums["correct"] / sums["actions"],
        }
        if self._section.reward_weight:
            metrics["reward_loss"] = sums["reward_loss"] / sums["actions"]
        if self._section.next_state_weight:
            metrics["next_state_loss"] = sums["state_loss"] / sums["actions"]
        if sums["marks"]:
            metrics["mark_loss"] = sums["mark_loss"] / sums["marks"]
            metrics["mark_accuracy"] = sums["marks_right"] / sums["marks"]
        return metrics

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Do nothing: a step only changes the weights."""

    def answer_metrics(self, module: nn.Module, world: World, *, together: bool) -> Measured:
        """Return returns on held-out tasks in the first and the last episodes, with sampled and greedy actions."""
        trial = self._section.trial
        metrics: dict[str, float] = {}
        assert isinstance(module, HistoryObjective)
        for prefix, temperature in dict.fromkeys([("", trial.temperature), ("greedy_", 0.0)]):
            returns = self._try(module, world, temperature, together=together)
            world.check_stop()
            metrics |= {
                f"{prefix}return_first": float(returns[..., 0].mean()),
                f"{prefix}return_last": float(mean_over_last(returns, trial.last_episodes).mean()),
            }
        best = float(self._environment.optimal_return(self._goals.tried).mean())
        if best == best and best:  # not known for every environment
            metrics["share_of_optimum"] = metrics["return_last"] / best
        return Measured(metrics)

    def _try(self, module: HistoryObjective, world: World, temperature: float, *, together: bool) -> Any:
        trial = self._section.trial
        settings = Trial(
            trial.episodes, trial.copies, temperature, self._recipe.train.seed, greedy_after=trial.greedy_after
        )
        module.eval()
        try:
            return evaluate_model(module, self._environment, self._goals.tried, settings, world, together=together)
        finally:
            module.train()

    def generate(self, module: nn.Module, prompt: str) -> str:
        """Raise AssertionError: there are no prompts."""
        raise AssertionError("there are no prompts")

    def describe(self) -> dict[str, Any]:
        """Return the fields of the `start` event: the windows and the model."""
        windows = self._train
        targets = "every step" if self._section.targets == "every" else "the last step"
        every = f", subsample {windows.cut.subsample}" if windows.cut.subsample > 1 else ""
        return {
            "weights": "fresh weights",
            "data": [
                f"{self._section.histories}: {format_plural(len(self._goals.train), 'task')} of "
                f"{self._environment.name}, {format_plural(windows.steps, 'step')}{every}",
                f"{format_plural(len(windows), 'window')} of up to {format_plural(windows.cut.window, 'step')}, "
                f"{targets} a target",
                f"tried on {len(self._goals.tried)} other tasks",
            ],
            "epoch_examples": len(self._train),
            "epoch_tokens": self._train.token_count,
        }

    def describe_example(self, index: int) -> str:
        """Describe an example of the stream briefly, for error messages."""
        return self._train.describe(index)

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write the model's weights, its shape, its environment, and the evaluation settings."""
        prefix = "model."
        about = {
            "environment": {"name": self._environment.name, "options": self._environment.options},
            "tried": self._section.model_dump(include={*HELD_OUT_BY, "trial"}),
        }
        named_tensors = ((name.removeprefix(prefix), tensor) for name, tensor in tensors)
        save_history_model(directory, self._objective.model.shape, about, named_tensors)

    def adds_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Raise AssertionError: there is no adapter."""
        raise AssertionError("there is no adapter")

    def read_back(self, module: nn.Module, directory: Path | None, *, all_parameters: bool) -> str | None:
        """Return None: the model is in a format of this package, whose reader checks names and shapes."""


def build_environment(section: AlgorithmDistillationSection) -> Environment:
    """Return the environment of a recipe; raise RequestError with the key."""
    try:
        return make(section.environment, **section.environment_options)
    except RequestError as error:
        raise RequestError(f"algorithm_distillation.environment: {error}") from None


def shape_of(section: AlgorithmDistillationSection, environment: Environment) -> HistoryShape:
    """Return the model shape of a recipe for its environment."""
    model, compressed = section.model, section.context == "compressed"
    return HistoryShape(
        observations=tuple(environment.observation_counts),
        actions=environment.action_count,
        width=model.n_embd,
        layers=model.n_layer,
        heads=model.n_head,
        layout=model.layout,
        positions=model.positions,
        steps=section.context_length,
        regions=2 if compressed and section.compression == "region" else 1,
        latents=section.latents if compressed and section.compression == "latents" else 0,
        dropout=model.dropout,
        predicts_reward=section.reward_weight > 0,
        predicts_next_state=section.next_state_weight > 0,
    )


def explain_other_source(section: AlgorithmDistillationSection, made_by: Mapping[str, Any]) -> str | None:
    """Return a warning if other settings of the source made the histories than the recipe has, otherwise None.

    Histories that ``trainwright collect`` did not make are not checked.
    """
    settings = section.source.algorithm
    if made_by.get("name") not in get_args(SourceAlgorithmSection.model_fields["name"].annotation):
        return None
    changed_keys = [key for key in settings if key not in made_by or made_by[key] != settings[key]]
    if not changed_keys:
        return None
    first = "name" if "name" in changed_keys else changed_keys[0]
    return (
        f"algorithm_distillation.source: {section.histories} was made with {first} {made_by.get(first)}, but the "
        f"recipe has {settings[first]}; training uses the existing file. To collect it again, remove the file and run "
        "trainwright collect"
    )


def explain_short_context(section: AlgorithmDistillationSection, environment: Environment) -> str | None:
    """Return a warning if a context is shorter than an episode, otherwise None."""
    if section.context_length >= environment.horizon:
        return None
    return (
        f"algorithm_distillation.context_length: {format_plural(section.context_length, 'step')} are less than an "
        f"episode of {environment.horizon}: the agent forgets each episode before the next one, so it hardly improves; "
        f"use several episodes, such as {format_plural(4 * environment.horizon, 'step')}"
    )


def explain_short_histories(windows: HistoryWindows) -> str | None:
    """Return a warning if every history is shorter than a context, otherwise None."""
    cut = windows.cut
    if windows.longest >= cut.window:
        return None
    of = f" (subsample {cut.subsample})" if cut.subsample > 1 else ""
    return (
        f"algorithm_distillation.context_length: the longest history{of} has {windows.longest} steps, but a window "
        f"has {cut.window}: the agent will act in longer contexts than it was trained on; lower "
        f"context_length{(' or subsample' if of else '')}, or collect more steps"
    )


def open_histories(section: AlgorithmDistillationSection, environment: Environment) -> Histories:
    """Open the histories of a recipe.

    Raises:
        RequestError: the file cannot be read, or is for another environment.
    """
    try:
        histories = Histories(section.histories, environment)
    except RequestError as error:
        raise RequestError(f"algorithm_distillation.histories: {error}") from None
    recorded_environment = histories.environment
    if (recorded_environment["name"], recorded_environment["options"]) != (environment.name, environment.options):
        theirs = histories.make_environment()
        if (theirs.name, theirs.options) != (environment.name, environment.options):
            histories.close()
            raise RequestError(
                f"algorithm_distillation.histories: {section.histories} has histories of {theirs.name} "
                f"{theirs.options}, and algorithm_distillation.environment is {environment.name} "
                f"{environment.options}; make them equal"
            )
    return histories


def _build_windows(
    section: AlgorithmDistillationSection, environment: Environment, histories: Histories, goals: Sequence[int]
) -> HistoryWindows:
    shape = shape_of(section, environment)
    cut = Cut.of(
        shape,
        subsample=section.subsample,
        trained_regions=section.trained_regions,
        last_only=section.targets == "last",
        forgotten_at_once=choose_context_stride(shape, environment.horizon),
    )
    return HistoryWindows(histories, goals, cut, shape)


_MAX_NAMED = 3
_KEY = "algorithm_distillation"
# Keys of the section that determine the held-out tasks.
HELD_OUT_BY = ("split_seed", "test_fraction", "test_tasks")


@dataclass(frozen=True)
class Goals:
    """Tasks as parameters, and the histories of tasks.

    Attributes:
        train: the training tasks, as indices into the histories' goals.
        held_out: the held-out tasks that have histories, as such indices.
        train_tasks: the training tasks ``[tasks, p]``.
        tried: the tasks for evaluation ``[tasks, p]``.
    """

    train: list[int]
    held_out: list[int]
    train_tasks: torch.Tensor
    tried: torch.Tensor


def select_trial_tasks(section: AlgorithmDistillationSection, environment: Environment) -> torch.Tensor:
    """Return the tasks ``[tasks, p]`` to evaluate an agent on: the held-out tasks, or the first of them.

    Raises:
        RequestError: as ``select_held_out_tasks``.
    """
    return select_held_out_tasks(section, environment)[: section.trial.tasks]


def find_goals(section: AlgorithmDistillationSection, environment: Environment, histories: Histories) -> Goals:
    """Divide the tasks into training and held-out ones.

    If only some of the environment's tasks were collected, these are divided.

    Raises:
        RequestError: a task is not in the environment, has no history, or is both trained and evaluated on.
    """
    index_of = {_key(task): index for index, task in enumerate(histories.tasks.tolist())}
    train, test = environment.split(section.split_seed, section.test_fraction)
    kept_apart = select_held_out_tasks(section, environment)
    apart = {_key(task) for task in kept_apart.tolist()}
    if isinstance(section.train_tasks, list):
        training_tasks = _check_given_tasks(section.train_tasks, environment, "train_tasks")
        both = [task for task in training_tasks.tolist() if _key(task) in apart]
        if both:
            raise RequestError(
                f"{_KEY}.train_tasks: {len(both)} of them are also test tasks, such as {_format_tasks(both)}; remove "
                f"them, or set {_KEY}.test_tasks to others"
            )
        missing = [task for task in training_tasks.tolist() if _key(task) not in index_of]
        if missing:
            raise RequestError(
                f"{_KEY}.train_tasks: {histories.path} has no history of {_format_tasks(missing)}; collect it, or "
                "remove it"
            )
    else:
        remaining = [
            task for task in torch.cat([train, test]).tolist() if _key(task) in index_of and _key(task) not in apart
        ]
        count = section.train_tasks or len(remaining)
        if count > len(remaining):
            raise RequestError(
                f"{_KEY}.train_tasks: {count} tasks requested, but {histories.path} has histories of only "
                f"{len(remaining)} that are not held out"
            )
        training_tasks = torch.tensor(remaining[:count], dtype=train.dtype)
    if not len(training_tasks):
        raise RequestError(f"{_KEY}.histories: {histories.path} has no task to train on; all of its tasks are held out")
    rows = [index_of[_key(task)] for task in training_tasks.tolist()]
    held_out = [index_of[_key(task)] for task in kept_apart.tolist() if _key(task) in index_of]
    return Goals(rows, held_out, training_tasks, select_trial_tasks(section, environment))


def select_held_out_tasks(section: AlgorithmDistillationSection, environment: Environment) -> torch.Tensor:
    """Return the held-out tasks ``[tasks, p]``.

    Raises:
        RequestError: one of them is not in the environment, or there are none.
    """
    if section.test_tasks is not None:
        return _check_given_tasks(section.test_tasks, environment, "test_tasks")
    held_out_tasks = environment.split(section.split_seed, section.test_fraction)[1]
    if not len(held_out_tasks):
        raise RequestError(f"{_KEY}.test_fraction: holds out no task to evaluate on; raise it")
    return held_out_tasks


def _check_given_tasks(tasks: Sequence[Sequence[float]], environment: Environment, name: str) -> torch.Tensor:
    all_tasks = environment.tasks()
    existing = {_key(task) for task in all_tasks.tolist()}
    unknown = [task for task in tasks if _key(task) not in existing]
    if unknown:
        raise RequestError(
            f"{_KEY}.{name}: {_format_tasks(unknown)} is not a task of {environment.name}; there are {len(all_tasks)} "
            f"tasks, such as {all_tasks[0].tolist()}"
        )
    return torch.tensor(tasks, dtype=all_tasks.dtype)


def _format_tasks(tasks: Sequence[Sequence[float]]) -> str:
    more = f" and {len(tasks) - _MAX_NAMED} more" if len(tasks) > _MAX_NAMED else ""
    return ", ".join(map(str, tasks[:_MAX_NAMED])) + more
