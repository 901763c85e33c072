"""PPO of Stable-Baselines3 in the dark room, a goal after the other; started by bench/collect_vs_sb3.py in its own
environment.

Usage: python sb3_ppo.py JOB.json, where the job names the goals, the settings and the file for the result: the mean
return of every episode over the streams, and the seconds, for each goal. The environment is written as the reference
code of Algorithm Distillation describes it (https://github.com/tommyma3/Algorithm_Distillation): observations are
coordinates, and an episode's end is terminal.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

MOVES = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])
SIZE, HORIZON = 9, 20


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    found = []
    for number, goal in enumerate(job["goals"]):
        copies = DummyVecEnv([lambda goal=goal: Room(goal)] * job["streams"])
        begin = time.perf_counter()
        learner = PPO("MlpPolicy", copies, seed=job["seed"] + number, device="cpu", verbose=0, **job["settings"])
        rewards = Rewards()
        learner.learn(job["steps"] * job["streams"], callback=rewards)
        seconds = time.perf_counter() - begin
        by_step = np.array(rewards.seen)[: job["steps"]].mean(axis=1)
        whole = by_step[: len(by_step) // HORIZON * HORIZON].reshape(-1, HORIZON).sum(axis=1)
        found.append({"goal": goal, "seconds": seconds, "returns": whole.tolist()})
        print(f"Stable-Baselines3, goal {goal}: {seconds:.0f} s", flush=True)
    Path(job["result"]).write_text(json.dumps(found))


class Room(gymnasium.Env[np.ndarray, np.int64]):
    """A square room with a goal that is not seen."""

    def __init__(self, goal: list[int]) -> None:
        self.goal = np.array(goal)
        self.observation_space = gymnasium.spaces.Box(0, SIZE - 1, (2,), np.int32)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.elapsed = np.array([SIZE // 2, SIZE // 2]), 0
        return self.place, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = np.clip(self.place + MOVES[action], 0, SIZE - 1)
        self.elapsed += 1
        return self.place, float((self.place == self.goal).all()), self.elapsed >= HORIZON, False, {}


class Rewards(BaseCallback):
    """Keeps the rewards of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.seen.append(self.locals["rewards"].copy())
        return True


if __name__ == "__main__":
    main()
