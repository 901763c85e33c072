"""The sizes of a causal language model that determine its memory and time. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by part. ``attention``, ``norms``, ``mlp`` and ``sparse_mlp`` are those of one block.

    ``mlp``: of a block with a plain MLP. ``sparse_mlp``: of a block with experts, including the router and shared
    experts; ``active_sparse_mlp`` excludes the experts that a token is not routed to. ``head``: only its bias if it is
    tied to the embedding. ``linear_attention``: replaces ``attention`` in ``linear_blocks`` of the blocks. ``rest``:
    for a traced family, the parameters of all blocks that no other field counts.
    """

    embedding: int
    positions: int
    attention: int
    norms: int
    mlp: int
    sparse_mlp: int
    active_sparse_mlp: int
    final_norm: int
    head: int
    dense_blocks: int
    sparse_blocks: int
    linear_attention: int = 0
    linear_blocks: int = 0
    rest: int = 0

    @property
    def dense_block(self) -> int:
        """The number of parameters of a block with a dense MLP."""
        return self.attention + self.norms + self.mlp

    @property
    def sparse_block(self) -> int:
        """The number of parameters of a block with experts."""
        return self.attention + self.norms + self.sparse_mlp

    @property
    def blocks(self) -> int:
        """The number of parameters of all blocks."""
        linear = self.linear_blocks * (self.linear_attention - self.attention)
        return self.dense_blocks * self.dense_block + self.sparse_blocks * self.sparse_block + linear + self.rest

    @property
    def total(self) -> int:
        """The total number of parameters, with a tied head counted once, as transformers counts."""
        return self.embedding + self.positions + self.blocks + self.final_norm + self.head

    @property
    def active(self) -> int:
        """The number of parameters that one token uses."""
        return self.total - self.sparse_blocks * (self.sparse_mlp - self.active_sparse_mlp)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): queries, keys and values are projected from low-rank vectors.

    ``query_rank``: rank of the queries, 0 if they are projected from the hidden states. ``rank``: rank of the keys and
    values. ``rotated``: the part of each head's ``head_dim`` that is rotated; all heads share that of the keys.
    ``value``: width of a head's values.
    """

    query_rank: int
    rank: int
    rotated: int
    value: int


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464) in place of attention: heads, their widths, width of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """The width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.value_heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters at a hidden size."""
        inward = hidden * (2 * self.keys + 2 * self.values + 2 * self.value_heads)
        convolution = (2 * self.keys + self.values) * self.kernel
        return inward + convolution + 2 * self.value_heads + self.value_dim + self.values * hidden


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks.

    ``family``: transformers' model_type. ``intermediate``: width of a plain MLP. ``positions``: the maximum sequence
    length. ``tied``: embedding and head share weights. ``gated``: the MLP multiplies two projections (three matrices);
    otherwise it has two matrices. ``norm``: the kind; ``norm_bias``: whether it has biases; ``block_norms``: number of
    norms of width ``hidden`` per block. ``parallel``: attention and MLP are added to the same input. ``qk_norm``: norm
    of queries and keys; "head" has one weight of ``head_dim`` for all heads, "all" has weights for every head.
    ``fused_qkv``, ``fused_gate_up``: one matrix product instead of three, or two. ``rotary``: the share of ``head_dim``
    that is rotated; ``rotary_layers``: in how many blocks. ``window``: attention window in tokens in
    ``windowed_layers`` of the blocks. ``attention_softcap``, ``logit_softcap``: soft caps of scores and logits.
    ``scaled_embedding``, ``scaled_residual``, ``scaled_logits``: multiplied by a constant. ``experts``: number per
    block, in ``sparse_layers`` of the blocks, of width ``expert_intermediate``; each token is routed to
    ``experts_per_token`` of them and to a shared one of width ``shared_intermediate`` (0: none), which ``shared_gate``
    weights. ``first_dense``: number of blocks without experts at the start. ``expert_bias``, ``router_bias``: whether
    they have biases. ``every_expert``: the code computes all experts for every token, including zeros. ``post_norm``:
    norms only follow attention and MLP, and compute in fp32. ``sinks``: attention has a learned score per head that
    belongs to no value. ``alibi``: scores decrease with distance, in separate operations. ``query_gate``: the query
    matrix is twice as wide, and the output of attention is multiplied by a sigmoid of the second half. ``latent``: see
    Latent. ``delta``: of ``linear_layers`` of the blocks, all but those at regular intervals. ``whole_logits``:
    the model returns logits, so that those of all positions exist at once. ``config``: for an unknown family, its
    configuration as JSON, from which its blocks are traced; ``traced_parameters``: the traced model's number of
    parameters.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    block_norms: int = 2
    parallel: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    learned_positions: bool = False
    rotary: float = 1.0
    rotary_layers: int = 0
    window: int | None = None
    windowed_layers: int = 0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    scaled_embedding: bool = False
    scaled_residual: bool = False
    scaled_logits: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    sparse_layers: int = 0
    first_dense: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    every_expert: bool = False
    post_norm: bool = False
    sinks: bool = False
    alibi: bool = False
    query_gate: bool = False
    latent: Latent | None = None
    delta: DeltaNet | None = None
    linear_layers: int = 0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    whole_logits: bool = False
    config: str = ""
    traced_parameters: int = 0

    @property
    def query_width(self) -> int:
        """The width of all queries."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """The width of the keys, and of the values."""
        return self.key_value_heads * self.head_dim

    def parameters(self) -> Parameters:
        """Count parameters by part; the total equals that of transformers' model."""
        norm = self.hidden * (1 + self.norm_bias)
        sparse, active = self._sparse_mlp()
        head = 0 if self.tied else self.vocabulary * self.hidden
        found = Parameters(
            embedding=self.vocabulary * self.hidden,
            positions=self.positions * self.hidden if self.learned_positions else 0,
            attention=self._attention(),
            norms=self.block_norms * norm,
            mlp=self._mlp(self.intermediate, self.mlp_bias),
            sparse_mlp=sparse,
            active_sparse_mlp=active,
            final_norm=norm,
            head=head + self.vocabulary * self.head_bias,
            dense_blocks=self.layers - self.sparse_layers,
            sparse_blocks=self.sparse_layers,
            linear_attention=self.delta.parameters(self.hidden) if self.delta is not None else 0,
            linear_blocks=self.linear_layers,
        )
        return replace(found, rest=self.traced_parameters - found.total) if self.traced_parameters else found

    def _attention(self) -> int:
        if self.latent is not None:
            return self._latent_attention(self.latent)
        queries, keys = self.query_width, self.key_value_width
        weights = self.hidden * queries * self.query_gate + self.heads * self.sinks
        weights += self.hidden * (queries + 2 * keys) + queries * self.hidden
        biases = (queries + 2 * keys) * self.qkv_bias + self.hidden * self.output_bias
        normed = {"none": 0, "head": 2 * self.head_dim, "all": queries + keys}[self.qk_norm]
        return weights + biases + normed * (1 + self.norm_bias)

    def _latent_attention(self, latent: Latent) -> int:
        values, inward = self.heads * latent.value, latent.rank + latent.rotated
        queries = self.hidden * self.query_width
        if latent.query_rank:
            queries = latent.query_rank * (self.hidden + 1 + self.query_width)
        expanded = latent.rank * (self.heads * (self.head_dim - latent.rotated) + values)
        biases = (latent.query_rank + inward) * self.qkv_bias + self.hidden * self.output_bias
        return queries + self.hidden * inward + latent.rank + expanded + values * self.hidden + biases

    def _mlp(self, width: int, bias: bool) -> int:
        inward = 2 if self.gated else 1
        return (inward + 1) * self.hidden * width + (inward * width + self.hidden) * bias

    def _sparse_mlp(self) -> tuple[int, int]:
        """Return the parameters of a block's experts, router and shared experts: all, and those that a token uses."""
        if not self.experts:
            return 0, 0
        expert = self._mlp(self.expert_intermediate, self.expert_bias)
        around = self.experts * (self.hidden + self.router_bias) + self.hidden * self.shared_gate
        if self.shared_intermediate:
            around += self._mlp(self.shared_intermediate, bias=False)
        return around + self.experts * expert, around + self.experts_per_token * expert
