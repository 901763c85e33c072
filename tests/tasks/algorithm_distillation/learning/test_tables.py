"""Learners with tables: they learn, each stream by itself, and a goal the same whichever are beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.histories import compute_episode_returns
from trainwright.tasks.algorithm_distillation.learners import build_learners

Q: dict[str, Any] = {"name": "q-learning", "streams": 10}
UCB: dict[str, Any] = {"name": "ucb", "streams": 10}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("darkroom", 0.75),
        pytest.param("key-to-door", 0.8, marks=pytest.mark.slow),
        pytest.param("darkroom-permuted", 0.75, marks=pytest.mark.slow),
    ],
)
def test_q_learning_comes_near_the_optimum(name: str, part: float) -> None:
    environment = make(name, size=5, horizon=20)
    tasks = environment.tasks()[:: len(environment.tasks()) // 4]
    recording = build_learners(environment, tasks, torch.arange(len(tasks)), Q | {"epsilon": 0.02}).learn(4000)
    best = environment.optimal_return(tasks)
    curves = torch.stack(
        [
            torch.from_numpy(compute_episode_returns(history.dones, history.rewards)).mean(dim=0)
            for history in map(recording.goal, range(len(tasks)))
        ]
    )
    assert curves[:, 0].mean() < 0.5 * best.mean()
    assert curves[:, -20:].mean() > part * best.mean()


def test_ucb_finds_the_best_arm() -> None:
    environment = make("bandit", arms=5, horizon=50)
    tasks = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.9], [0.8, 0.1, 0.1, 0.1, 0.1]])
    recording = build_learners(environment, tasks, torch.tensor([3, 4]), UCB | {"exploration": 0.7}).learn(600)
    for goal, arm in ((0, 4), (1, 0)):
        actions = recording.goal(goal).actions
        # Every arm is tried once before any is tried again.
        assert (torch.from_numpy(actions[:5]).sort(dim=0).values == torch.arange(5)[:, None]).all()
        assert (actions[-100:] == arm).mean() > 0.85


@pytest.mark.parametrize(("name", "source"), [("key-to-door", Q), ("bandit", UCB)])
def test_a_goal_learns_the_same_whichever_are_beside_it(name: str, source: dict[str, Any]) -> None:
    environment = make(name)
    tasks, seeds = environment.tasks()[:4], torch.tensor([7, 8, 9, 10])
    together = build_learners(environment, tasks, seeds, source).learn(120)
    alone = build_learners(environment, tasks[2:3], seeds[2:3], source).learn(120)
    for one, other in zip(together.goal(2), alone.goal(0), strict=True):
        assert (one == other).all()
    actions = alone.goal(0).actions
    assert (actions[:, 0] != actions[:, 1]).any()


@pytest.mark.slow
def test_what_ends_an_episode_is_worth_nothing_beyond() -> None:
    pytest.importorskip("gymnasium")
    options: dict[str, Any] = {
        "entry_point": "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
        "tasks": [{"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}],
        "horizon": 20,
    }
    environment = make("gymnasium", **options)
    learner = build_learners(environment, environment.tasks(), torch.tensor([1]), Q)
    recording = learner.learn(1500)
    returns = compute_episode_returns(recording.goal(0).dones, recording.goal(0).rewards)
    last = [row[row == row][-20:].mean() for row in returns]
    assert sum(last) / len(last) > 0.75


def test_ucb_learns_no_rooms() -> None:
    environment = make("darkroom")
    with pytest.raises(RequestError, match="ucb: learns one state, and darkroom has more"):
        build_learners(environment, environment.tasks(), torch.arange(81), UCB)
