"""The parameters of a model by purpose, as matrices [n, k], trained or frozen."""

from __future__ import annotations

from trainwright.planning.architectures.architecture import Architecture, DeltaNet, Latent
from trainwright.planning.derived import AdapterShape, Quantization, Target
from trainwright.planning.operations.shapes import BlockKind
from trainwright.planning.operations.tape import Parameter
from trainwright.planning.stack import OWN, Stack

# The matrices of a block that are linear modules, by purpose; a family may fuse several into one.
ADAPTED: dict[str, frozenset[Target]] = {
    "query": frozenset({"query"}),
    "key": frozenset({"key"}),
    "value": frozenset({"value"}),
    "query_a": frozenset({"query"}),
    "query_b": frozenset({"query"}),
    "key_value_a": frozenset({"key", "value"}),
    "key_value_b": frozenset({"key", "value"}),
    "delta.in": frozenset({"query", "key", "value"}),
    "delta.rates": frozenset({"query", "key", "value"}),
    "query_key_value": frozenset({"query", "key", "value"}),
    "output": frozenset({"output"}),
    "gate": frozenset({"gate"}),
    "up": frozenset({"up"}),
    "gate_up": frozenset({"gate", "up"}),
    "down": frozenset({"down"}),
}


class ModelWeights:
    """Parameters by name, in the model's order.

    ``width``: bytes per element. ``trainable``: whether they are trained. ``adapter``: the adapter on its target
    matrices; its parameters have their names plus .lora_A [r, k], .lora_B [n, r] and .magnitude. ``stack``: the program
    that runs the model.
    """

    def __init__(
        self,
        width: int,
        trainable: bool,
        adapter: AdapterShape | None = None,
        quantization: Quantization = "none",
        stack: Stack = OWN,
    ) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.stack = stack
        self.adapter = adapter
        self._quantization = quantization
        self._width = width
        self._trainable = trainable

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]

    def bias(self, name: str) -> Parameter | None:
        """Return the bias of a weight, or None."""
        return self.parameters.get(f"{name}.bias")

    def add(self, name: str, n: int, k: int = 1, bias: bool = False) -> None:
        """Add a matrix, or with ``k`` 1 a vector, and optionally its bias."""
        self._put(name, n, k, self._trainable)
        does = ADAPTED.get(name.removeprefix("shared."), frozenset())
        if (does or (self.stack.expert_linears and name.startswith("experts."))) and self._quantization != "none":
            self.parameters[name].quantized = self._quantization
        if bias:
            self._put(f"{name}.bias", n, 1, self._trainable)
        if self.adapter is not None and does & set(self.adapter.targets):
            self._put(f"{name}.lora_A", self.adapter.rank, k, True)
            self._put(f"{name}.lora_B", n, self.adapter.rank, True)
            if self.adapter.kind == "dora":
                self._put(f"{name}.magnitude", n, 1, True)

    def _put(self, name: str, n: int, k: int, trainable: bool) -> None:
        self.parameters[name] = Parameter(name, n, k, self._width, trainable)


def block_weights(
    a: Architecture,
    kind: BlockKind,
    width: int,
    trainable: bool,
    adapter: AdapterShape | None = None,
    quantization: Quantization = "none",
    stack: Stack = OWN,
) -> ModelWeights:
    """Return the parameters of a block, in the order in which transformers registers them."""
    weights = ModelWeights(width, trainable, adapter, quantization, stack)
    norms = _norm_names(a)
    if a.family in ("gpt2", "gpt_neox"):
        for name in norms:
            weights.add(name, a.hidden, bias=a.norm_bias)
        norms = ()
    if kind.linear and a.delta is not None:
        _add_delta(weights, a, a.delta)
    elif a.latent is not None:
        _add_latent(weights, a, a.latent)
    else:
        _add_attention(weights, a)
    if kind.sparse:
        _add_experts(weights, a)
    else:
        _add_mlp(weights, a, "", a.intermediate, a.mlp_bias)
    for name in norms:
        weights.add(name, a.hidden, bias=a.norm_bias)
    return weights


