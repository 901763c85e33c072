"""The environments once more, one copy at a time in plain Python, as their papers and reference code describe them."""

from __future__ import annotations

from itertools import permutations


class Room:
    """What all rooms share; ``reward`` says how they differ."""

    def __init__(self, size: int, horizon: int, start: tuple[int, int]) -> None:
        self.size, self.horizon, self.start = size, horizon, start
        self.reset()

    def reset(self) -> list[int]:
        self.x, self.y = self.start
        self.elapsed = 0
        self.found = 0
        return [self.x, self.y]

    def step(self, action: int) -> tuple[list[int], float, bool]:
        self.move(action)
        reward = self.reward()
        self.elapsed += 1
        return [self.x, self.y], reward, self.elapsed == self.horizon

    def move(self, action: int) -> None:
        if action == 0:
            self.x = min(self.x + 1, self.size - 1)
        elif action == 1:
            self.x = max(self.x - 1, 0)
        elif action == 2:
            self.y = min(self.y + 1, self.size - 1)
        elif action == 3:
            self.y = max(self.y - 1, 0)

    def reward(self) -> float:
        raise NotImplementedError


class Darkroom(Room):
    def __init__(self, task: list[int], size: int = 9, horizon: int = 20) -> None:
        super().__init__(size, horizon, (size // 2, size // 2))
        self.goal = tuple(task)

    def reward(self) -> float:
        return 1.0 if (self.x, self.y) == self.goal else 0.0


class DarkroomHard(Darkroom):
    def __init__(self, task: list[int], size: int = 17, horizon: int = 20) -> None:
        super().__init__(task, size, horizon)

    def reward(self) -> float:
        if self.found or (self.x, self.y) != self.goal:
            return 0.0
        self.found = 1
        return 1.0


class DarkroomPermuted(Room):
    def __init__(self, task: list[int], size: int = 9, horizon: int = 50) -> None:
        super().__init__(size, horizon, (0, 0))
        self.order = list(permutations(range(5)))[task[0]]

    def move(self, action: int) -> None:
        super().move(self.order[action])

    def reward(self) -> float:
        return 1.0 if self.x == self.y == self.size - 1 else 0.0


class KeyToDoor(Room):
    def __init__(self, task: list[int], size: int = 9, horizon: int = 50) -> None:
        super().__init__(size, horizon, (size // 2, size // 2))
        self.key, self.door = (task[0], task[1]), (task[2], task[3])

    def reward(self) -> float:
        here = (self.x, self.y)
        if (self.found == 0 and here == self.key) or (self.found == 1 and here == self.door):
            self.found += 1
            return 1.0
        return 0.0


ROOMS: dict[str, type[Room]] = {
    "darkroom": Darkroom,
    "darkroom-hard": DarkroomHard,
    "darkroom-permuted": DarkroomPermuted,
    "key-to-door": KeyToDoor,
}
