"""A decoder block of each family as its modeling code runs it (transformers 5, models/*/modeling_*.py).

Local names and the order of calls follow the modeling code wherever they determine which tensors are alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.planning.architectures.architecture import Architecture, Latent
from trainwright.planning.operations.attention import Attention
from trainwright.planning.operations.delta import delta_net
from trainwright.planning.operations.elementary import (
    add,
    broadcast,
    cat,
    contiguous,
    dropout,
    from_result,
    mean,
    mul,
    scale,
    shift,
    slices,
    split,
    square,
    to,
    turned,
    view,
)
from trainwright.planning.operations.experts import sparse_mlp
from trainwright.planning.operations.layers import mlp, norm, project, rms_norm, rotate, rotate_pairs
from trainwright.planning.operations.scores import repeat
from trainwright.planning.operations.shapes import BatchShape, BlockKind, Device, Heads
from trainwright.planning.operations.tape import Tape, Tensor
from trainwright.planning.operations.weights import ModelWeights

_FP32 = 4


@dataclass
class Block:
    """A block on its tape. ``cos``, ``sin``: the rotary tables of the pass, in the family's dtype."""

    tape: Tape
    architecture: Architecture
    kind: BlockKind
    batch: BatchShape
    device: Device
    weights: ModelWeights
    cos: Tensor
    sin: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the block."""
        if self.architecture.post_norm:
            return self._norms_after(hidden)
        if self.architecture.block_norms == 4:
            return self._norms_around(hidden)
        if self.architecture.parallel:
            return self._side_by_side(hidden)
        return self._norms_before(hidden)

    def _norms_before(self, hidden: Tensor) -> Tensor:
        residual = hidden
        hidden = self._norm(hidden, "input_norm")
        hidden = self._attention(hidden)
        hidden = self._dropout(hidden)
        hidden = self._add(residual, hidden)
        residual = hidden
        hidden = self._norm(hidden, "post_attention_norm")
        hidden = self._mlp(hidden)
        hidden = self._dropout(hidden)
        return self._add(residual, hidden)

    def _norms_after(self, hidden: Tensor) -> Tensor:
        residual = hidden
        hidden = self._attention(hidden)
        hidden = self._norm(hidden, "post_attention_norm")
        hidden = self._add(residual, hidden)
        residual = hidden
        hidden = self._mlp(hidden)
        hidden = self._norm(hidden, "post_mlp_norm")
        return self._add(residual, hidden)

    def _norms_around(self, hidden: Tensor) -> Tensor:
        residual = hidden
        hidden = self._norm(hidden, "input_norm")
        hidden = self._attention(hidden)
        hidden = self._norm(hidden, "post_attention_norm")
        hidden = self._add(residual, hidden)
        residual = hidden
        hidden = self._norm(hidden, "pre_mlp_norm")
        hidden = self._mlp(hidden)
        hidden = self._norm(hidden, "post_mlp_norm")
        return self._add(residual, hidden)

    def _side_by_side(self, hidden: Tensor) -> Tensor:
        residual = hidden
        if self.architecture.block_norms == 1:
            hidden = self._norm(hidden, "input_norm")
            attended = self._dropout(self._attention(hidden))
            made = self._dropout(self._mlp(hidden))
        else:
            attended = self._dropout(self._attention(self._norm(hidden, "input_norm")))
            made = self._dropout(self._mlp(self._norm(hidden, "post_attention_norm")))
        self.tape.operation = "residual"
        return add(self.tape, add(self.tape, attended, made), residual)

    def _add(self, residual: Tensor, hidden: Tensor) -> Tensor:
        self.tape.operation = "residual"
        if self.architecture.family == "granite":  # even if the factor is 1
            hidden = scale(self.tape, hidden)
        return add(self.tape, residual, hidden)

    def _dropout(self, hidden: Tensor) -> Tensor:
        return dropout(self.tape, hidden, self.architecture.residual_dropout, self.device.is_gpu)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        self.tape.operation = name
        return norm(self.tape, self.architecture, x, self.weights, name, self.batch.tokens)

    def _attention(self, hidden: Tensor) -> Tensor:
        tape, a = self.tape, self.architecture
        if self.kind.linear and a.delta is not None:
            return delta_net(tape, a, a.delta, hidden, self.weights, self.batch)
        gate = None
        if a.latent is not None:
            q, k, v = _latent_projections(
                tape, a, a.latent, hidden, self.weights, self.batch.tokens, self.cos, self.sin
            )
        else:
            q, k, v, gate = self._projections(hidden)
        if self.kind.rotated and a.latent is None:
            tape.operation = "rotary"
            q, k = self._rotated(q, k)
        out = self._attend(q, k, v)
        del q, k, v
        if gate is not None:
            out = mul(tape, out, from_result(tape, gate))
        tape.operation = "output"
        return project(tape, out, self.weights, "output")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tape, a, batch = self.tape, self.architecture, self.batch
        heads = Heads.of(a, windowed=self.kind.windowed)
        tape.operation = "attention"
        masked = batch.masked or (heads.window is not None and heads.window < batch.length)
        attention = Attention(tape, heads, batch, self.device, self.weights["sinks"] if a.sinks else None)
        if self.weights.stack.attention == "math":
            return attention.eager(q, k, v)
        if batch.packed:
            return attention.packed(q, k, v)
        if heads.kernel(self.device, q.width, batch).name == "eager":
            return attention.eager(q, k, v)
        if a.alibi and a.family != "falcon":
            return attention.alibi(q, k, v)
        return attention.sdpa(q, k, v, masked or a.alibi)

    def _projections(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values [B, H, L, D] in memory order [B, L, H, D], and the output's gate."""
        tape, a, weights, tokens = self.tape, self.architecture, self.weights, self.batch.tokens
        widths = (a.query_width, a.key_value_width, a.key_value_width)
        if a.fused_qkv:
            tape.operation = "query_key_value"
            fused = project(tape, hidden, weights, "query_key_value")
            cut = slices if a.family == "phi3" else split
            q, k, v = cut(tape, fused, [tokens * width for width in widths])
            if a.family == "falcon":
                q, k, v = self._heads_of_falcon(q, k, v)
            return view(tape, q), view(tape, k), view(tape, v), None
        made, gate = [], None
        for name in ("query", "key", "value"):
            tape.operation = name
            x = view(tape, project(tape, hidden, weights, name))
            if a.query_gate and name == "query":
                x, gate = split(tape, x, [x.numel // 2] * 2)
                gate = contiguous(tape, gate)
            if a.qk_norm != "none" and name != "value":
                x = self._norm_of_heads(x, name)
            made.append(view(tape, x))
        del x
        return made[0], made[1], made[2], gate

    def _heads_of_falcon(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy into the order of heads; keys and values that several heads share are first repeated for each."""
        tape, a = self.tape, self.architecture
        if 1 < a.key_value_heads < a.heads:
            group = a.heads // a.key_value_heads
            k, v = (repeat(tape, x, group) for x in (k, v))
        return contiguous(tape, q), contiguous(tape, k), contiguous(tape, v)

    def _norm_of_heads(self, x: Tensor, name: str) -> Tensor:
        a, tokens = self.architecture, self.batch.tokens
        heads = a.heads if name == "query" else a.key_value_heads
        per_head = a.qk_norm == "head" or a.family == "cohere"
        return norm(self.tape, a, x, self.weights, f"{name}_norm", tokens * (heads if per_head else 1))

    def _rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tape, a = self.tape, self.architecture
        width = q.width
        if self.weights.stack.fused:
            return turned(tape, q), turned(tape, k)
        if a.family == "cohere":
            q, k = to(tape, q, _FP32), to(tape, k, _FP32)
        if a.family == "llama4_text":
            return self._turned(q), self._turned(k)
        if a.family == "gpt_oss":
            return rotate_pairs(tape, q, self.cos, self.sin), rotate_pairs(tape, k, self.cos, self.sin)
        if a.rotary < 1 or a.family == "phi3":
            return self._partly_rotated(q), self._partly_rotated(k)
        rotated = rotate(tape, q, self.cos, self.sin), rotate(tape, k, self.cos, self.sin)
        return to(tape, rotated[0], width), to(tape, rotated[1], width)

    def _turned(self, x: Tensor) -> Tensor:
        """Rotate as complex numbers in fp32, then normalize in fp32 without a weight (Llama4TextL2Norm)."""
        tape, width, rows = self.tape, x.width, x.numel // self.architecture.head_dim
        x = to(tape, mul(tape, to(tape, x, _FP32), self.cos), width)
        x = to(tape, x, _FP32)
        normed = mul(tape, x, from_result(tape, shift(tape, mean(tape, square(tape, x), rows)), temporaries=2))
        return to(tape, normed, width)

    def _partly_rotated(self, x: Tensor) -> Tensor:
        part = int(x.numel * self.architecture.rotary)
        turned, passed = slices(self.tape, x, [part, x.numel - part])
        return cat(self.tape, [rotate(self.tape, turned, self.cos, self.sin), passed], heads_first=True)

    def _mlp(self, hidden: Tensor) -> Tensor:
        tape, a = self.tape, self.architecture
        if self.kind.sparse:
            return sparse_mlp(tape, a, hidden, self.weights, self.batch.tokens, self.device)
        return mlp(tape, a, hidden, self.weights)


def _latent_projections(
    tape: Tape,
    a: Architecture,
    latent: Latent,
    hidden: Tensor,
    weights: ModelWeights,
    tokens: int,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [B, H, L, D], partly rotated, and values [B, H, L, V].

    Multi-head latent attention as transformers trains it (models/deepseek_v3): keys and values are expanded in full.
    """
    heads, plain = a.heads, a.head_dim - latent.rotated
    states = hidden
    if latent.query_rank:
        tape.operation = "query_a"
        states = rms_norm(tape, project(tape, hidden, weights, "query_a"), weights["query_a_norm"], tokens)
    tape.operation = name = "query_b" if latent.query_rank else "query"
    states = view(tape, project(tape, states, weights, name))
    passed, turned = split(tape, states, [tokens * heads * plain, tokens * heads * latent.rotated])
    del states
    tape.operation = "key_value_a"
    compressed = project(tape, hidden, weights, "key_value_a")
    narrow, shared = split(tape, compressed, [tokens * latent.rank, tokens * latent.rotated])
    narrow = rms_norm(tape, narrow, weights["key_value_a_norm"], tokens)
    tape.operation = "rotary"
    turned = rotate_pairs(tape, turned, cos, sin)
    shared = rotate_pairs(tape, shared, cos, sin)
    queries = cat(tape, [passed, turned], heads_first=True)
    del passed, turned
    tape.operation = "key_value_b"
    expanded = view(tape, project(tape, narrow, weights, "key_value_b"))
    keys, values = split(tape, expanded, [tokens * heads * plain, tokens * heads * latent.value])
    tape.operation = "rotary"
    keys = cat(tape, [keys, broadcast(tape, shared, heads * shared.numel)], heads_first=True)
    return queries, keys, values
