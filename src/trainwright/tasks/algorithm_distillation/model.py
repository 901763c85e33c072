"""A causal transformer over learning histories, which predicts the learner's next action, and its files.

    model.safetensors   the weights, with the names of ``HistoryModel``
    agent.json          ``model`` (its shape), ``environment`` (name and options), ``tried`` (the held-out tasks and the
                        evaluation settings, with the keys of the recipe's section)

Algorithm Distillation, Laskin et al. 2022 (arXiv 2210.14215). A step of a history is the agent's observation with its
previous action and reward. In the layout ``transition`` a step is one token, the sum of their embeddings; in ``parts``
it is three: the previous action, its reward, and the state. At the last token of every step the model predicts the
learner's action.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.errors import RequestError
from trainwright.models.files import replace_directory
from trainwright.models.safetensors_files import read_header, write_weights

WEIGHTS, ABOUT = "model.safetensors", "agent.json"


def save_history_model(
    directory: Path, shape: HistoryShape, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a model; ``about`` has the keys ``environment`` and ``tried``."""
    about = {"model": asdict(shape), **about}
    with replace_directory(directory) as scratch:
        write_weights({name: tensor.detach().cpu().contiguous() for name, tensor in tensors}, scratch / WEIGHTS)
        (scratch / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def is_history_model(directory: Path) -> bool:
    """Return whether a directory holds a history model."""
    return (directory / ABOUT).is_file() and (directory / WEIGHTS).is_file()


def load_history_model(directory: Path) -> tuple[HistoryModel, dict[str, Any]]:
    """Return the model on the CPU, and the content of ``agent.json``.

    Raises:
        RequestError: files are missing or inconsistent.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((directory / ABOUT).read_text(encoding="utf-8"))
        shape, header = HistoryShape.from_json(about["model"]), read_header(directory / WEIGHTS)
        if max(shape.layers, len(shape.observations)) > len(header):  # each has tensors of its own, which are made here
            raise ValueError(f"{ABOUT} has more layers or observations than {WEIGHTS} has tensors ({len(header):,})")
        with torch.device("meta"):  # without memory, whatever sizes it names
            model = HistoryModel(shape, seed=0)
        model.load_state_dict(load_file(directory / WEIGHTS), assign=True)
        return model, about
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise RequestError(f"{directory}: is not a model of histories that can be read: {error}") from error


_BASE = 10_000.0  # base of the rotary wavelengths, arXiv 2104.09864
TokenLayout = Literal["transition", "parts"]


@dataclass
class KeyValueCache:
    """Keys and values of the context's tokens for every block, with space for ``capacity`` tokens.

    ``append`` writes after the first ``length`` tokens; ``length`` is raised after all blocks have appended.
    """

    capacity: int
    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def append(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [n, heads, t, size] of the next tokens; return those of all tokens so far."""
        if block == len(self.keys):
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.keys.append(keys.new_empty(shape))
            self.values.append(values.new_empty(shape))
        begin, end = self.length, self.length + keys.shape[2]
        assert end <= self.capacity, "the context is longer than its cache"
        self.keys[block][:, :, begin:end] = keys
        self.values[block][:, :, begin:end] = values
        return self.keys[block][:, :, :end], self.values[block][:, :, :end]

    @property
    def free_positions(self) -> int:
        """Return the number of allocated tokens, used or not."""
        return max((keys.shape[2] for keys in self.keys), default=0)


class HistoryBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, with pre-layer normalization (arXiv 2002.04745).

    Args:
        index: index of the block, also in a cache.
    """

    def __init__(self, index: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.index = index
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor | None = None, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """Process ``hidden`` [n, t, width], which follows the cached tokens; ``rotation``: [2, t, size], theirs."""
        count, tokens, width = hidden.shape
        joint = self.query_key_value(self.attention_norm(hidden))
        query, key, value = joint.view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            query, key = rotate_vectors(query, rotation), rotate_vectors(key, rotation)
        causal: bool = tokens > 1
        mask: torch.Tensor | None = None
        if cache is not None:
            before = cache.length
            key, value = cache.append(self.index, key, value)
            if before and causal:
                mask = hidden.new_ones(tokens, before + tokens, dtype=torch.bool).tril(before)
                causal = False
        dropout = self.dropout if self.training else 0.0
        attention_output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, dropout_p=dropout
        )
        attention_output = self.output(attention_output.transpose(1, 2).reshape(count, tokens, width))
        hidden = hidden + F.dropout(attention_output, self.dropout, self.training)
        feed_forward_output = self.down(F.gelu(self.up(self.feed_forward_norm(hidden)), approximate="tanh"))
        return hidden + F.dropout(feed_forward_output, self.dropout, self.training)


def compute_rotation(positions: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the cosines and sines [2, t, size] of rotary embeddings for ``positions`` [t] (arXiv 2104.09864)."""
    frequencies = _BASE ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate_vectors(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate ``vectors`` [..., t, size] by their positions."""
    first, second = vectors.chunk(2, -1)
    return vectors * rotation[0] + torch.cat([-second, first], -1) * rotation[1]


@dataclass(frozen=True)
class HistoryShape:
    """The architecture of the model; saved with its weights.

    Attributes:
        observations: number of values of each part of an observation.
        actions: number of actions.
        steps: the longest context, in environment steps; with compression, the length of a region.
        regions: regions in a context: 1 without compression, 2 if the previous region is kept unchanged.
        latents: tokens that summarize all previous regions; 0 for none.
    """

    observations: tuple[int, ...]
    actions: int
    width: int
    layers: int
    heads: int
    layout: TokenLayout
    positions: Literal["rotary", "learned"]
    steps: int
    regions: int = 1
    latents: int = 0
    dropout: float = 0.0
    predicts_reward: bool = False
    predicts_next_state: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens per environment step."""
        return 1 if self.layout == "transition" else 3

    @property
    def marks(self) -> int:
        """Return the number of tokens that open and close the previous region."""
        return 2 if self.regions == 2 else 0

    @property
    def tokens(self) -> int:
        """Return the longest context in tokens: all regions, marks, and latents that are read and written."""
        return self.regions * self.steps * self.tokens_per_step + self.marks + 2 * self.latents

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> HistoryShape:
        """Build the shape from JSON; raise TypeError or KeyError if a value is missing or unknown."""
        return cls(**{**values, "observations": tuple(values["observations"])})


@dataclass(frozen=True)
class Steps:
    """Steps of n histories of length t.

    ``before_actions`` equals the number of actions where there is no previous action, at the start of a context.
    """

    states: torch.Tensor  # int64 [n, t, k]
    before_actions: torch.Tensor  # int64 [n, t]
    before_rewards: torch.Tensor  # float [n, t]
    before_dones: torch.Tensor  # bool [n, t]: the previous step was the last of its episode

    def part(self, begin: int, end: int) -> Steps:
        """Return the steps from ``begin`` up to, not including, ``end``."""
        return Steps(*(getattr(self, field.name)[:, begin:end] for field in fields(self)))

    @property
    def length(self) -> int:
        """Return the number of steps."""
        return self.states.shape[1]

    def remove_past(self, actions: int) -> Steps:
        """Return the same steps without the action, reward and done flag before the first one."""
        before = self.before_actions.clone()
        before[:, 0] = actions
        rewards, dones = self.before_rewards.clone(), self.before_dones.clone()
        rewards[:, 0], dones[:, 0] = 0, False
        return replace(self, before_actions=before, before_rewards=rewards, before_dones=dones)


class HistoryModel(nn.Module):
    """Embeddings, blocks and heads. Training and acting both use ``tokens`` and ``decode_tokens``."""

    def __init__(self, shape: HistoryShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states = nn.ModuleList(nn.Embedding(count, width) for count in shape.observations)
            self.actions = nn.Embedding(shape.actions + 1, width)  # the last: no previous action
            self.rewards = nn.Linear(1, width)
            self.dones = nn.Embedding(2, width)
            self.positions = nn.Embedding(shape.tokens, width) if shape.positions == "learned" else None
            self.parts = nn.Embedding(3, width) if shape.layout == "parts" else None
            self.marks = nn.Embedding(3, width) if shape.regions == 2 else None  # open, close, empty region
            self.memory = nn.Embedding(2 * shape.latents, width) if shape.latents else None  # initial ones, and queries
            self.memory_norm = nn.LayerNorm(width) if shape.latents else None
            blocks = (HistoryBlock(i, width, shape.heads, shape.dropout) for i in range(shape.layers))
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
            self._initialize()

    def _initialize(self) -> None:
        """Initialize as GPT-2: small normal weights, with smaller residual projections for deeper models."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                continue
            residual = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02)
        if self.memory_norm is not None:
            nn.init.constant_(self.memory_norm.weight, 0.02)  # the scale of the token embeddings

    def tokens(self, steps: Steps) -> torch.Tensor:
        """Return the embeddings of steps [n, t * tokens_per_step, width]."""
        state = torch.stack([table(steps.states[..., i]) for i, table in enumerate(self.states)]).sum(0)
        action = self.actions(steps.before_actions)
        rewards = steps.before_rewards.to(action.dtype)[..., None]
        reward = self.rewards(rewards) + self.dones(steps.before_dones.long())
        if self.parts is None:
            return state + action + reward
        parts = torch.stack([action, reward, state], 2) + self.parts.weight
        return parts.flatten(1, 2)

    def decode_tokens(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Return hidden states of ``tokens`` [n, t, width], which follow those in the cache."""
        begin = 0 if cache is None else cache.length
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        rotation = None
        if self.positions is not None:
            tokens = tokens + self.positions(positions)
        else:
            rotation = compute_rotation(positions, self.shape.width // self.shape.heads, tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens, rotation, cache)
        if cache is not None:
            cache.length += len(positions)
        return self.norm(tokens)

    def select_at_steps(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that predict actions [n, t, width]."""
        every = self.shape.tokens_per_step
        return hidden[:, every - 1 :: every]

    def outcomes(self, hidden: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the input of the reward and next-state heads, from hidden states and actions."""
        assert self.outcome is not None
        return F.gelu(self.outcome(torch.cat([hidden, self.actions(actions)], -1)))

    def build_missing_region(self, count: int) -> torch.Tensor:
        """Return tokens in place of a missing previous region [count, length, width]."""
        assert self.marks is not None
        length = self.shape.steps * self.shape.tokens_per_step
        return self.marks.weight[2].expand(count, length, -1)

    def mark(self, count: int, *, closes: bool) -> torch.Tensor:
        """Return the token that opens or closes the previous region [n, 1, width]."""
        assert self.marks is not None
        return self.marks.weight[int(closes)].expand(count, 1, -1)

    def build_first_memory(self, count: int) -> torch.Tensor:
        """Return the initial latents, without previous regions [n, latents, width]."""
        assert self.memory is not None
        return self.memory.weight[: self.shape.latents].expand(count, -1, -1)

    def build_memory_questions(self, count: int) -> torch.Tensor:
        """Return the query tokens after a region, whose hidden states become its latents [n, latents, width]."""
        assert self.memory is not None
        return self.memory.weight[self.shape.latents :].expand(count, -1, -1)

    def compute_memory(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return latents from the hidden states of the queries, normalized to the scale of tokens."""
        assert self.memory_norm is not None
        return self.memory_norm(hidden)
