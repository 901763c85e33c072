"""Learning algorithms that record their histories: PPO for many goals at once, and tabular ones for each stream.

Q-learning (Watkins and Dayan 1992) and UCB1 (Auer et al. 2002) take seconds where PPO takes minutes, and give every
stream its own history.

PPO (Schulman et al. 2017, arXiv 1707.06347) and its defaults are those of Stable-Baselines3
(https://github.com/DLR-RM/stable-baselines3), with which the reference code of Algorithm Distillation collects: every
goal has one learner, whose experience comes from all of its streams. The end of an episode is terminal: values are not
bootstrapped beyond it. A minibatch has only dozens of samples, for which autograd costs several times the arithmetic.
Here the networks of all goals share each batched matrix product, all parameters are in one tensor for the optimizer,
and no memory is allocated during training. The gradients are tested against autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import one_hot
from torch.optim.adam import adam

from trainwright.errors import RequestError
from trainwright.tasks.algorithm_distillation.environments import Environment, VectorEnvironment
from trainwright.tasks.algorithm_distillation.environments.base import mix_bits, sample_uniform
from trainwright.tasks.algorithm_distillation.histories import Recording
from trainwright.tasks.algorithm_distillation.spec import PpoSection, QLearningSection, UcbSection

# Keys of a source that are not settings of its algorithm.
_COMMON = ("name", "streams", "steps", "seed")


class Learners(Protocol):
    """Learners of several goals."""

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        ...


def build_learners(
    environment: Environment, tasks: torch.Tensor, seeds: torch.Tensor, source: Mapping[str, Any]
) -> Learners:
    """Return new learners of ``tasks`` ``[goals, p]``, seeded by ``seeds`` int64 ``[goals]``.

    Args:
        source: ``name`` (ppo, q-learning or ucb), ``streams``, and the algorithm's settings.
    """
    options = {key: value for key, value in source.items() if key not in _COMMON}
    if source["name"] == "ppo":
        return Ppo(environment, tasks, seeds, source["streams"], PpoSection(**options))
    settings = QLearningSection(**options) if source["name"] == "q-learning" else UcbSection(**options)
    return Tables(environment, tasks, seeds, source["streams"], settings)


class Tables:
    """Learners of several goals, one for each stream. A goal's history does not depend on the other goals."""

    def __init__(
        self,
        environment: Environment,
        tasks: torch.Tensor,
        seeds: torch.Tensor,
        streams: int,
        settings: QLearningSection | UcbSection,
    ) -> None:
        """Args: as ``Ppo``.

        Raises:
            RequestError: UCB is asked to learn where there is more than one state.
        """
        if isinstance(settings, UcbSection) and environment.state_count > 1:
            raise RequestError(f"source ucb: learns one state, and {environment.name} has more; use q-learning or ppo")
        self.environment = environment
        self.goals, self.streams = len(tasks), streams
        stream_seeds = mix_bits((mix_bits(seeds)[:, None] + torch.arange(streams)).flatten())
        self.copies = environment.vector(tasks.repeat_interleave(streams, dim=0), seed=mix_bits(stream_seeds))
        # Random numbers for each action of each learner, to break ties and to explore.
        offsets = torch.arange(environment.action_count + 1)
        self._seeds = mix_bits(stream_seeds + (1 << 32))[:, None] + offsets
        learners = self.goals * streams
        self._table = (
            _QTable(settings, learners, environment)
            if isinstance(settings, QLearningSection)
            else _Arms(settings, learners, environment)
        )

    def learn(self, steps: int, progress: Callable[[float], None] | None = None) -> Recording:
        """Act and learn for ``steps`` steps of every stream; ``progress`` is called with the finished fraction."""
        recording = Recording(self.environment, steps, self.goals, self.streams)
        observations = self.copies.reset()
        for time in range(steps):
            states = self.copies.states()
            actions = self._table.choose(states, sample_uniform(self._seeds, time), time)
            following, rewards, dones = self.copies.step(actions)
            self._table.learn(states, actions, rewards, self.copies.final_states, self.copies.ended)
            recording.add(observations, actions, rewards, self.copies.final_observations, dones)
            observations = following
            if progress is not None:
                progress((time + 1) / steps)
        return recording


