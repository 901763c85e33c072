"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) for many goals at once.

The algorithm and its defaults are those of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3), with which
the reference code of Algorithm Distillation collects: every goal has one learner, whose experience comes from all of
its streams. The end of an episode is terminal: values are not bootstrapped beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from trainwright.reinforcement.environments import Environment, VectorEnvironment
from trainwright.reinforcement.histories import Recording
from trainwright.reinforcement.random_numbers import mixed, uniform
from trainwright.reinforcement.sources.networks import Networks
from trainwright.reinforcement.sources.settings import PpoSection


class Ppo:
    """Learners of several goals, stepped together. A goal's history does not depend on the other goals."""

    def __init__(
        self, environment: Environment, tasks: torch.Tensor, seeds: torch.Tensor, streams: int, settings: PpoSection
    ) -> None:
        """Args:
        tasks: ``[goals, p]``.
        seeds: int64 ``[goals]``.
        streams: copies of the environment for each goal.
        """
        self.environment = environment
        self.settings = settings
        self.goals, self.streams = len(tasks), streams
        stream_seeds = mixed(seeds)[:, None] + torch.arange(streams)
        copies = tasks.repeat_interleave(streams, dim=0)
        self.copies: VectorEnvironment = environment.vector(copies, seed=mixed(stream_seeds).flatten())
        self._action_seeds = mixed(stream_seeds + (1 << 32))
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in mixed(seeds)]
        counts = environment.observation_counts
        self._kind = environment.observation_kind
        inputs = sum(counts) if self._kind == "category" else len(counts)
        self.networks = Networks(inputs, settings.hidden_size, environment.action_count, self._generators)
        self._acting = self.networks.buffers(streams)
        self._learning = self.networks.buffers(settings.batch_size)

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        recording = Recording(self.environment, steps, self.goals, self.streams)
        observations = self.copies.reset()
        taken = 0
        while taken < steps:
            # Learning after the last step would have no effect.
            wanted = min(self.settings.rollout_steps, steps - taken)
            rollout = _Rollout(wanted, self.goals, self.streams, self._encode(observations).shape[-1])
            for step in range(wanted):
                observations = self._step(observations, taken + step, rollout, step, recording)
            taken += wanted
            if taken < steps:
                _, last_values = self._forward(self._encode(observations))
                self._learn_from(rollout, last_values)
            if progress is not None:
                progress(taken / steps)
        return recording

    def _step(
        self, observations: torch.Tensor, time: int, rollout: _Rollout, step: int, recording: Recording
    ) -> torch.Tensor:
        inputs = self._encode(observations)
        logits, values = self._forward(inputs)
        log_probabilities = torch.log_softmax(logits, dim=1)
        drawn = uniform(self._action_seeds, time)[:, None]
        # Rounding may leave the last cumulative sum below one.
        below = log_probabilities.exp().cumsum(dim=1)[:, :-1] <= drawn
        actions = below.sum(dim=1)
        following, rewards, dones = self.copies.step(actions.flatten())
        shape = (self.goals, self.streams)
        rollout.inputs[:, step] = inputs
        rollout.actions[:, step] = actions
        rollout.log_probabilities[:, step] = log_probabilities.gather(1, actions[:, None])[:, 0]
        rollout.values[:, step] = values
        rollout.rewards[:, step] = rewards.view(shape)
        rollout.dones[:, step] = dones.view(shape)
        recording.add(observations, actions.flatten(), rewards, self.copies.final_observations, dones)
        return following

    def _forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, values = self.networks.forward(inputs.repeat(2, 1, 1), self._acting)
        return logits, values.clone()

    def _encode(self, observations: torch.Tensor) -> torch.Tensor:
        """Return the input of the networks, float32 ``[goals, streams, inputs]``."""
        counts = self.environment.observation_counts
        if self._kind != "category":
            numbers = observations.view(self.goals, self.streams, -1).float()
            # From -1 to 1, as far as real numbers go.
            return numbers if self._kind == "coordinates" else numbers * (2 / (torch.tensor(counts) - 1)) - 1
        parts = [one_hot(observations[:, place], count) for place, count in enumerate(counts)]
        return torch.cat(parts, dim=1).view(self.goals, self.streams, -1).float()

    def _learn_from(self, rollout: _Rollout, last_values: torch.Tensor) -> None:
        settings = self.settings
        gains = advantages(
            rollout.rewards, rollout.values, rollout.dones, last_values, settings.gamma, settings.gae_lambda
        )
        returns = gains + rollout.values
        for _ in range(settings.epochs):
            batches = self._shuffled(rollout, gains, returns)
            for number in range(len(batches.inputs)):
                self._minibatch(batches, number)

    def _shuffled(self, rollout: _Rollout, gains: torch.Tensor, returns: torch.Tensor) -> _Batches:
        samples, size = gains[0].numel(), self.settings.batch_size
        order = torch.stack([torch.randperm(samples, generator=generator) for generator in self._generators])

        def dealt(values: torch.Tensor) -> torch.Tensor:
            """Return values ``[goals, steps, streams]`` as minibatches ``[batches, goals, size]``."""
            return values.reshape(self.goals, samples).gather(1, order).view(self.goals, -1, size).transpose(0, 1)

        inputs = rollout.inputs.flatten(1, 2)
        inputs = inputs.gather(1, order[:, :, None].expand_as(inputs)).view(self.goals, -1, size, inputs.shape[2])
        inputs = inputs.transpose(0, 1)
        gains = dealt(gains)
        mean, deviation = gains.mean(dim=2, keepdim=True), gains.std(dim=2, keepdim=True)
        # These are divided here so that the sum over a minibatch is its mean.
        gains = ((gains - mean) / (deviation + 1e-8) / size).contiguous()
        actions = dealt(rollout.actions)
        return _Batches(
            inputs=torch.cat([inputs, inputs], dim=1),
            actions=actions[:, :, None].contiguous(),
            chosen=one_hot(actions, self.environment.action_count).transpose(2, 3).float().contiguous(),
            log_probabilities=dealt(rollout.log_probabilities).contiguous(),
            advantages=gains,
            limits=gains + self.settings.clip_range * gains.abs(),
            returns=dealt(returns).contiguous(),
        )

    def _minibatch(self, batches: _Batches, number: int) -> None:
        inputs, buffers = batches.inputs[number], self._learning
        logits, values = self.networks.forward(inputs, buffers)
        policy_slopes = buffers.output_slopes[: self.goals]
        value_slopes = buffers.output_slopes[self.goals :, 0]
        surrogate_slopes(
            logits,
            batches.actions[number],
            batches.chosen[number],
            batches.log_probabilities[number],
            batches.advantages[number],
            batches.limits[number],
            policy_slopes,
        )
        torch.sub(values, batches.returns[number], out=value_slopes)
        value_slopes.mul_(2 * self.settings.value_coefficient / self.settings.batch_size)
        self.networks.backward(inputs, buffers)
        self.networks.update(self.settings.learning_rate, self.settings.max_grad_norm)


