"""A user's own Gymnasium environment, named by the import path of its class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.errors import MachineError, RequestError
from trainwright.extensions import load_named
from trainwright.installation import install_command
from trainwright.reinforcement.environments.base import Environment, VectorEnvironment, check_counts

_KEY = "environment gymnasium"


class UserEnvironment(Environment):
    """Any ``gymnasium.Env`` with a Discrete action space and whole numbers as observations.

    A task is the index of an entry of ``tasks``, the keyword arguments of the class. The copies are stepped one after
    the other, in this process.
    """

    name = "gymnasium"

    def __init__(
        self,
        entry_point: str,
        tasks: list[dict[str, Any]],
        horizon: int,
        optimal_returns: list[float] | None = None,
    ) -> None:
        """Args:
            entry_point: ``package.module:Class``.
            tasks: keyword arguments for each task.
            horizon: maximum steps of an episode.
            optimal_returns: the best return of each task, if known.

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
        self.kind = _imported(entry_point)
        self.observation_counts, category = self._look_at_spaces(entry_point)
        self.observation_kind = "category" if category else "coordinates"  # type: ignore[misc]
        self.state_count = 1
        for count in self.observation_counts:
            self.state_count *= count

    def _look_at_spaces(self, entry_point: str) -> tuple[tuple[int, ...], bool]:
        from gymnasium import spaces

        one = self.build(0)
        actions: Any = one.action_space
        observations: Any = one.observation_space
        one.close()
        if not isinstance(actions, spaces.Discrete) or actions.start != 0:
            raise RequestError(f"{_KEY}: the actions of {entry_point} are {actions}; Discrete ones from 0 are needed")
        self.action_count = int(actions.n)
        if isinstance(observations, spaces.Discrete) and observations.start == 0:
            return (int(observations.n),), True
        if isinstance(observations, spaces.MultiDiscrete) and observations.nvec.ndim == 1:
            return tuple(int(count) for count in observations.nvec), False
        whole = isinstance(observations, spaces.Box) and observations.dtype.kind in "iu"
        if whole and len(observations.shape) == 1 and (observations.low == 0).all():
            return tuple(int(high) + 1 for high in observations.high), False
        raise RequestError(
            f"{_KEY}: the observations of {entry_point} are {observations}; whole numbers from 0 are needed: Discrete, "
            "MultiDiscrete, or a Box of integers in one row"
        )

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

    def vector(self, tasks: torch.Tensor, device: torch.device | str = "cpu", seed: Any = 0) -> VectorEnvironment:
        """Return a copy of the environment for each of ``tasks``."""
        return _UserCopies(self, tasks, device, seed)


class _UserCopies(VectorEnvironment):
    def __init__(
        self, environment: UserEnvironment, tasks: torch.Tensor, device: torch.device | str, seed: Any
    ) -> None:
        super().__init__(environment, tasks, device, seed)
        self.each = [environment.build(int(task)) for task in tasks[:, 0]]
        self.counts = environment.observation_counts
        self._limits = torch.tensor(self.counts)
        self._called = [
            f"{environment.options['entry_point']} with {environment.keywords[int(t)]}" for t in tasks[:, 0]
        ]
        self.seen = torch.zeros(self.copies, self.observation_size, dtype=torch.int64)
        # An environment is seeded on its first reset only.
        self.fresh = [True] * self.copies

    def observations(self) -> torch.Tensor:
        return self.seen.clone().to(self.device)

    def states(self) -> torch.Tensor:
        found = torch.zeros(self.copies, dtype=torch.int64)
        for place, count in enumerate(self.counts):
            found = found * count + self.seen[:, place]
        return found.to(self.device)

    def _begin(self, mask: torch.Tensor) -> None:
        for index in mask.nonzero()[:, 0].tolist():
            seed = int(self.seeds[index]) & 0x7FFFFFFF if self.fresh[index] else None
            self.fresh[index] = False
            with self._blamed(index, "reset"):
                observation, _ = self.each[index].reset(seed=seed)
                self._see(index, observation)

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rewards, over = torch.zeros(self.copies), torch.zeros(self.copies, dtype=torch.bool)
        for index, action in enumerate(actions.tolist()):
            with self._blamed(index, f"step({action})"):
                observation, reward, terminated, truncated, _ = self.each[index].step(action)
                self._see(index, observation)
                rewards[index], over[index] = float(reward), bool(terminated or truncated)
        return rewards.to(self.device), over.to(self.device)

    def _see(self, index: int, observation: Any) -> None:
        seen = torch.as_tensor(observation).reshape(-1)
        if len(seen) != len(self.counts) or bool(((seen < 0) | (seen >= self._limits)).any()):
            raise ValueError(f"the observation {observation} is outside the environment's observation_space")
        self.seen[index] = seen

    @contextmanager
    def _blamed(self, index: int, call: str) -> Iterator[None]:
        """Raise any error of the user's code as a RequestError that names it."""
        try:
            yield
        except Exception as error:
            raise RequestError(f"{_KEY}: {call} of {self._called[index]}: {type(error).__name__}: {error}") from error


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


def _imported(entry_point: str) -> type[Any]:
    try:
        import gymnasium
    except ImportError:
        raise MachineError(f"{_KEY}: needs Gymnasium: {install_command('reinforcement')}") from None
    found = load_named(str(entry_point), f"{_KEY}: entry_point {entry_point}")
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise RequestError(f"{_KEY}: entry_point {entry_point} is not a subclass of gymnasium.Env")
    return found