class _QTable:
    """Estimates ``[n, states, actions]``. The horizon is not observed, so values are bootstrapped beyond it."""

    def __init__(self, settings: QLearningSection, learners: int, environment: Environment) -> None:
        self.settings = settings
        self.rows = torch.arange(learners)
        self.values = torch.full((learners, environment.state_count, environment.action_count), settings.optimism)

    def choose(self, states: torch.Tensor, ties: torch.Tensor, time: int) -> torch.Tensor:
        best = _find_best(self.values[self.rows, states], ties[:, 1:])
        by_chance = ties[:, 1:].argmax(dim=1)
        return torch.where(ties[:, 0] < self.settings.epsilon, by_chance, best)

    def learn(
        self,
        states: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        following: torch.Tensor,
        ended: torch.Tensor,
    ) -> None:
        beyond = self.values[self.rows, following].max(dim=1).values.masked_fill(ended, 0)
        target = rewards + self.settings.gamma * beyond
        estimates = self.values[self.rows, states, actions]
        self.values[self.rows, states, actions] = estimates + self.settings.learning_rate * (target - estimates)


class _Arms:
    """Mean rewards of the arms ``[n, arms]``, and how often each was tried."""

    def __init__(self, settings: UcbSection, learners: int, environment: Environment) -> None:
        self.settings = settings
        self.rows = torch.arange(learners)
        self.sums = torch.zeros(learners, environment.action_count)
        self.tries = torch.zeros(learners, environment.action_count)

    def choose(self, states: torch.Tensor, ties: torch.Tensor, time: int) -> torch.Tensor:
        means = self.sums / self.tries.clamp(min=1)
        bonus = self.settings.exploration * torch.sqrt(torch.log(torch.tensor(time + 1.0)) / self.tries.clamp(min=1))
        return _find_best((means + bonus).masked_fill(self.tries == 0, torch.inf), ties[:, 1:])

    def learn(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor, *_: torch.Tensor) -> None:
        self.sums[self.rows, actions] += rewards
        self.tries[self.rows, actions] += 1