@dataclass(frozen=True)
class _Batches:
    """The minibatches of an epoch, along the first dimension of all tensors; then goals, and samples last.

    ``limits`` clip the product of advantage and ratio: the clipped surrogate is the smaller of the two.
    """

    inputs: torch.Tensor
    actions: torch.Tensor
    chosen: torch.Tensor
    log_probabilities: torch.Tensor
    advantages: torch.Tensor
    limits: torch.Tensor
    returns: torch.Tensor


def surrogate_slopes(
    logits: torch.Tensor,
    actions: torch.Tensor,
    chosen: torch.Tensor,
    old_log_probabilities: torch.Tensor,
    advantages: torch.Tensor,
    limits: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute the gradient of the clipped surrogate loss with respect to the logits.

    Args:
        logits: ``[goals, actions, samples]``.
        actions: the actions taken, int64 ``[goals, 1, samples]``.
        chosen: the same one-hot, ``[goals, actions, samples]``.
        old_log_probabilities: of the actions when they were taken, ``[goals, samples]``.
        advantages: divided by the number of samples, ``[goals, samples]``.
        limits: clip their product with the ratio of probabilities.
        out: receives the gradient.
    """
    log_probabilities = torch.log_softmax(logits, dim=1)
    of_chosen = log_probabilities.gather(1, actions)[:, 0]
    gains = of_chosen.sub_(old_log_probabilities).exp_().mul_(advantages)
    # Where the surrogate is clipped it is constant.
    gains.mul_(gains <= limits)
    torch.sub(log_probabilities.exp_(), chosen, out=out)
    out.mul_(gains[:, None])


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    last_values: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Return generalized advantages (Schulman et al. 2015, arXiv 1506.02438).

    Args:
        rewards, values, dones: ``[goals, steps, streams]``.
        last_values: of the states after the last step, ``[goals, streams]``.
        Returns:
        ``[goals, steps, streams]``.
    """
    found = torch.zeros_like(values)
    following, running = last_values, torch.zeros_like(last_values)
    for step in reversed(range(values.shape[1])):
        goes_on = (~dones[:, step]).float()
        errors = rewards[:, step] + gamma * goes_on * following - values[:, step]
        running = errors + gamma * gae_lambda * goes_on * running
        found[:, step] = running
        following = values[:, step]
    return found


class _Rollout:
    """The experience since the last update: ``[goals, steps, streams]``."""

    def __init__(self, steps: int, goals: int, streams: int, inputs: int) -> None:
        shape = (goals, steps, streams)
        self.inputs = torch.zeros(*shape, inputs)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probabilities, self.values, self.rewards = (torch.zeros(shape) for _ in range(3))
        self.dones = torch.zeros(shape, dtype=torch.bool)
