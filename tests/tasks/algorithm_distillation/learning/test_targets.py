"""What learners are taught an action or a state is worth, against sums worked by hand."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.learners import Ppo, Tables, _QTable
from trainwright.tasks.algorithm_distillation.spec import PpoSection, QLearningSection


class Watched(Ppo):
    """Keeps what it was last taught."""

    def _shuffled(self, rollout: Any, gains: torch.Tensor, returns: torch.Tensor) -> Any:
        self.taught = rollout, gains, returns
        return super()._shuffled(rollout, gains, returns)


def test_values_are_taught_the_discounted_rewards_to_the_end_of_the_episode() -> None:
    environment = make("bandit", arms=3, horizon=5, rewards="gaussian", noise=0.0)
    tasks = torch.tensor([[0.2, 0.9, 0.4], [1.5, 0.1, 0.3]])
    settings = PpoSection(rollout_steps=10, batch_size=20, epochs=1, gamma=0.8, gae_lambda=1.0)
    learner = Watched(environment, tasks, torch.arange(2), 4, settings)
    learner.learn(20)
    rollout, gains, returns = learner.taught
    expected = torch.zeros_like(returns)
    for begin in (0, 5):  # two episodes of five steps
        following = torch.zeros_like(returns[:, 0])
        for step in reversed(range(begin, begin + 5)):
            following = expected[:, step] = rollout.rewards[:, step] + 0.8 * following
    torch.testing.assert_close(returns, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gains, expected - rollout.values, rtol=1e-5, atol=1e-5)
    assert len(returns.unique()) > 2


def test_nothing_is_expected_beyond_a_terminal_state() -> None:
    environment = make("darkroom", size=3, horizon=4)
    table = _QTable(QLearningSection(learning_rate=1.0, gamma=0.5, optimism=2.0), 2, environment)
    zero, one = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    table.learn(zero, zero, torch.tensor([1.0, 1.0]), one, torch.tensor([True, False]))
    assert table.values[:, 0, 0].tolist() == [1.0, 2.0]
    assert (table.values[:, 1:] == 2.0).all()


def test_an_episode_that_its_time_limit_ends_is_not_learnt_as_over() -> None:
    environment = make("darkroom", size=3, horizon=4)
    tasks = environment.tasks()[:5]
    settings = QLearningSection(learning_rate=0.5, gamma=0.9, epsilon=0.3, optimism=0.5)
    learner = Tables(environment, tasks, torch.arange(5), 1, settings)
    recording = learner.learn(12)
    found = learner._table.values  # type: ignore[attr-defined]
    copies = environment.vector(tasks)
    copies.reset()
    expected = torch.full_like(found, 0.5)
    rows = torch.arange(5)
    ends = 0
    for step in range(12):
        actions = torch.stack([torch.tensor(recording.goal(goal).actions[step, 0]) for goal in range(5)]).long()
        states = copies.states()
        _, rewards, dones = copies.step(actions)
        target = rewards + 0.9 * expected[rows, copies.final_states].max(1).values
        known = expected[rows, states, actions]
        expected[rows, states, actions] = known + 0.5 * (target - known)
        ends += int(dones.sum())
    assert ends == 15
    torch.testing.assert_close(found, expected)
