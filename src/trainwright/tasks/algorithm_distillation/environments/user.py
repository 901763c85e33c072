"""A user's own Gymnasium environment, named by the import path of its class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch

from trainwright.errors import MachineError, RequestError
from trainwright.recipe.extensions import load_named
from trainwright.tasks.algorithm_distillation.environments.base import Environment, VectorEnvironment, check_counts
from trainwright.utils.installation import install_command

_KEY = "environment gymnasium"
_OBSERVATION_BINS, _ACTION_BINS = 32, 9
_MAX_ACTIONS = 1024  # combinations of the bins of several continuous actions


class _UserCopies(VectorEnvironment):
    def __init__(
        self, environment: UserEnvironment, tasks: torch.Tensor, device: torch.device | str, seed: Any
    ) -> None:
        super().__init__(environment, tasks, device, seed)
        self.each = [environment.build(int(task)) for task in tasks[:, 0]]
        self.family = environment
        self._called = [
            f"{environment.options['entry_point']} with {environment.keywords[int(t)]}" for t in tasks[:, 0]
        ]
        self.seen = np.zeros((self.copies, self.observation_size), np.int64)
        # An environment is seeded on its first reset only.
        self.fresh = [True] * self.copies

    def observations(self) -> torch.Tensor:
        return torch.from_numpy(self.seen.copy()).to(self.device)

    def states(self) -> torch.Tensor:
        indices = np.zeros(self.copies, np.int64)
        for index, count in enumerate(self.family.observation_counts):
            indices = indices * count + self.seen[:, index]
        return torch.from_numpy(indices).to(self.device)

    def _begin(self, mask: torch.Tensor) -> None:
        for index in mask.nonzero()[:, 0].tolist():
            seed = int(self.seeds[index]) & 0x7FFFFFFF if self.fresh[index] else None
            self.fresh[index] = False
            with self._blame_user_code(index, "reset", ""):
                observation, _ = self.each[index].reset(seed=seed)
                self.seen[index] = self.family.encode(observation)

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rewards, over = torch.zeros(self.copies), torch.zeros(self.copies, dtype=torch.bool)
        for index, action in enumerate(actions.tolist()):
            value = self.family.actions[action]
            with self._blame_user_code(index, "step", value):
                observation, reward, terminated, truncated, _ = self.each[index].step(value)
                self.seen[index] = self.family.encode(observation)
                rewards[index], over[index] = float(reward), bool(terminated or truncated)
        return rewards.to(self.device), over.to(self.device)

    @contextmanager
    def _blame_user_code(self, index: int, call: str, argument: Any) -> Iterator[None]:
        """Raise any error of the user's code as a RequestError that names it."""
        try:
            yield
        except Exception as error:
            raise RequestError(
                f"{_KEY}: {call}({argument}) of {self._called[index]}: {type(error).__name__}: {error}"
            ) from error


