"""Dark rooms: a square grid in which the agent sees its own position but not the goal.

Darkroom, its hard variant and Key-to-Door are from Laskin et al. 2022 (arXiv 2210.14215); the permuted one is from Lee
et al. 2023 (arXiv 2306.14892). Moves, start and order of tasks are as in https://github.com/tommyma3/Algorithm_Distillation.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any, ClassVar

import torch

from trainwright.tasks.algorithm_distillation.environments.base import Environment, VectorEnvironment, check_counts

# The effect of the five actions on (x, y): x + 1, x - 1, the same for y, none.
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))
_NOTHING, _KEY = 0, 1  # and 2: the door too


class Grid(Environment):
    """The base of all rooms: ``size`` x ``size`` cells, five actions, observations (x, y)."""

    observation_kind = "coordinates"

    def __init__(self, size: int, horizon: int) -> None:
        check_counts(self.name, size=size, horizon=horizon)
        self.options = {"size": size, "horizon": horizon}
        self.size = size
        self.horizon = horizon
        self.action_count = len(MOVES)
        self.observation_counts = (size, size)
        self.state_count = size * size

    @property
    def start(self) -> tuple[int, int]:
        """Return the start of episodes: the center."""
        return self.size // 2, self.size // 2

    def _compute_distance(self, cells: torch.Tensor) -> torch.Tensor:
        return (cells - torch.tensor(self.start, device=cells.device)).abs().sum(dim=-1)


class GridCopies(VectorEnvironment):
    """The agents' positions and moves; subclasses define ``_compute_rewards``."""

    def __init__(self, environment: Grid, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.size = environment.size
        self.moves = torch.tensor(MOVES, device=self.device)
        self.start = torch.tensor(environment.start, device=self.device)
        self.position = self.start.repeat(self.copies, 1)

    def observations(self) -> torch.Tensor:
        """Return the positions."""
        return self.position.clone()

    def states(self) -> torch.Tensor:
        """Return the index of each position."""
        return self.position[:, 0] * self.size + self.position[:, 1]

    def _begin(self, mask: torch.Tensor) -> None:
        self.position = torch.where(mask[:, None], self.start, self.position)

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.position = (self.position + self.moves[actions]).clamp_(0, self.size - 1)
        return self._compute_rewards(), None

    def _at(self, cells: torch.Tensor) -> torch.Tensor:
        return (self.position == cells).all(dim=1)

    def _compute_rewards(self) -> torch.Tensor:
        raise NotImplementedError


class _DarkroomCopies(GridCopies):
    def _compute_rewards(self) -> torch.Tensor:
        return self._at(self.tasks).float()


class Darkroom(Grid):
    """One reward for every step that ends on the goal. A task is the goal's (x, y)."""

    name = "darkroom"
    vector_class: ClassVar[type[VectorEnvironment]] = _DarkroomCopies

    def __init__(self, size: int = 9, horizon: int = 20) -> None:
        super().__init__(size, horizon)

    def tasks(self) -> torch.Tensor:
        """Return all tasks of the environment, [n, p]."""
        axis = torch.arange(self.size)
        return torch.cartesian_prod(axis, axis)

    def describe(self, task: torch.Tensor) -> str:
        """Describe a task by its goal."""
        return f"goal ({int(task[0])}, {int(task[1])})"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        # The arriving step is rewarded too; starting on the goal loses no step.
        return (self.horizon + 1 - self._compute_distance(tasks)).clamp(0, self.horizon).float()


class _HardCopies(GridCopies):
    def __init__(self, environment: Grid, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.found = torch.zeros(self.copies, dtype=torch.bool, device=self.device)

    def states(self) -> torch.Tensor:
        return super().states() + self.found * self.size**2

    def _begin(self, mask: torch.Tensor) -> None:
        super()._begin(mask)
        self.found = self.found & ~mask

    def _compute_rewards(self) -> torch.Tensor:
        first = self._at(self.tasks) & ~self.found
        self.found = self.found | first
        return first.float()


class DarkroomHard(Darkroom):
    """A larger room with one reward per episode, for the first step that ends on the goal."""

    name = "darkroom-hard"
    vector_class = _HardCopies

    def __init__(self, size: int = 17, horizon: int = 20) -> None:
        super().__init__(size, horizon)
        self.state_count = 2 * size * size

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        return (self._compute_distance(tasks) <= self.horizon).float()


class _PermutedCopies(GridCopies):
    def __init__(
        self, environment: DarkroomPermuted, tasks: torch.Tensor, device: torch.device | str, seed: Any
    ) -> None:
        super().__init__(environment, tasks, device, seed)
        self.meant = environment.permutations.to(self.device)[self.tasks[:, 0]]

    def _move(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super()._move(self.meant.gather(1, actions[:, None])[:, 0])

    def _compute_rewards(self) -> torch.Tensor:
        return (self.position == self.size - 1).all(dim=1).float()


class DarkroomPermuted(Grid):
    """A room to cross from one corner to the opposite one, with permuted actions.

    A task is the index of the permutation p in lexicographic order; action a then moves as action p[a] does elsewhere.
    """

    name = "darkroom-permuted"
    vector_class = _PermutedCopies

    def __init__(self, size: int = 9, horizon: int = 50) -> None:
        super().__init__(size, horizon)
        self.permutations = torch.tensor(list(permutations(range(len(MOVES)))))

    @property
    def start(self) -> tuple[int, int]:
        """Return the corner in which episodes start."""
        return 0, 0

    def tasks(self) -> torch.Tensor:
        """Return all tasks of the environment, [n, p]."""
        return torch.arange(len(self.permutations))[:, None]

    def describe(self, task: torch.Tensor) -> str:
        """Describe a task by its permutation."""
        return f"actions {self.permutations[int(task[0])].tolist()}"

    def optimal_return(self, tasks: torch.Tensor) -> torch.Tensor:
        """Return the highest expected return of an episode, for tasks [n, p]."""
        best = max(self.horizon + 1 - 2 * (self.size - 1), 0)
        return torch.full((len(tasks),), float(min(best, self.horizon)), device=tasks.device)


class _KeyToDoorCopies(GridCopies):
    def __init__(self, environment: Grid, tasks: torch.Tensor, device: torch.device | str, seed: Any) -> None:
        super().__init__(environment, tasks, device, seed)
        self.reached = torch.zeros(self.copies, dtype=torch.int64, device=self.device)

    def states(self) -> torch.Tensor:
        return super().states() + self.reached * self.size**2

    def _begin(self, mask: torch.Tensor) -> None:
        super()._begin(mask)
        self.reached = self.reached.masked_fill(mask, _NOTHING)

    def _compute_rewards(self) -> torch.Tensor:
        on_key = (self.reached == _NOTHING) & self._at(self.tasks[:, :2])
        on_door = (self.reached == _KEY) & self._at(self.tasks[:, 2:])
        self.reached = self.reached + (on_key | on_door)
        return (on_key | on_door).float()


class KeyToDoor(Grid):
    """One reward for the first step on the key, and one for the first step on the door after it.

    A task is (key x, key y, door x, door y). The observation does not show whether the key is held; the state does.
    """

    name = "key-to-door"
    vector_class = _KeyToDoorCopies

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
        key = self._compute_distance(tasks[:, :2]).clamp(min=1)
        door = key + (tasks[:, 2:] - tasks[:, :2]).abs().sum(dim=1).clamp(min=1)
        return (key <= self.horizon).float() + (door <= self.horizon).float()
