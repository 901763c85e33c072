"""The interface of environments: a family of tasks, and many copies that are stepped at once."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

from trainwright.errors import RequestError


class Environment(ABC):
    """A family of tasks with the same observations and actions, but different goals.

    Attributes:
        name: as in the registry.
        options: its constructor arguments.
        horizon: maximum steps of an episode.
        action_count: actions are whole numbers from 0 to this, exclusive.
        observation_counts: an observation has one whole number per entry, each from 0 to its entry, exclusive.
        observation_kind: coordinates: nearby numbers mean nearby places. bins: the same, of real numbers. category:
            they are names.
        state_count: number of states, for algorithms that keep a table of them.
    """

    name: str
    observation_kind: ClassVar[Literal["coordinates", "bins", "category"]]
    options: dict[str, Any]
    horizon: int
    action_count: int
    observation_counts: tuple[int, ...]
    state_count: int

    @property
    def observation_size(self) -> int:
        """Return how many whole numbers an observation has."""
        return len(self.observation_counts)

    @abstractmethod
    def tasks(self) -> torch.Tensor:
        """Return the parameters of every task, ``[tasks, p]``."""

    @abstractmethod
    def describe(self, task: torch.Tensor) -> str:
        """Return a description of a task's parameters ``[p]``."""

    @abstractmethod
    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks ``[n, p]``: float32 ``[n]``, NaN if unknown."""

    @abstractmethod
    def vector(
        self, tasks: torch.Tensor, device: torch.device | str = "cpu", seed: int | torch.Tensor = 0
    ) -> VectorEnvironment:
        """Return a copy of the environment for each row of ``tasks`` ``[n, p]``.

        Args:
            seed: of the environment's random numbers: one number, or int64 ``[n]``, one for each copy.
        """

    def split(self, seed: int, test_fraction: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return training and test tasks, ``[n, p]`` each, in an order determined by ``seed``."""
        tasks = self.tasks()
        train, test = self.split_indices(seed, test_fraction)
        return tasks[train], tasks[test]

    def split_indices(self, seed: int, test_fraction: float = 0.1) -> tuple[list[int], list[int]]:
        """Return ``split`` as rows of ``tasks()``.

        Python's generator shuffles, and the last tasks are the test tasks, as in the reference code of Algorithm
        Distillation on Darkroom (https://github.com/tommyma3/Algorithm_Distillation), so that the same seed holds out
        the same goals.
        """
        order = list(range(len(self.tasks())))
        random.Random(seed).shuffle(order)
        kept = round(len(order) * (1 - test_fraction))
        return order[:kept], order[kept:]


class VectorEnvironment(ABC):
    """Copies of an environment that are stepped together; a copy whose episode ends is reset automatically.

    Attributes:
        copies: their number.
        final_observations: int64 ``[n, k]``. The observations after the last step, before automatic resets.
        final_states: the same of ``states()``.
        ended: bool ``[n]``. Where the last step ended an episode for a reason other than the horizon.
    """

    def __init__(self, environment: Environment, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        self.copies = len(tasks)
        self.device = torch.device(device)
        self.tasks = tasks.to(self.device)
        self.horizon = environment.horizon
        self.action_count = environment.action_count
        self.observation_size = environment.observation_size
        self.seeds = _seeds(seed, self.copies).to(self.device)
        self.elapsed = torch.zeros(self.copies, dtype=torch.int64, device=self.device)
        self.final_observations = torch.zeros(self.copies, self.observation_size, dtype=torch.int64, device=self.device)

    def reset(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Start a new episode in every copy, or in those of ``mask`` (bool ``[n]``).

        Returns:
            Observations of all copies, int64 ``[n, k]``.
        """
        if mask is None:
            mask = torch.ones(self.copies, dtype=torch.bool, device=self.device)
        self.elapsed.masked_fill_(mask, 0)
        self._begin(mask)
        return self.observations()

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take ``actions`` (int64 ``[n]``) in all copies.

        Returns:
            Observations int64 ``[n, k]`` (the first of the new episode where one ended), rewards float32 ``[n]``,
            and whether the episode ended, bool ``[n]``.
        """
        rewards, over = self._move(actions)
        self.elapsed += 1
        self.ended = torch.zeros_like(self.elapsed, dtype=torch.bool) if over is None else over
        dones = (self.elapsed >= self.horizon) | self.ended
        observations = self.final_observations = self.observations()
        self.final_states = self.states()
        # Most episodes end together, and most steps end none.
        if bool(dones.any()):
            observations = self.reset(dones)
        return observations, rewards, dones

    @abstractmethod
    def observations(self) -> torch.Tensor:
        """Return the current observations of the copies, int64 ``[n, k]``, as a new tensor."""

    @abstractmethod
    def states(self) -> torch.Tensor:
        """Return the states of the copies, int64 ``[n]`` from 0 to ``state_count``; complete except for the task."""

    @abstractmethod
    def _begin(self, mask: torch.Tensor) -> None:
        """Reset the copies of ``mask`` to an initial state."""

    @abstractmethod
    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply ``actions``; return the rewards, and where episodes end before the horizon (or None)."""


def check_counts(environment: str, **values: Any) -> None:
    """Check options that are counts.

    Raises:
        RequestError: one is not a whole number of at least 1.
    """
    for option, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"environment {environment}: {option} is a whole number of at least 1, not {value}")


def _seeds(seed: int | torch.Tensor, copies: int) -> torch.Tensor:
    if isinstance(seed, torch.Tensor):
        return seed.to(torch.int64)
    return torch.arange(copies, dtype=torch.int64) + (seed << 32)