class UserEnvironment(Environment):
    """Any ``gymnasium.Env`` with Discrete or Box actions, and Discrete, MultiDiscrete or Box observations.

    A task is the index of an entry of ``tasks``, the keyword arguments of the class. The copies are stepped one after
    the other, in this process. Real numbers are divided into bins, so learners and models see whole numbers only: each
    number of an observation becomes the index of one of ``observation_bins`` intervals of equal width, and an action
    is the index of a combination of ``action_bins`` values, from the lowest to the highest, of every number.
    """

    name = "gymnasium"
    vector_class = _UserCopies

    def __init__(
        self,
        entry_point: str,
        tasks: list[dict[str, Any]],
        horizon: int,
        optimal_returns: list[float] | None = None,
        observation_bins: int | None = None,
        observation_bounds: list[list[float]] | None = None,
        action_bins: int | None = None,
    ) -> None:
        """Args:
            entry_point: ``package.module:Class``.
            tasks: keyword arguments for each task.
            horizon: maximum steps of an episode.
            optimal_returns: the best return of each task, if known.
            observation_bins: intervals of each real number of an observation.
            observation_bounds: lowest and highest value of each, where those of the space are infinite or too wide.
                Values beyond them are counted to the outermost intervals.
            action_bins: values of each real number of an action.

        Raises:
            RequestError: the class cannot be imported or called, is not a ``gymnasium.Env``, or its spaces are not
                supported.
        """
        self.options = {"entry_point": entry_point, "tasks": tasks, "horizon": horizon}
        if optimal_returns is not None:
            self.options["optimal_returns"] = optimal_returns
        check_counts(self.name, horizon=horizon)
        _check_options(tasks, optimal_returns)
        self.keywords, self.horizon, self.optimal_returns = tasks, horizon, optimal_returns
        self.kind = _import_environment(entry_point)
        sample = self.build(0)
        self.actions = self._list_action_values(entry_point, sample.action_space, action_bins)
        self.bounds: np.ndarray | None = None
        self.observation_counts, kind = self._count_observation_values(
            entry_point, sample.observation_space, observation_bins, observation_bounds
        )
        sample.close()
        self._limits = np.array(self.observation_counts)
        self.observation_kind = kind  # type: ignore[misc, assignment]
        self.state_count = math.prod(self.observation_counts)

    def _list_action_values(self, entry_point: str, space: Any, bins: int | None) -> list[Any]:
        """Return what ``step`` of the class takes for every action."""
        from gymnasium import spaces

        if isinstance(space, spaces.Discrete) and space.start == 0:
            _check_unused("the actions", space, action_bins=bins)
            self.action_count = int(space.n)
            return list(range(self.action_count))
        if not (isinstance(space, spaces.Box) and space.dtype.kind == "f" and space.is_bounded()):
            raise RequestError(
                f"{_KEY}: the actions of {entry_point} are {space}; Discrete ones from 0, or a Box of real numbers "
                "with bounds, are needed"
            )
        bins = self.options["action_bins"] = _ACTION_BINS if bins is None else bins
        _check_bins(action_bins=bins)
        numbers = int(np.prod(space.shape))
        self.action_count = bins**numbers
        if self.action_count > _MAX_ACTIONS:
            raise RequestError(
                f"{_KEY}: action_bins {bins} for each of {numbers} numbers are {self.action_count:,} actions, more "
                f"than {_MAX_ACTIONS:,}; use fewer"
            )
        lines = (np.linspace(*ends, bins) for ends in zip(space.low.flat, space.high.flat, strict=True))
        return [np.array(values, space.dtype).reshape(space.shape) for values in product(*lines)]

    def _count_observation_values(
        self, entry_point: str, space: Any, bins: int | None, bounds: list[list[float]] | None
    ) -> tuple[tuple[int, ...], str]:
        """Return how many values each number of an observation has, and the kind."""
        from gymnasium import spaces

        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            bins = self.options["observation_bins"] = _OBSERVATION_BINS if bins is None else bins
            _check_bins(observation_bins=bins)
            self.bounds = _find_bounds(entry_point, space, bounds)
            if bounds is not None:
                self.options["observation_bounds"] = bounds
            return (bins,) * self.bounds.shape[1], "bins"
        _check_unused("the observations", space, observation_bins=bins, observation_bounds=bounds)
        if isinstance(space, spaces.Discrete) and space.start == 0:
            return (int(space.n),), "category"
        if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            return tuple(int(count) for count in space.nvec), "coordinates"
        if isinstance(space, spaces.Box) and len(space.shape) == 1 and (space.low == 0).all():
            return tuple(int(high) + 1 for high in space.high), "coordinates"
        raise RequestError(
            f"{_KEY}: the observations of {entry_point} are {space}; needed are a Box of real numbers, or whole "
            "numbers from 0: Discrete, MultiDiscrete, or a Box of integers in one row"
        )

    def encode(self, observation: Any) -> np.ndarray:
        """Return the whole numbers of an observation of the class, int64 [k].

        Raises:
            ValueError: it is not in the observation space.
        """
        values = np.asarray(observation).reshape(-1)
        limits = self._limits
        if values.shape != limits.shape:
            raise ValueError(f"the observation {observation} has {len(values)} numbers, not {len(limits)}")
        if self.bounds is not None:
            low, high = self.bounds
            # Values that are not finite stay so, and are refused below.
            values = np.minimum(np.maximum((values - low) / (high - low) * limits, 0), limits - 1)
        if not ((values >= 0) & (values < limits)).all():
            raise ValueError(f"the observation {observation} is outside the environment's observation_space")
        return values.astype(np.int64)

    def build(self, task: int) -> Any:
        """Return one environment of that task."""
        keywords = self.keywords[task]
        try:
            return self.kind(**keywords)
        except Exception as error:
            raise RequestError(f"{_KEY}: cannot be created with {keywords} (task {task}): {error}") from error

    def tasks(self) -> torch.Tensor:
        """Return all tasks of the environment, [n, p]."""
        return torch.arange(len(self.keywords))[:, None]

    def describe(self, task: torch.Tensor) -> str:
        """Return a description of a task: its keyword arguments."""
        return ", ".join(f"{key} {value}" for key, value in self.keywords[int(task[0])].items()) or "without keywords"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        if self.optimal_returns is None:
            return torch.full((len(tasks),), torch.nan)
        return torch.tensor(self.optimal_returns)[tasks[:, 0]].float()


