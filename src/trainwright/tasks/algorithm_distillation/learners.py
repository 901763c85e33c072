"""Learning algorithms that record their histories: PPO is in ppo.py, the tabular ones are here, one for each stream.

Q-learning (Watkins and Dayan 1992) and UCB1 (Auer et al. 2002) take seconds where PPO takes minutes, and give every
stream its own history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import Environment
from trainwright.tasks.algorithm_distillation.histories import Recording
from trainwright.tasks.algorithm_distillation.random_numbers import mixed, uniform
from trainwright.tasks.algorithm_distillation.spec import PpoSection, QLearningSection, UcbSection

# Keys of a source that are not settings of its algorithm.
_COMMON = ("name", "streams", "steps", "seed")


class Learners(Protocol):
    """Learners of several goals."""

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        ...


def learners(environment: Environment, tasks: torch.Tensor, seeds: torch.Tensor, source: Mapping[str, Any]) -> Learners:
    """Return new learners of ``tasks`` ``[goals, p]``, seeded by ``seeds`` int64 ``[goals]``.

    Args:
        source: ``name`` (ppo, q-learning or ucb), ``streams``, and the algorithm's settings.
    """
    from trainwright.tasks.algorithm_distillation.ppo import Ppo

    own = {key: value for key, value in source.items() if key not in _COMMON}
    if source["name"] == "ppo":
        return Ppo(environment, tasks, seeds, source["streams"], PpoSection(**own))
    settings = QLearningSection(**own) if source["name"] == "q-learning" else UcbSection(**own)
    return Tables(environment, tasks, seeds, source["streams"], settings)


class Tables:
    """Learners of several goals, one for each stream. A goal's history does not depend on the other goals."""

    def __init__(
        self,
        environment: Environment,
        tasks: torch.Tensor,
        seeds: torch.Tensor,
        streams: int,
        settings: QLearningSection | UcbSection,
    ) -> None:
        """Args: as ``Ppo``.

        Raises:
            RequestError: UCB is asked to learn where there is more than one state.
        """
        if isinstance(settings, UcbSection) and environment.state_count > 1:
            raise RequestError(f"source ucb: learns one state, and {environment.name} has more; use q-learning or ppo")
        self.environment = environment
        self.goals, self.streams = len(tasks), streams
        stream_seeds = mixed((mixed(seeds)[:, None] + torch.arange(streams)).flatten())
        self.copies = environment.vector(tasks.repeat_interleave(streams, dim=0), seed=mixed(stream_seeds))
        # Random numbers for each action of each learner, to break ties and to explore.
        places = torch.arange(environment.action_count + 1)
        self._seeds = mixed(stream_seeds + (1 << 32))[:, None] + places
        learners = self.goals * streams
        self._table = (
            _QTable(settings, learners, environment)
            if isinstance(settings, QLearningSection)
            else _Arms(settings, learners, environment)
        )

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        recording = Recording(self.environment, steps, self.goals, self.streams)
        observations = self.copies.reset()
        for time in range(steps):
            states = self.copies.states()
            actions = self._table.choose(states, uniform(self._seeds, time), time)
            following, rewards, dones = self.copies.step(actions)
            self._table.learn(states, actions, rewards, self.copies.final_states, self.copies.ended)
            recording.add(observations, actions, rewards, self.copies.final_observations, dones)
            observations = following
            if progress is not None:
                progress((time + 1) / steps)
        return recording


class _QTable:
    """Estimates ``[n, states, actions]``. The horizon is not observed, so values are bootstrapped beyond it."""

    def __init__(self, settings: QLearningSection, learners: int, environment: Environment) -> None:
        self.settings = settings
        self.rows = torch.arange(learners)
        self.values = torch.full((learners, environment.state_count, environment.action_count), settings.optimism)

    def choose(self, states: torch.Tensor, ties: torch.Tensor, time: int) -> torch.Tensor:
        best = _best(self.values[self.rows, states], ties[:, 1:])
        by_chance = ties[:, 1:].argmax(dim=1)
        return torch.where(ties[:, 0] < self.settings.epsilon, by_chance, best)

    def learn(
        self,
        states: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        following: torch.Tensor,
        ended: torch.Tensor,
    ) -> None:
        beyond = self.values[self.rows, following].max(dim=1).values.masked_fill(ended, 0)
        target = rewards + self.settings.gamma * beyond
        estimates = self.values[self.rows, states, actions]
        self.values[self.rows, states, actions] = estimates + self.settings.learning_rate * (target - estimates)


class _Arms:
    """Mean rewards of the arms ``[n, arms]``, and how often each was tried."""

    def __init__(self, settings: UcbSection, learners: int, environment: Environment) -> None:
        self.settings = settings
        self.rows = torch.arange(learners)
        self.sums = torch.zeros(learners, environment.action_count)
        self.tries = torch.zeros(learners, environment.action_count)

    def choose(self, states: torch.Tensor, ties: torch.Tensor, time: int) -> torch.Tensor:
        means = self.sums / self.tries.clamp(min=1)
        bonus = self.settings.exploration * torch.sqrt(torch.log(torch.tensor(time + 1.0)) / self.tries.clamp(min=1))
        return _best((means + bonus).masked_fill(self.tries == 0, torch.inf), ties[:, 1:])

    def learn(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor, *_: torch.Tensor) -> None:
        self.sums[self.rows, actions] += rewards
        self.tries[self.rows, actions] += 1


def _best(values: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest value of each row; ties are resolved by the largest of ``ties``."""
    largest = values == values.max(dim=1, keepdim=True).values
    return ties.masked_fill(~largest, -1).argmax(dim=1)
