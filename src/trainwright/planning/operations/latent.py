"""Multi-head latent attention as transformers trains it (models/deepseek_v3): keys and values are expanded in full."""

from __future__ import annotations

from trainwright.planning.architectures.architecture import Architecture, Latent
from trainwright.planning.operations.elementary import broadcast, cat, split, view
from trainwright.planning.operations.layers import project, rms_norm, rotate_pairs
from trainwright.planning.operations.tape import Tape, Tensor
from trainwright.planning.operations.weights import Weights


def latent_projections(
    tape: Tape, a: Architecture, latent: Latent, hidden: Tensor, weights: Weights, tokens: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [B, H, L, D], partly rotated, and values [B, H, L, V]."""
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
