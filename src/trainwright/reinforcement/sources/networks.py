"""Policies and value functions of many goals as one batch of small networks, with explicit gradients.

A minibatch of PPO has only dozens of samples, for which autograd costs several times the arithmetic. Here the networks
of all goals share each batched matrix product, all parameters are in one tensor for the optimizer, and no memory is
allocated during training. The gradients are tested against autograd.
"""

from __future__ import annotations

import math

import torch
from torch.optim.adam import adam

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
        self.weights = _views(self.parameters, 2 * self.goals, shapes)
        self.slopes = _views(self.gradients, 2 * self.goals, shapes)
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
            used = self.actions if kind == "policy" else 1
            torch.nn.init.orthogonal_(last[network, :used], gain, generator=generator)

    def buffers(self, samples: int) -> Buffers:
        """Return buffers for passes of ``samples`` samples per goal."""
        return Buffers(2 * self.goals, samples, self.weights[0].shape[2], self.actions)

    def forward(self, inputs: torch.Tensor, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``[goals, actions, samples]`` and values ``[goals, samples]`` of ``inputs``.

        Args:
            inputs: ``[2 * goals, samples, inputs]``, the same for the policy and the value of a goal.
        """
        first, first_bias, second, second_bias, last, last_bias = self.weights
        _tanh_of_product(first_bias, inputs, first, buffers.first)
        _tanh_of_product(second_bias, buffers.first, second, buffers.second)
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
        _through_tanh(buffers.second_slopes, buffers.second)
        torch.bmm(buffers.first.transpose(1, 2), buffers.second_slopes, out=second)
        torch.sum(buffers.second_slopes, 1, keepdim=True, out=second_bias)
        torch.bmm(buffers.second_slopes, self.weights[2].transpose(1, 2), out=buffers.first_slopes)
        _through_tanh(buffers.first_slopes, buffers.first)
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


def _tanh_of_product(bias: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    # tanh(x) = 2 sigmoid(2x) - 1, which torch computes on CPUs in a third of the time of its tanh.
    torch.baddbmm(bias, inputs, weight, beta=2, alpha=2, out=out).sigmoid_().mul_(2).sub_(1)


def _through_tanh(slopes: torch.Tensor, activations: torch.Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(slopes, activations, grad_input=slopes)


def _views(flat: torch.Tensor, networks: int, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    # All contiguous, because batched products are much slower with other outputs.
    parts = flat.split([networks * rows * columns for rows, columns in shapes])
    return [part.view(networks, *shape) for part, shape in zip(parts, shapes, strict=True)]
