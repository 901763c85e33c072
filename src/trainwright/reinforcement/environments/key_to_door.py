"""Dark Key-to-Door (Laskin et al. 2022, arXiv 2210.14215): first an invisible key, then an invisible door."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.reinforcement.environments.base import VectorEnvironment
from trainwright.reinforcement.environments.grid import Grid, GridCopies

_NOTHING, _KEY = 0, 1  # and 2: the door too


class KeyToDoor(Grid):
    """One reward for the first step on the key, and one for the first step on the door after it.

    A task is (key x, key y, door x, door y). The observation does not show whether the key is held; the state does.
    """

    name = "key-to-door"

    def __init__(self, size: int = 9, horizon: int = 50) -> None:
        super().__init__(size, horizon)
        self.state_count = 3 * size * size

    def tasks(self) -> torch.Tensor:
        """Return all tasks of the environment, [n, p]."""
        axis = torch.arange(self.size)
        return torch.cartesian_prod(axis, axis, axis, axis)

    def describe(self, task: torch.Tensor) -> str:
        """Describe a task by its key and door."""
        key_x, key_y, door_x, door_y = task.tolist()
        return f"key ({key_x}, {key_y}), door ({door_x}, {door_y})"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        # Without any distance to walk, a step that stays is still needed.
        key = self._distance(tasks[:, :2]).clamp(min=1)
        door = key + (tasks[:, 2:] - tasks[:, :2]).abs().sum(dim=1).clamp(min=1)
        return (key <= self.horizon).float() + (door <= self.horizon).float()

    def vector(self, tasks: torch.Tensor, device: torch.device | str = "cpu", seed: Any = 0) -> VectorEnvironment:
        """Return a copy of the environment for each of ``tasks``."""
        return _KeyToDoorCopies(self, tasks, device, seed)


class _KeyToDoorCopies(GridCopies):
    def __init__(self, environment: Grid, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.reached = torch.zeros(self.copies, dtype=torch.int64, device=self.device)

    def states(self) -> torch.Tensor:
        return super().states() + self.reached * self.size**2

    def _begin(self, mask: torch.Tensor) -> None:
        super()._begin(mask)
        self.reached = self.reached.masked_fill(mask, _NOTHING)

    def _rewards(self) -> torch.Tensor:
        on_key = (self.reached == _NOTHING) & self._at(self.tasks[:, :2])
        on_door = (self.reached == _KEY) & self._at(self.tasks[:, 2:])
        self.reached = self.reached + (on_key | on_door)
        return (on_key | on_door).float()
