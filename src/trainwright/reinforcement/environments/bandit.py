"""Bandits: one state, and arms with random rewards."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trainwright.errors import RequestError
from trainwright.reinforcement.environments.base import Environment, VectorEnvironment, check_counts
from trainwright.reinforcement.random_numbers import mixed, uniform


class Bandit(Environment):
    """A bandit. A task is the mean reward of each arm, drawn uniformly from 0 to 1.

    With ``rewards`` bernoulli an arm pays 1 with the probability of its mean, with gaussian it pays its mean plus noise
    of standard deviation ``noise``. The ``count`` tasks are determined by ``seed``.
    """

    name = "bandit"
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
        places = torch.arange(self.count * self.action_count) + (self.seed << 32)
        return uniform(places, 0).view(self.count, self.action_count)

    def describe(self, task: torch.Tensor) -> str:
        """Describe a task by its best arm."""
        return f"best arm {int(task.argmax())} of mean {float(task.max()):.3f}"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        return self.horizon * tasks.max(dim=1).values.float()

    def vector(self, tasks: torch.Tensor, device: torch.device | str = "cpu", seed: Any = 0) -> VectorEnvironment:
        """Return a copy of the environment for each of ``tasks``."""
        return _BanditCopies(self, tasks, device, seed)


class _BanditCopies(VectorEnvironment):
    def __init__(self, environment: Bandit, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.noise = environment.noise if environment.rewards == "gaussian" else None
        self.draws = 0
        self.second_seeds = mixed(self.seeds + (1 << 40))

    def observations(self) -> torch.Tensor:
        return torch.zeros(self.copies, 1, dtype=torch.int64, device=self.device)

    def states(self) -> torch.Tensor:
        return torch.zeros(self.copies, dtype=torch.int64, device=self.device)

    def _begin(self, mask: torch.Tensor) -> None:
        pass

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        means = self.tasks.gather(1, actions[:, None])[:, 0]
        drawn = uniform(self.seeds, self.draws)
        if self.noise is None:
            rewards = (drawn < means).float()
        else:
            # Box and Muller's transform of two uniform numbers into a normal one.
            angle = 2 * torch.pi * uniform(self.second_seeds, self.draws)
            rewards = means + self.noise * (-2 * torch.log1p(-drawn)).sqrt() * angle.cos()
        self.draws += 1
        return rewards, None