def _find_bounds(entry_point: str, space: Any, bounds: Any) -> np.ndarray:
    """Return the lowest and highest values [2, k] of the numbers of an observation."""
    if bounds is None:
        ends = np.stack([space.low.reshape(-1), space.high.reshape(-1)]).astype(np.float64)
        if not np.isfinite(ends).all() or np.abs(ends).max() > np.finfo(np.float32).max / 2:
            raise RequestError(
                f"{_KEY}: the observations of {entry_point} are {space}, without bounds; set observation_bounds to "
                f"[[lowest, highest], ...] of its {ends.shape[1]} numbers"
            )
        return ends
    try:
        ends = np.array(bounds, np.float64).T
    except (TypeError, ValueError):
        ends = np.zeros(0)
    if ends.shape != (2, int(np.prod(space.shape))) or not np.isfinite(ends).all() or not (ends[0] < ends[1]).all():
        raise RequestError(
            f"{_KEY}: observation_bounds is [[lowest, highest], ...] of the {int(np.prod(space.shape))} numbers of an "
            f"observation of {entry_point}, not {bounds}"
        )
    return ends


def _check_bins(**bins: Any) -> None:
    for option, count in bins.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 2 <= count <= _MAX_ACTIONS:
            raise RequestError(f"{_KEY}: {option} is a whole number from 2 to {_MAX_ACTIONS:,}, not {count}")


def _check_unused(what: str, space: Any, **options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise RequestError(f"{_KEY}: {option} has no effect: {what} are {space}, no Box of real numbers; remove it")


def _check_options(tasks: Any, optimal_returns: Any) -> None:
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise RequestError(f"{_KEY}: tasks is a list of the keywords of each task, such as [{{goal: 3}}], not {tasks}")
    if not tasks:
        raise RequestError(f"{_KEY}: tasks is empty; set the keywords of each task, such as [{{goal: 3}}]")
    if optimal_returns is None:
        return
    if not isinstance(optimal_returns, list) or not all(isinstance(best, int | float) for best in optimal_returns):
        raise RequestError(f"{_KEY}: optimal_returns is a list of a number for each task, not {optimal_returns}")
    if len(optimal_returns) != len(tasks):
        raise RequestError(f"{_KEY}: {len(optimal_returns)} optimal_returns for {len(tasks)} tasks; set one for each")


def _import_environment(entry_point: str) -> type[Any]:
    try:
        import gymnasium
    except ImportError:
        raise MachineError(f"{_KEY}: needs Gymnasium: {install_command('reinforcement')}") from None
    loaded_class = load_named(str(entry_point), f"{_KEY}: entry_point {entry_point}")
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, gymnasium.Env)):
        raise RequestError(f"{_KEY}: entry_point {entry_point} is not a subclass of gymnasium.Env")
    return loaded_class
