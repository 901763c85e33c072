"""Histories of agents that get better, made in no time: each walks to its goal more surely with every episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.environments.grid import MOVES
from trainwright.tasks.algorithm_distillation.histories import History, write


def write_histories(
    path: Path, *, size: int = 4, horizon: int = 8, episodes: int = 12, streams: int = 6, name: str = "darkroom"
) -> Path:
    """Of all tasks of a small dark room."""
    environment = make(name, size=size, horizon=horizon)
    tasks = environment.tasks()
    chance = torch.Generator().manual_seed(0)
    copies = environment.vector(tasks.repeat_interleave(streams, 0))
    goals = copies.tasks
    seen, lived = copies.reset(), []
    for step in range(episodes * horizon):
        sureness = 4.0 * (step // horizon) / (episodes - 1)
        after = (seen[:, None] + torch.tensor(MOVES)).clamp(0, size - 1)
        distance = (after - goals[:, None]).abs().sum(-1).float()
        actions = torch.multinomial((-sureness * distance).softmax(-1), 1, generator=chance)[:, 0]
        before = seen
        seen, rewards, dones = copies.step(actions)
        lived.append([part.numpy() for part in (before, actions, rewards, copies.final_observations, dones)])
    columns = [np.stack(column) for column in zip(*lived, strict=True)]
    found = {
        goal: History(*(column[:, goal * streams : (goal + 1) * streams] for column in columns))
        for goal in range(len(tasks))
    }
    write(path, environment, {"name": "scripted"}, found.items())
    return path