def end_weights(a: Architecture, width: int, trainable: bool) -> ModelWeights:
    """Return the parameters outside the blocks."""
    weights = ModelWeights(width, trainable)
    weights.add("embedding", a.vocabulary, a.hidden)
    if a.learned_positions:
        weights.add("positions", a.positions, a.hidden)
    weights.add("final_norm", a.hidden, bias=a.norm_bias)
    if not a.tied:
        weights.add("head", a.vocabulary, a.hidden)
    if a.head_bias:
        weights.add("head.bias", a.vocabulary)
    return weights


def _norm_names(a: Architecture) -> tuple[str, ...]:
    if a.block_norms == 1:
        return ("input_norm",)
    if a.block_norms == 4:
        return ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
    if a.post_norm:
        return ("post_attention_norm", "post_mlp_norm")
    return ("input_norm", "post_attention_norm")


def _add_attention(weights: ModelWeights, a: Architecture) -> None:
    queries, keys = a.query_width, a.key_value_width
    if a.fused_qkv:
        weights.add("query_key_value", queries + 2 * keys, a.hidden, bias=a.qkv_bias)
    else:
        weights.add("query", queries * (2 if a.query_gate else 1), a.hidden, bias=a.qkv_bias)
        weights.add("key", keys, a.hidden, bias=a.qkv_bias)
        weights.add("value", keys, a.hidden, bias=a.qkv_bias)
    weights.add("output", a.hidden, queries, bias=a.output_bias)
    if a.sinks:
        weights.add("sinks", a.heads)
    if a.qk_norm != "none":
        whole = a.qk_norm == "all"
        weights.add("query_norm", queries if whole else a.head_dim, bias=a.norm_bias)
        weights.add("key_norm", keys if whole else a.head_dim, bias=a.norm_bias)


def _add_latent(weights: ModelWeights, a: Architecture, latent: Latent) -> None:
    if latent.query_rank:
        weights.add("query_a", latent.query_rank, a.hidden, bias=a.qkv_bias)
        weights.add("query_a_norm", latent.query_rank)
        weights.add("query_b", a.query_width, latent.query_rank)
    else:
        weights.add("query", a.query_width, a.hidden)
    weights.add("key_value_a", latent.rank + latent.rotated, a.hidden, bias=a.qkv_bias)
    weights.add("key_value_a_norm", latent.rank)
    weights.add("key_value_b", a.heads * (a.head_dim - latent.rotated + latent.value), latent.rank)
    weights.add("output", a.hidden, a.heads * latent.value, bias=a.output_bias)


def _add_delta(weights: ModelWeights, a: Architecture, delta: DeltaNet) -> None:
    weights.add("delta.steps", delta.value_heads)
    weights.add("delta.decay", delta.value_heads)
    weights.add("delta.convolution", 2 * delta.keys + delta.values, delta.kernel)
    weights.add("delta.in", 2 * delta.keys + 2 * delta.values, a.hidden)
    weights.add("delta.rates", 2 * delta.value_heads, a.hidden)
    weights.add("delta.norm", delta.value_dim)
    weights.add("output", a.hidden, delta.values)


def _add_mlp(weights: ModelWeights, a: Architecture, prefix: str, width: int, bias: bool) -> None:
    if a.fused_gate_up:
        weights.add(f"{prefix}gate_up", 2 * width, a.hidden, bias=bias)
    else:
        if a.gated:
            weights.add(f"{prefix}gate", width, a.hidden, bias=bias)
        weights.add(f"{prefix}up", width, a.hidden, bias=bias)
    weights.add(f"{prefix}down", a.hidden, width, bias=bias)


def _add_experts(weights: ModelWeights, a: Architecture) -> None:
    weights.add("router", a.experts, a.hidden, bias=a.router_bias)
    own = a.experts // weights.stack.expert_parallel
    weights.add("experts.gate_up", own * 2 * a.expert_intermediate, a.hidden, bias=a.expert_bias)
    weights.add("experts.down", own * a.hidden, a.expert_intermediate, bias=a.expert_bias)
    if a.shared_intermediate:
        _add_mlp(weights, a, "shared.", a.shared_intermediate, bias=False)
    if a.shared_gate:
        weights.add("shared_gate", 1, a.hidden)
