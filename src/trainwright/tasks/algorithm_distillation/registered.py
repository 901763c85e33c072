"""The environments for Gymnasium, registered when this module is imported:
``gymnasium.make_vec("trainwright.tasks.algorithm_distillation.registered:trainwright/Darkroom-v0", num_envs=8)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import make

IDS = {
    "trainwright/Darkroom-v0": "darkroom",
    "trainwright/DarkroomHard-v0": "darkroom-hard",
    "trainwright/DarkroomPermuted-v0": "darkroom-permuted",
    "trainwright/KeyToDoor-v0": "key-to-door",
    "trainwright/Bandit-v0": "bandit",
}


class GymnasiumCopies(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Copies of an environment as a Gymnasium vector environment with autoreset in the same step.

    ``infos`` of a step with ends has ``final_obs``, the last observations of these episodes, and its mask
    ``_final_obs``.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, environment: str, num_envs: int = 1, tasks: Any = None, **options: Any) -> None:
        """Args:
        tasks: parameters of a task for each copy, ``[num_envs, p]``. Default: the environment's tasks in order,
            repeated as needed.
        """
        family = make(environment, **options)
        all_tasks = family.tasks()
        self._tasks = all_tasks[torch.arange(num_envs) % len(all_tasks)] if tasks is None else torch.as_tensor(tasks)
        if self._tasks.shape != (num_envs, all_tasks.shape[1]):
            raise RequestError(
                f"environment {environment}: tasks is {list(self._tasks.shape)}, where {num_envs} copies need "
                f"{[num_envs, all_tasks.shape[1]]}"
            )
        self._family = family
        self._copies = family.vector(self._tasks)
        self.num_envs = num_envs
        self.single_observation_space = MultiDiscrete(np.array(family.observation_counts))
        self.single_action_space = Discrete(family.action_count)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset all copies, or those of ``options["reset_mask"]``; a seed makes random numbers reproducible."""
        mask = None if options is None or "reset_mask" not in options else torch.as_tensor(options["reset_mask"])
        if seed is not None:
            seeds = torch.tensor([value or 0 for value in seed]) if isinstance(seed, Sequence) else int(seed) % 2**31
            self._copies = self._family.vector(self._tasks, seed=seeds)
        return self._copies.reset(mask).numpy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take ``actions``; an end is a truncation, because it comes from the horizon."""
        observations, rewards, dones = self._copies.step(torch.as_tensor(np.asarray(actions), dtype=torch.int64))
        infos: dict[str, Any] = {}
        if bool(dones.any()):
            infos = {"final_obs": self._copies.final_observations.numpy(), "_final_obs": dones.numpy()}
        never = np.zeros(self.num_envs, dtype=bool)
        return observations.numpy(), rewards.double().numpy(), never, dones.numpy(), infos


def _register() -> None:
    for name, environment in IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                name,
                vector_entry_point="trainwright.tasks.algorithm_distillation.registered:GymnasiumCopies",
                kwargs={"environment": environment},
            )


_register()
