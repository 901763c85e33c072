"""Record the experience of learning algorithms as histories."""

from __future__ import annotations

import numpy as np
import torch

from trainwright.reinforcement.environments import Environment
from trainwright.reinforcement.histories import History, narrow


class Recording:
    """Buffers for ``steps`` steps of ``goals`` x ``streams`` copies, filled step by step."""

    def __init__(self, environment: Environment, steps: int, goals: int, streams: int) -> None:
        seen = (steps, goals, streams, environment.observation_size)
        observation = narrow(environment.observation_counts)
        self._states, self._next_states = np.zeros(seen, observation), np.zeros(seen, observation)
        self._actions = np.zeros(seen[:3], narrow([environment.action_count]))
        self._rewards = np.zeros(seen[:3], np.float32)
        self._dones = np.zeros(seen[:3], bool)
        self._step = 0

    def add(
        self,
        states: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        next_states: torch.Tensor,
        dones: torch.Tensor,
    ) -> None:
        """Add one step of all copies, with the streams of a goal next to one another."""
        arrays = (self._states, self._actions, self._rewards, self._next_states, self._dones)
        for array, values in zip(arrays, (states, actions, rewards, next_states, dones), strict=True):
            array[self._step] = values.numpy().reshape(array.shape[1:])
        self._step += 1

    def goal(self, index: int) -> History:
        """Return the history of one goal."""
        return History(
            self._states[:, index],
            self._actions[:, index],
            self._rewards[:, index],
            self._next_states[:, index],
            self._dones[:, index],
        )
