"""GPT: a stack of transformer blocks that predicts the next token.

    tokens -> embedding (+ learned positions) -> TransformerBlock x n -> norm -> head -> logits
    TransformerBlock: x = x + attention(norm(x)), then x = x + mlp(norm(x))

With the components of 2019 it is GPT-2, with current ones a Llama or a Qwen3: rotary positions (arXiv 2104.09864),
RMSNorm (1910.07467), SwiGLU (2002.05202), grouped-query attention (2305.13245), query-key normalization (2302.05442).
Shapes: B rows, L positions, H hidden size, h query heads of size d = H / h, g key-value heads.

transformers provides generation, the key-value cache, and the choice of the attention kernel. conversion.py converts
weights from and to its architectures.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainwright.models.gpt.config import GPTConfig
from trainwright.models.gpt.variants import MODEL_TYPE

# The name of the cache in outputs of transformers, and in its mask functions, from 5.24 on and before.
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [B, 1, L, d]


class TransformerBlock(nn.Module):
    """One layer: causal attention, then an MLP at each position; both add to the residual stream."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = _build_norm(config, config.hidden_size)
        self.attention = SelfAttention(config, index)
        self.mlp_norm = _build_norm(config, config.hidden_size)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation | None = None,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **sequences: Any,
    ) -> torch.Tensor:
        """Map ``hidden`` [B, L, H] to the same shape; ``sequences``: boundaries of packs for the attention kernel."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, mask, cache, **sequences)
        return hidden + self.mlp(self.mlp_norm(hidden))


class SelfAttention(nn.Module):
    """Causal self-attention with h query heads and g key-value heads."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = index  # index in the key-value cache
        self.head_dim = config.head_dim
        self.heads, self.groups = config.num_attention_heads, config.groups
        self.num_key_value_groups = self.heads // self.groups  # how often transformers' kernels repeat keys and values
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.groups) * self.head_dim, bias=bool(config.bias))
        self.output = _mark_onto_the_stream(nn.Linear(config.hidden_size, config.hidden_size, bias=bool(config.bias)))
        self.query_norm = _build_norm(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.key_norm = _build_norm(config, self.head_dim) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation | None,
        mask: torch.Tensor | None,
        cache: Cache | None,
        **sequences: Any,
    ) -> torch.Tensor:
        """Attend within each row of ``hidden`` [B, L, H]."""
        rows, length, _ = hidden.shape
        heads = self.qkv(hidden).view(rows, length, -1, self.head_dim)
        query, key, value = heads.split([self.heads, self.groups, self.groups], dim=2)
        query, key = self.query_norm(query).transpose(1, 2), self.key_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        if rotation is not None:
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        attention_output, _ = attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **sequences)
        out: torch.Tensor = self.output(attention_output.reshape(rows, length, -1))
        return F.dropout(out, self.dropout, self.training) if self.dropout else out


class MLP(nn.Module):
    """Two linear layers with a GELU, or three with a gated product (SwiGLU)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.approximation = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.dropout = config.dropout
        self.up = nn.Linear(config.hidden_size, config.intermediate_size * (1 + self.gated), bias=bool(config.bias))
        self.down = _mark_onto_the_stream(
            nn.Linear(config.intermediate_size, config.hidden_size, bias=bool(config.bias))
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to ``hidden`` [B, L, H]."""
        hidden = self.up(hidden)
        if self.gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden, approximate=self.approximation)
        out: torch.Tensor = self.down(hidden)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out


class GPTBase(PreTrainedModel):
    """Attributes and initialization that transformers needs."""

    config_class = GPTConfig
    base_model_prefix = "decoder"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = False
    _no_split_modules = ["TransformerBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as GPT-2: normal, with smaller residual projections so that activations do not grow with depth."""
        if isinstance(module, nn.Linear | nn.Embedding):
            layers = 2 * self.config.num_hidden_layers if getattr(module, "onto_the_stream", False) else 1
            module.weight.normal_(0.0, self.config.initializer_range / layers**0.5)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.weight.fill_(1.0)
        if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
            bias.zero_()


class Decoder(GPTBase):
    """The model without its head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.embedding: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.blocks = nn.ModuleList(TransformerBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = _build_norm(config, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **sequences: Any,
    ) -> BaseModelOutputWithPast:
        """Map ``input_ids`` [B, L] or ``inputs_embeds`` [B, L, H] to hidden states [B, L, H] after the final norm."""
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past_length = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past_length, past_length + hidden.shape[1], device=hidden.device)[None]
        extra: dict[str, Any] = {CACHE: cache}
        mask = create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, position_ids=position_ids, **extra
        )
        rotation = None
        if self.positions is not None:
            hidden = hidden + self.positions(position_ids)
        else:
            rotation = _compute_rotation(position_ids, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        if self.config.dropout:
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden, rotation, mask, cache, **sequences)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **extra)


class GPT(GPTBase, GenerationMixin):
    """The decoder with a head over the vocabulary, which may be tied to the embedding."""

    _tied_weights_keys = {"head.weight": "decoder.embedding.weight"}

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config)
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the head."""
        self.head = value

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, L, vocabulary], or of the last ``logits_to_keep`` positions; the rest as ``Decoder``."""
        assert return_dict, "what is given has names"
        cache = past_key_values if cache is None else cache  # the second name is that before transformers 5.24
        output = self.decoder(input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache)
        logits = self.head(output.last_hidden_state[:, -logits_to_keep:])
        extra: dict[str, Any] = {CACHE: getattr(output, CACHE)}
        return CausalLMOutputWithPast(logits=logits, **extra)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(q k^T) v explicitly, for ``eager``; kernels give the same result.

    Args:
        query: [B, h, L, d]; ``key``, ``value``: [B, g, K, d], cached ones first.
        mask: added to the scores [B, h, L, K]; None: every query attends to positions up to its own.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    if mask is None:
        length, keys = scores.shape[-2:]
        later = torch.ones(length, keys, dtype=torch.bool, device=scores.device).triu(keys - length + 1)
        scores = scores.masked_fill(later, float("-inf"))
    else:
        scores = scores + mask[..., : key.shape[-2]]
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2), weights


def _build_norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=bool(config.bias))


def _mark_onto_the_stream(linear: nn.Linear) -> nn.Linear:
    linear.onto_the_stream = True  # type: ignore[assignment]
    return linear


def _compute_rotation(positions: torch.Tensor, size: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return cosines and sines of the rotary angles in ``dtype``, computed in fp32; earlier pairs rotate faster."""
    channels = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * theta ** (-channels / size)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of each head by the angles of their position."""
    cosines, sines = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def register() -> None:
    """Register the GPT with the Auto classes of transformers. Can be called more than once."""
    AutoConfig.register(MODEL_TYPE, GPTConfig, exist_ok=True)
    AutoModelForCausalLM.register(GPTConfig, GPT, exist_ok=True)
