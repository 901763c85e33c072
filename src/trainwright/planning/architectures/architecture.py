"""The numbers of a causal language model that its memory and time follow from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainwright.errors import RequestError
from trainwright.models.gpt.variants import MODEL_TYPE
from trainwright.planning.architectures.families import architecture_fields
from trainwright.planning.architectures.gpt_family import gpt_fields

# A hundred times the largest models there are. A plan goes over buckets and shards of parameters one by one, so what
# is far beyond that would take it minutes.
_MOST_PARAMETERS = 10**14


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by part. ``attention``, ``norms``, ``mlp`` and ``sparse_mlp`` are those of one block.

    ``mlp``: of a block with a plain MLP. ``sparse_mlp``: of a block with experts, all of them with the router
    and what is shared; ``active_sparse_mlp`` without the experts that a token is not sent to.
    ``head``: 0 where it is tied to the embedding, but for its bias. ``linear_attention``: what ``linear_blocks`` of the
    blocks have in the place of ``attention``. ``rest``: of a traced family what all blocks have beyond all that.
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
        """Return the number of parameters of a block with a dense MLP."""
        return self.attention + self.norms + self.mlp

    @property
    def sparse_block(self) -> int:
        """Return the number of parameters of a block with experts."""
        return self.attention + self.norms + self.sparse_mlp

    @property
    def blocks(self) -> int:
        """Those of all blocks together."""
        linear = self.linear_blocks * (self.linear_attention - self.attention)
        return self.dense_blocks * self.dense_block + self.sparse_blocks * self.sparse_block + linear + self.rest

    @property
    def total(self) -> int:
        """As transformers counts: a tied head once."""
        return self.embedding + self.positions + self.blocks + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Those that one token is meant to go through."""
        return self.total - self.sparse_blocks * (self.sparse_mlp - self.active_sparse_mlp)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): queries, keys and values come from narrow vectors.

    ``query_rank``: of the queries', 0 where they come from the hidden states. ``rank``: of the keys' and values'.
    ``rotated``: of each head's ``head_dim`` what is rotated, for keys one part for all heads. ``value``: of a head.
    """

    query_rank: int
    rank: int
    rotated: int
    value: int


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464) in place of attention: heads and their widths, and the convolution's."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Return the width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the width of all values."""
        return self.value_heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters at a hidden size."""
        inward = hidden * (2 * self.keys + 2 * self.values + 2 * self.value_heads)
        convolution = (2 * self.keys + self.values) * self.kernel
        return inward + convolution + 2 * self.value_heads + self.value_dim + self.values * hidden


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks.

    ``family``: transformers' model_type. ``intermediate``: width of a plain MLP. ``positions``: the longest
    sequence it is made for. ``tied``: embedding and head share weights.

    ``gated``: the MLP multiplies two projections (three matrices), else it has two matrices.
    ``norm``: the kind; ``norm_bias``: whether it has biases; ``block_norms``: how many of width ``hidden`` a
    block has. ``parallel``: attention and MLP are added to the same input, side by side.
    ``qk_norm``: of queries and keys; "head" has one weight of ``head_dim`` for all heads, "all" has weights
    for every head. ``fused_qkv``, ``fused_gate_up``: one matrix product in place of three, or two.
    ``rotary``: the part of ``head_dim`` that is rotated; ``rotary_layers``: in how many blocks.
    ``window``: tokens that attention looks back in ``windowed_layers`` of the blocks.
    ``attention_softcap``, ``logit_softcap``: bounds that scores and logits are squashed into.
    ``scaled_embedding``, ``scaled_residual``, ``scaled_logits``: multiplied by a constant on the way.

    ``experts``: per block, in ``sparse_layers`` of the blocks, of width ``expert_intermediate``; each token
    goes to ``experts_per_token`` of them and through a shared one of width ``shared_intermediate`` (0: none),
    which ``shared_gate`` weighs. ``first_dense``: the first blocks have none. ``expert_bias``, ``router_bias``: whether
    they have biases. ``every_expert``: the code computes all of them for every token, zeros included.

    ``post_norm``: norms come after attention and MLP only, and work in fp32. ``sinks``: attention has a learnt score
    for each head that no value belongs to. ``alibi``: scores fall with distance, in plain operations. ``query_gate``:
    the query matrix is twice as wide, and what attention gives is multiplied by a sigmoid of the other half.
    ``latent``: see Latent. ``delta``: of ``linear_layers`` of the blocks, all but every so-many-th.

    ``config``: of a family that is not written down here its configuration as JSON, which its blocks are traced from;
    ``traced_parameters``: how many numbers the model has by that.
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
    config: str = ""
    traced_parameters: int = 0

    @property
    def query_width(self) -> int:
        """Return the width of all queries."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Of the keys, and of the values again."""
        return self.key_value_heads * self.head_dim

    def parameters(self) -> Parameters:
        """Count parameters by part; their total is exactly that of transformers' model."""
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
        """Parameters of a block's experts with all around them, and of those that a token goes through."""
        if not self.experts:
            return 0, 0
        expert = self._mlp(self.expert_intermediate, self.expert_bias)
        around = self.experts * (self.hidden + self.router_bias) + self.hidden * self.shared_gate
        if self.shared_intermediate:
            around += self._mlp(self.shared_intermediate, bias=False)
        return around + self.experts * expert, around + self.experts_per_token * expert


def from_config(config: Mapping[str, Any], origin: str = "config.json") -> Architecture | None:
    """Return the architecture that a transformers configuration describes; None for a model_type not known here.

    Of a model that also sees images (gemma3) it is the language model. Keys that are left out mean what they
    mean to transformers, but those that make the model's size have to be there.
    Raises RequestError, which begins with ``origin``, naming the keys that are missing or wrong.
    """
    ours = config.get("model_type") == MODEL_TYPE
    fields = gpt_fields(config, origin) if ours else architecture_fields(config, origin)
    if fields is None:
        return None
    found = Architecture(**fields)
    if (count := found.parameters().total) > _MOST_PARAMETERS:
        raise RequestError(
            f"{origin}: these sizes make {count:.1e} parameters, more than any machine trains; look at hidden_size, "
            "intermediate_size and the like"
        )
    return found
