"""The interface of environments, a family of tasks and copies that are stepped at once; and the simplest, a bandit."""

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
        vector_class: the class of its copies.
    """

    name: str
    observation_kind: ClassVar[Literal["coordinates", "bins", "category"]]
    vector_class: ClassVar[type[VectorEnvironment]]
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

    def vector(
        self, tasks: torch.Tensor, device: torch.device | str = "cpu", seed: int | torch.Tensor = 0
    ) -> VectorEnvironment:
        """Return a copy of the environment for each row of ``tasks`` ``[n, p]``.

        Args:
            seed: of the environment's random numbers: one number, or int64 ``[n]``, one for each copy.
        """
        return self.vector_class(self, tasks, device, seed)

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
        count = round(len(order) * (1 - test_fraction))
        return order[:count], order[count:]


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
        if not isinstance(seed, torch.Tensor):
            seed = torch.arange(self.copies) + (seed << 32)
        self.seeds = seed.to(self.device, torch.int64)
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


class _BanditCopies(VectorEnvironment):
    def __init__(self, environment: Bandit, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.noise = environment.noise if environment.rewards == "gaussian" else None
        self.draws = 0
        self.second_seeds = mix_bits(self.seeds + (1 << 40))

    def observations(self) -> torch.Tensor:
        return torch.zeros(self.copies, 1, dtype=torch.int64, device=self.device)

    def states(self) -> torch.Tensor:
        return torch.zeros(self.copies, dtype=torch.int64, device=self.device)

    def _begin(self, mask: torch.Tensor) -> None:
        pass

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        means = self.tasks.gather(1, actions[:, None])[:, 0]
        uniforms = sample_uniform(self.seeds, self.draws)
        if self.noise is None:
            rewards = (uniforms < means).float()
        else:
            # Box and Muller's transform of two uniform numbers into a normal one.
            angle = 2 * torch.pi * sample_uniform(self.second_seeds, self.draws)
            rewards = means + self.noise * (-2 * torch.log1p(-uniforms)).sqrt() * angle.cos()
        self.draws += 1
        return rewards, None


class Bandit(Environment):
    """A bandit. A task is the mean reward of each arm, drawn uniformly from 0 to 1.

    With ``rewards`` bernoulli an arm pays 1 with the probability of its mean, with gaussian it pays its mean plus noise
    of standard deviation ``noise``. The ``count`` tasks are determined by ``seed``.
    """

    name = "bandit"
    vector_class = _BanditCopies
    observation_kind = "category"

    def __init__(
        self,
        arms: int = 10,
        horizon: int = 100,
        count: int = 1000,
        rewards: Literal["bernoulli", "gaussian"] = "bernoulli",
        noise: float = 0.3,
        seed: int = 0,
    ) -> None:
        check_counts(self.name, arms=arms, horizon=horizon, count=count)
        if rewards not in ("bernoulli", "gaussian"):
            raise RequestError(f"environment bandit: rewards is bernoulli or gaussian, not {rewards}")
        if rewards == "bernoulli" and noise != 0.3:
            raise RequestError("environment bandit: noise has no effect with rewards bernoulli; remove it")
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < float("inf"):
            raise RequestError(f"environment bandit: noise is a number of at least 0, not {noise}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise RequestError(f"environment bandit: seed is a whole number from 0 to below 2**31, not {seed}")
        self.options = {"arms": arms, "horizon": horizon, "count": count, "rewards": rewards, "seed": seed}
        if rewards == "gaussian":
            self.options["noise"] = noise
        self.rewards, self.noise, self.seed, self.count = rewards, noise, seed, count
        self.horizon = horizon
        self.action_count = arms
        self.observation_counts = (1,)
        self.state_count = 1

    def tasks(self) -> torch.Tensor:
        """Return all tasks of the environment, [n, p]."""
        seeds = torch.arange(self.count * self.action_count) + (self.seed << 32)
        return sample_uniform(seeds, 0).view(self.count, self.action_count)

    def describe(self, task: torch.Tensor) -> str:
        """Describe a task by its best arm."""
        return f"best arm {int(task.argmax())} of mean {float(task.max()):.3f}"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        return self.horizon * tasks.max(dim=1).values.float()


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def sample_uniform(seeds: torch.Tensor, draw: int) -> torch.Tensor:
    """Return one number in [0, 1) for each seed.

    SplitMix64 as a counter-based generator (Steele, Lea and Flood, 2014, doi 10.1145/2660193.2660195).

    Args:
        seeds: int64, any shape. Consecutive seeds give independent numbers.
        draw: the draw index; different draws give different numbers.

    Returns:
        float32 of the same shape.
    """
    return (mix_bits(mix_bits(seeds) + draw) & 0xFFFFFF).float() * 2**-24


def mix_bits(values: torch.Tensor) -> torch.Tensor:
    """Mix int64 numbers so that each bit of the result depends on every bit of the input."""
    values = values + _GOLDEN
    values = (values ^ _shift_right(values, 30)) * _FIRST
    values = (values ^ _shift_right(values, 27)) * _SECOND
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    # The shift must be logical: fill with zeros instead of the sign bit.
    return (values >> bits) & ((1 << (64 - bits)) - 1)
