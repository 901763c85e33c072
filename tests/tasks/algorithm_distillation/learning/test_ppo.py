"""PPO of many goals at once: its gradients are autograd's, its goals do not mix, and it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax, mse_loss

from trainwright.tasks.algorithm_distillation.environments import make
from trainwright.tasks.algorithm_distillation.histories import compute_episode_returns
from trainwright.tasks.algorithm_distillation.learners import (
    Networks,
    Ppo,
    compute_advantages,
    compute_surrogate_slopes,
)
from trainwright.tasks.algorithm_distillation.spec import PpoSection

GOALS, SAMPLES, INPUTS, HIDDEN, ACTIONS = 3, 11, 2, 7, 5
CLIP = 0.2


def networks() -> Networks:
    made = Networks(INPUTS, HIDDEN, ACTIONS, [torch.Generator().manual_seed(goal) for goal in range(GOALS)])
    # Larger than at the start, so that no term of the gradient is near nothing.
    made.parameters.add_(torch.randn(made.parameters.shape, generator=torch.Generator().manual_seed(9)) * 0.3)
    return made


def by_autograd(
    made: Networks, goal: int, inputs: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The goal's parameters as leaves, policy's first, and the logits [samples, actions] and values made of them."""
    leaves, outputs = [], []
    for network in (goal, GOALS + goal):
        first, first_bias, second, second_bias, last, last_bias = (
            weight[network].clone().requires_grad_() for weight in made.weights
        )
        leaves += [first, first_bias, second, second_bias, last, last_bias]
        hidden = torch.tanh(torch.tanh(inputs @ first + first_bias) @ second + second_bias)
        outputs.append(hidden @ last.T + last_bias.T)
    return leaves, outputs[0], outputs[1][:, 0]


def test_gradients_and_updates_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    made = networks()
    inputs = torch.randn(GOALS, SAMPLES, INPUTS, generator=generator)
    actions = torch.randint(ACTIONS, (GOALS, SAMPLES), generator=generator)
    old = torch.randn(GOALS, SAMPLES, generator=generator) * 0.3 - 1.6
    gains, returns = (torch.randn(GOALS, SAMPLES, generator=generator) for _ in range(2))

    expected, cut_off = [], 0
    for goal in range(GOALS):
        leaves, logits, values = by_autograd(made, goal, inputs[goal])
        ratio = (log_softmax(logits, -1).gather(1, actions[goal][:, None])[:, 0] - old[goal]).exp()
        clipped = gains[goal] * ratio.clamp(1 - CLIP, 1 + CLIP)
        cut_off += int((clipped < gains[goal] * ratio).sum())
        loss = -torch.minimum(gains[goal] * ratio, clipped).mean() + 0.5 * mse_loss(values, returns[goal])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        torch.optim.Adam(leaves, lr=3e-4, eps=1e-5).step()
        expected.append(leaves)
    assert cut_off > 3

    room = made.buffers(SAMPLES)
    twice = inputs.repeat(2, 1, 1)
    logits, values = made.forward(twice, room)
    scaled = gains / SAMPLES
    compute_surrogate_slopes(
        logits,
        actions[:, None],
        torch.nn.functional.one_hot(actions, ACTIONS).transpose(1, 2).float(),
        old,
        scaled,
        scaled + CLIP * scaled.abs(),
        room.output_slopes[:GOALS],
    )
    room.output_slopes[GOALS:, 0] = (values - returns) / SAMPLES
    made.backward(twice, room)
    made.update(3e-4, 0.5)

    for goal, leaves in enumerate(expected):
        for place, leaf in enumerate(leaves):
            part, kind = divmod(place, 6)
            assert torch.allclose(made.weights[kind][part * GOALS + goal], leaf, atol=2e-6), (goal, place)
            assert leaf.grad is not None
            assert torch.allclose(made.slopes[kind][part * GOALS + goal], leaf.grad, atol=2e-6), (goal, place)


def test_fresh_networks_are_orthogonal_as_those_of_stable_baselines() -> None:
    made = Networks(2, 8, 5, [torch.Generator().manual_seed(0)])
    _, first_bias, second, second_bias, last, last_bias = made.weights
    for network in range(2):
        assert torch.allclose(second[network] @ second[network].T, 2 * torch.eye(8), atol=1e-5)
    assert torch.allclose(last[0] @ last[0].T, 1e-4 * torch.eye(5), atol=1e-8)
    assert float(last[1, 0].norm()) == pytest.approx(1) and not last[1, 1:].any()
    assert not first_bias.any() and not second_bias.any() and not last_bias.any()


