"""A causal transformer over the history of a learner: what it saw, did and got; it says what it would do next.

Algorithm Distillation, Laskin et al. 2022 (arXiv 2210.14215). A step of a history is what the agent sees, and what it
did before and got for it. In the layout ``transition`` a step is one token, the sum of the embeddings of these; in
``parts`` it is three: the action before, its reward, and the state. At the last token of every step the model predicts
the action that the learner took there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.models.history.blocks import Block, KeyValueCache, rotation_of

Layout = Literal["transition", "parts"]


@dataclass(frozen=True)
class HistoryShape:
    """What the model is made of; all of it is kept with its weights.

    Attributes:
        observations: number of values of each part of an observation.
        actions: number of actions.
        steps: the longest context, in steps of an environment; of a compressed one, of a region.
        regions: regions that lie in a context at once: 1 where it is not compressed, 2 where the region before is kept
            as it is.
        latents: tokens that stand for all regions before this one; 0 where none do.
    """

    observations: tuple[int, ...]
    actions: int
    width: int
    layers: int
    heads: int
    layout: Layout
    positions: Literal["rotary", "learned"]
    steps: int
    regions: int = 1
    latents: int = 0
    dropout: float = 0.0
    predicts_reward: bool = False
    predicts_next_state: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens that a step of the environment takes."""
        return 1 if self.layout == "transition" else 3

    @property
    def marks(self) -> int:
        """Tokens that open and close the region before."""
        return 2 if self.regions == 2 else 0

    @property
    def tokens(self) -> int:
        """The longest context in tokens: all regions, marks, and latents that are read and written."""
        return self.regions * self.steps * self.tokens_per_step + self.marks + 2 * self.latents

    def as_json(self) -> dict[str, Any]:
        """Return the object as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> HistoryShape:
        """Build the shape from JSON. Raises TypeError or KeyError if a value is missing or unknown."""
        return cls(**{**values, "observations": tuple(values["observations"])})


@dataclass(frozen=True)
class Steps:
    """Steps of histories, n side by side and t long.

    ``before_actions`` has the number of actions as its value where nothing was done before: a context begins there.
    """

    states: torch.Tensor  # int64 [n, t, k]
    before_actions: torch.Tensor  # int64 [n, t]
    before_rewards: torch.Tensor  # float [n, t]
    before_dones: torch.Tensor  # bool [n, t]: the step before was the last of its episode

    def part(self, begin: int, end: int) -> Steps:
        """Return the steps from ``begin`` to before ``end``."""
        return Steps(*(getattr(self, field.name)[:, begin:end] for field in fields(self)))

    @property
    def length(self) -> int:
        """Return the number of steps."""
        return self.states.shape[1]

    def forgetful(self, actions: int) -> Steps:
        """Return the same steps where nothing is known of what was before the first one."""
        before = self.before_actions.clone()
        before[:, 0] = actions
        rewards, dones = self.before_rewards.clone(), self.before_dones.clone()
        rewards[:, 0], dones[:, 0] = 0, False
        return replace(self, before_actions=before, before_rewards=rewards, before_dones=dones)


class HistoryModel(nn.Module):
    """Embeddings, blocks and heads. ``tokens`` and ``decoded`` are what training and acting are both made of."""

    def __init__(self, shape: HistoryShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states = nn.ModuleList(nn.Embedding(count, width) for count in shape.observations)
            self.actions = nn.Embedding(shape.actions + 1, width)  # the last: nothing was done before
            self.rewards = nn.Linear(1, width)
            self.dones = nn.Embedding(2, width)
            self.positions = nn.Embedding(shape.tokens, width) if shape.positions == "learned" else None
            self.parts = nn.Embedding(3, width) if shape.layout == "parts" else None
            self.marks = nn.Embedding(3, width) if shape.regions == 2 else None  # open, close, a region without steps
            self.memory = nn.Embedding(2 * shape.latents, width) if shape.latents else None  # at first, and to be asked
            self.memory_norm = nn.LayerNorm(width) if shape.latents else None
            blocks = (Block(i, width, shape.heads, shape.dropout) for i in range(shape.layers))
            self.blocks = nn.ModuleList(blocks)
            self.norm = nn.LayerNorm(width)
            self.act = nn.Linear(width, shape.actions)
            outcome = shape.predicts_reward or shape.predicts_next_state
            self.outcome = nn.Linear(2 * width, width) if outcome else None
            self.reward_head = nn.Linear(width, 1) if shape.predicts_reward else None
            self.state_heads = (
                nn.ModuleList(nn.Linear(width, count) for count in shape.observations)
                if shape.predicts_next_state
                else None
            )
            self.mark_head = nn.Linear(width, 2) if shape.regions == 2 else None
            self._initialise()

    def _initialise(self) -> None:
        """As GPT-2: small normal weights, those that add to the residual stream smaller with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            residual = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02)
        if self.memory_norm is not None:
            nn.init.constant_(self.memory_norm.weight, 0.02)  # the size of the tokens it stands among

    def tokens(self, steps: Steps) -> torch.Tensor:
        """Embeddings [n, t * tokens_per_step, width] of steps."""
        state = torch.stack([table(steps.states[..., i]) for i, table in enumerate(self.states)]).sum(0)
        action = self.actions(steps.before_actions)
        rewards = steps.before_rewards.to(action.dtype)[..., None]
        reward = self.rewards(rewards) + self.dones(steps.before_dones.long())
        if self.parts is None:
            return state + action + reward
        parts = torch.stack([action, reward, state], 2) + self.parts.weight
        return parts.flatten(1, 2)

    def decoded(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Hidden states of ``tokens`` [n, t, width], which follow those in the cache."""
        begin = 0 if cache is None else cache.length
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        rotation = None
        if self.positions is not None:
            tokens = tokens + self.positions(positions)
        else:
            rotation = rotation_of(positions, self.shape.width // self.shape.heads, tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens, rotation, cache)
        if cache is not None:
            cache.advance(len(positions))
        hidden: torch.Tensor = self.norm(tokens)
        return hidden

    def at_steps(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the hidden states of steps those at which actions are predicted [n, t, width]."""
        every = self.shape.tokens_per_step
        return hidden[:, every - 1 :: every]

    def outcomes(self, hidden: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return what the heads of reward and next state see: where the agent is, and what it does there."""
        assert self.outcome is not None
        return F.gelu(self.outcome(torch.cat([hidden, self.actions(actions)], -1)))

    def no_region(self, count: int) -> torch.Tensor:
        """Tokens that stand for a region before where there was none."""
        assert self.marks is not None
        length = self.shape.steps * self.shape.tokens_per_step
        return self.marks.weight[2].expand(count, length, -1)

    def mark(self, count: int, *, closes: bool) -> torch.Tensor:
        """Return the token that opens or closes the region before, [n, 1, width]."""
        assert self.marks is not None
        return self.marks.weight[int(closes)].expand(count, 1, -1)

    def first_memory(self, count: int) -> torch.Tensor:
        """Return what stands for the past where there is none yet [n, latents, width]."""
        assert self.memory is not None
        return self.memory.weight[: self.shape.latents].expand(count, -1, -1)

    def memory_questions(self, count: int) -> torch.Tensor:
        """Tokens behind a region, whose hidden states become what stands for it [n, latents, width]."""
        assert self.memory is not None
        return self.memory.weight[self.shape.latents :].expand(count, -1, -1)

    def remembered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what stands for the past from the hidden states of the questions, in the size of tokens."""
        assert self.memory_norm is not None
        remembered: torch.Tensor = self.memory_norm(hidden)
        return remembered