def _find_best(values: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest value of each row; ties are resolved by the largest of ``ties``."""
    largest = values == values.max(dim=1, keepdim=True).values
    return ties.masked_fill(~largest, -1).argmax(dim=1)


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
        stream_seeds = mix_bits(seeds)[:, None] + torch.arange(streams)
        copies = tasks.repeat_interleave(streams, dim=0)
        self.copies: VectorEnvironment = environment.vector(copies, seed=mix_bits(stream_seeds).flatten())
        self._action_seeds = mix_bits(stream_seeds + (1 << 32))
        self._generators = [torch.Generator().manual_seed(int(seed)) for seed in mix_bits(seeds)]
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
        finished_steps = 0
        while finished_steps < steps:
            # Learning after the last step would have no effect.
            length = min(self.settings.rollout_steps, steps - finished_steps)
            rollout = _Rollout(length, self.goals, self.streams, self._encode(observations).shape[-1])
            for step in range(length):
                observations = self._step(observations, finished_steps + step, rollout, step, recording)
            finished_steps += length
            if finished_steps < steps:
                _, last_values = self._forward(self._encode(observations))
                self._learn_from(rollout, last_values)
            if progress is not None:
                progress(finished_steps / steps)
        return recording

    def _step(
        self, observations: torch.Tensor, time: int, rollout: _Rollout, step: int, recording: Recording
    ) -> torch.Tensor:
        inputs = self._encode(observations)
        logits, values = self._forward(inputs)
        log_probabilities = torch.log_softmax(logits, dim=1)
        uniforms = sample_uniform(self._action_seeds, time)[:, None]
        # Rounding may leave the last cumulative sum below one.
        below = log_probabilities.exp().cumsum(dim=1)[:, :-1] <= uniforms
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
        parts = [one_hot(observations[:, index], count) for index, count in enumerate(counts)]
        return torch.cat(parts, dim=1).view(self.goals, self.streams, -1).float()

    def _learn_from(self, rollout: _Rollout, last_values: torch.Tensor) -> None:
        settings = self.settings
        gains = compute_advantages(
            rollout.rewards, rollout.values, rollout.dones, last_values, settings.gamma, settings.gae_lambda
        )
        returns = gains + rollout.values
        for _ in range(settings.epochs):
            batches = self._shuffled(rollout, gains, returns)
            for number in range(len(batches.inputs)):
                self._train_on_minibatch(batches, number)

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

    def _train_on_minibatch(self, batches: _Batches, number: int) -> None:
        inputs, buffers = batches.inputs[number], self._learning
        logits, values = self.networks.forward(inputs, buffers)
        policy_slopes = buffers.output_slopes[: self.goals]
        value_slopes = buffers.output_slopes[self.goals :, 0]
        compute_surrogate_slopes(
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


def compute_surrogate_slopes(
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


def compute_advantages(
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
    estimates = torch.zeros_like(values)
    following, running = last_values, torch.zeros_like(last_values)
    for step in reversed(range(values.shape[1])):
        goes_on = (~dones[:, step]).float()
        errors = rewards[:, step] + gamma * goes_on * following - values[:, step]
        running = errors + gamma * gae_lambda * goes_on * running
        estimates[:, step] = running
        following = values[:, step]
    return estimates


class _Rollout:
    """The experience since the last update: ``[goals, steps, streams]``."""

    def __init__(self, steps: int, goals: int, streams: int, inputs: int) -> None:
        shape = (goals, steps, streams)
        self.inputs = torch.zeros(*shape, inputs)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probabilities, self.values, self.rewards = (torch.zeros(shape) for _ in range(3))
        self.dones = torch.zeros(shape, dtype=torch.bool)


_BETAS = (0.9, 0.999)
_EPS = 1e-5
_GAINS = {"policy": 0.01, "value": 1.0}


class Networks:
    """A policy and a value function for each of ``goals`` goals: two hidden layers of tanh each, without sharing.

    As ``MlpPolicy`` of Stable-Baselines3: orthogonal weights with gains sqrt(2), and 0.01 and 1 in the last layers;
    biases of zero; Adam with eps 1e-5. In every tensor the policies of all goals come first, then the values. The
    output of a value function is as wide as a policy's, but only its first number is used, so that one product computes
    both.
    """

    def __init__(self, inputs: int, hidden: int, actions: int, generators: list[torch.Generator]) -> None:
        """Initialize the networks, one pair for each generator, which draws its weights."""
        self.goals = len(generators)
        self.actions = actions
        shapes = [(inputs, hidden), (1, hidden), (hidden, hidden), (1, hidden), (actions, hidden), (actions, 1)]
        size = 2 * self.goals * sum(rows * columns for rows, columns in shapes)
        self.parameters, self.gradients = torch.zeros(size), torch.zeros(size)
        self.weights = _split_into_views(self.parameters, 2 * self.goals, shapes)
        self.slopes = _split_into_views(self.gradients, 2 * self.goals, shapes)
        self._norms = torch.zeros(len(shapes), 2 * self.goals)
        self._moments = torch.zeros_like(self.parameters), torch.zeros_like(self.parameters)
        self._updates = torch.tensor(0.0)
        for goal, generator in enumerate(generators):
            self._initialize(goal, generator)

    def _initialize(self, goal: int, generator: torch.Generator) -> None:
        first, _, second, _, last, _ = self.weights
        for part, (kind, gain) in enumerate(_GAINS.items()):
            network = part * self.goals + goal
            for weight in (first[network], second[network]):
                torch.nn.init.orthogonal_(weight, math.sqrt(2), generator=generator)
            outputs = self.actions if kind == "policy" else 1
            torch.nn.init.orthogonal_(last[network, :outputs], gain, generator=generator)

    def buffers(self, samples: int) -> Buffers:
        """Return buffers for passes of ``samples`` samples per goal."""
        return Buffers(2 * self.goals, samples, self.weights[0].shape[2], self.actions)

    def forward(self, inputs: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``[goals, actions, samples]`` and values ``[goals, samples]`` of ``inputs``.

        Args:
            inputs: ``[2 * goals, samples, inputs]``, the same for the policy and the value of a goal.
        """
        first, first_bias, second, second_bias, last, last_bias = self.weights
        _compute_tanh_of_product(first_bias, inputs, first, buffers.first)
        _compute_tanh_of_product(second_bias, buffers.first, second, buffers.second)
        torch.baddbmm(last_bias, last, buffers.second.transpose(1, 2), out=buffers.outputs)
        return buffers.outputs[: self.goals], buffers.outputs[self.goals :, 0]

    def backward(self, inputs: torch.Tensor, buffers: Buffers) -> None:
        """Compute the gradients of all parameters into ``gradients``, from those of the outputs in
        ``buffers.output_slopes``.

        Call after ``forward`` of the same inputs.
        """
        first, first_bias, second, second_bias, last, last_bias = self.slopes
        torch.bmm(buffers.output_slopes, buffers.second, out=last)
        torch.sum(buffers.output_slopes, 2, keepdim=True, out=last_bias)
        torch.bmm(buffers.output_slopes.transpose(1, 2), self.weights[4], out=buffers.second_slopes)
        _backpropagate_through_tanh(buffers.second_slopes, buffers.second)
        torch.bmm(buffers.first.transpose(1, 2), buffers.second_slopes, out=second)
        torch.sum(buffers.second_slopes, 1, keepdim=True, out=second_bias)
        torch.bmm(buffers.second_slopes, self.weights[2].transpose(1, 2), out=buffers.first_slopes)
        _backpropagate_through_tanh(buffers.first_slopes, buffers.first)
        torch.bmm(inputs.transpose(1, 2), buffers.first_slopes, out=first)
        torch.sum(buffers.first_slopes, 1, keepdim=True, out=first_bias)

    def update(self, learning_rate: float, max_grad_norm: float) -> None:
        """Take a step of Adam, after clipping the gradients of each goal to the norm ``max_grad_norm``."""
        for slopes, norms in zip(self.slopes, self._norms, strict=True):
            torch.linalg.vector_norm(slopes.flatten(1), dim=1, out=norms)
        norms = torch.linalg.vector_norm(self._norms.view(-1, self.goals), dim=0)
        factors = (max_grad_norm / (norms + 1e-6)).clamp_(max=1).repeat(2)[:, None, None]
        for slopes in self.slopes:
            slopes.mul_(factors)
        adam(
            [self.parameters],
            [self.gradients],
            [self._moments[0]],
            [self._moments[1]],
            [],
            [self._updates],
            fused=True,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=learning_rate,
            weight_decay=0.0,
            eps=_EPS,
            maximize=False,
        )


class Buffers:
    """Buffers of a forward and a backward pass.

    Attributes:
        outputs: ``[networks, actions, samples]``.
        output_slopes: their gradients, to be filled in between; zero for unused outputs.
    """

    def __init__(self, networks: int, samples: int, hidden: int, actions: int) -> None:
        self.first, self.second, self.first_slopes, self.second_slopes = (
            torch.zeros(networks, samples, hidden) for _ in range(4)
        )
        self.outputs = torch.zeros(networks, actions, samples)
        self.output_slopes = torch.zeros(networks, actions, samples)


def _compute_tanh_of_product(bias: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    # tanh(x) = 2 sigmoid(2x) - 1, which torch computes on CPUs in a third of the time of its tanh.
    torch.baddbmm(bias, inputs, weight, beta=2, alpha=2, out=out).sigmoid_().mul_(2).sub_(1)


def _backpropagate_through_tanh(slopes: torch.Tensor, activations: torch.Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(slopes, activations, grad_input=slopes)


def _split_into_views(flat: torch.Tensor, networks: int, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    # All contiguous, because batched products are much slower with other outputs.
    parts = flat.split([networks * rows * columns for rows, columns in shapes])
    return [part.view(networks, *shape) for part, shape in zip(parts, shapes, strict=True)]