def test_advantages_are_sums_of_discounted_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    gamma, decay, steps = 0.9, 0.8, 6
    rewards, values = (torch.randn(2, steps, 3, generator=generator) for _ in range(2))
    last = torch.randn(2, 3, generator=generator)
    dones = torch.rand(2, steps, 3, generator=generator) < 0.3
    found = compute_advantages(rewards, values, dones, last, gamma, decay)
    for goal, stream in np.ndindex(2, 3):
        for step in range(steps):
            total, weight = 0.0, 1.0
            for at in range(step, steps):
                over = bool(dones[goal, at, stream])
                after = 0.0 if over else values[goal, at + 1, stream] if at + 1 < steps else last[goal, stream]
                total += weight * float(rewards[goal, at, stream] + gamma * after - values[goal, at, stream])
                if over:
                    break
                weight *= gamma * decay
            assert float(found[goal, step, stream]) == pytest.approx(total, abs=1e-5)


def test_rewards_that_are_all_raised_or_scaled_teach_the_same() -> None:
    """Advantages are centred and scaled: to the policy it matters only how they differ."""
    environment = make("bandit", arms=4, horizon=1, rewards="gaussian", noise=0.0)
    means = torch.tensor([0.125, 0.75, 0.25, 0.5])
    tasks = torch.stack([means, means + 4, 8 * means - 3])
    settings = PpoSection(
        rollout_steps=10, batch_size=20, epochs=4, learning_rate=3e-3, value_coefficient=0.0, max_grad_norm=1e9
    )
    learner = Ppo(environment, tasks, torch.zeros(3, dtype=torch.int64), 4, settings)
    before = [weight[:3].clone() for weight in learner.networks.weights]
    recording = learner.learn(20)
    for weight, was in zip(learner.networks.weights, before, strict=True):
        for goal in (1, 2):
            torch.testing.assert_close(weight[goal], weight[0], rtol=1e-5, atol=1e-6)
        assert (weight[0] - was[0]).abs().max() > 1e-3
    for goal in (1, 2):
        assert (recording.goal(goal).actions == recording.goal(0).actions).all()


def test_a_goal_learns_the_same_whichever_are_beside_it() -> None:
    environment = make("darkroom", size=3, horizon=5)
    settings = PpoSection(rollout_steps=10, batch_size=10, epochs=2)
    tasks, seeds = environment.tasks()[[0, 5, 8]], torch.tensor([4, 5, 6])
    together = Ppo(environment, tasks, seeds, 6, settings).learn(40)
    alone = Ppo(environment, tasks[1:2], seeds[1:2], 6, settings).learn(40)
    for one, other in zip(together.goal(1), alone.goal(0), strict=True):
        assert (one == other).all()
    assert (together.goal(0).actions != together.goal(1).actions).any()


def test_it_learns_and_keeps_what_happened() -> None:
    environment = make("darkroom", size=5, horizon=10)
    tasks = torch.tensor([[0, 1], [3, 3]])
    told: list[float] = []
    settings = PpoSection(rollout_steps=20, batch_size=50, epochs=8, learning_rate=2e-3)
    recording = Ppo(environment, tasks, torch.tensor([1, 2]), 20, settings).learn(250, told.append)
    assert told == sorted(told) and told[-1] == 1.0
    for index, best in enumerate(environment.optimal_return(tasks).tolist()):
        history = recording.goal(index)
        returns = compute_episode_returns(history.dones, history.rewards).mean(axis=0)
        assert returns.shape == (25,)
        assert returns[:2].mean() < 0.25 * best and returns[-3:].mean() > 0.6 * best
        # The next step's state is this one's next, but where an episode ends; and rewards are where the goal is.
        same = (history.next_states[:-1] == history.states[1:]).all(axis=2)
        assert (same | history.dones[:-1]).all()
        assert (history.states[1:][history.dones[:-1]] == 2).all()
        on_goal = (history.next_states == tasks[index].numpy()).all(axis=2)
        assert (on_goal == (history.rewards == 1)).all()


def test_names_are_given_to_the_networks_one_by_one() -> None:
    environment = make("bandit", arms=4, horizon=20)
    recording = Ppo(
        environment,
        torch.tensor([[0.1, 0.1, 0.9, 0.1]]),
        torch.tensor([0]),
        20,
        PpoSection(rollout_steps=10, batch_size=20, epochs=8, learning_rate=3e-3),
    ).learn(150)
    actions = recording.goal(0).actions
    assert (actions[:10] == 2).mean() < 0.4 and (actions[-10:] == 2).mean() > 0.8
