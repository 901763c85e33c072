"""An MLP of experts as transformers runs it on sorted tokens (integrations/moe.py, grouped_mm)."""

from __future__ import annotations

from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.operations.elementary import (
    add,
    as_tensor,
    cat,
    contiguous,
    from_input,
    from_result,
    gated,
    gather,
    mean,
    mul,
    scale,
    shift,
    slices,
    split,
    to,
    view,
)
from trainwright.planning.operations.layers import activation, expand, linear, linear_of, mlp, softmax
from trainwright.planning.operations.scores import repeat
from trainwright.planning.operations.shapes import Device
from trainwright.planning.operations.tape import Parameter, Tape, Tensor
from trainwright.planning.operations.weights import ModelWeights

_FP32, _INT64 = 4, 8


def sparse_mlp(
    tape: Tape, a: Architecture, hidden: Tensor, weights: ModelWeights, tokens: int, device: Device
) -> Tensor:
    """Return the weighted output of the experts that each token is routed to, plus that of shared experts."""
    if a.every_expert and weights.stack.experts != "permuted":
        return view(tape, _every_expert(tape, a, hidden, weights, tokens))
    shared = mlp(tape, a, hidden, weights, "shared.") if a.shared_intermediate else None
    scores, indices = _route(tape, a, hidden, weights, tokens)
    if weights.stack.keeps_routes:
        tape.leave()
    out = _experts(tape, a, hidden, scores, indices, weights, tokens)
    if shared is not None:
        tape.operation = "shared_gate"
        if a.shared_gate:
            gate = from_result(tape, linear(tape, hidden, weights["shared_gate"]))
            shared = mul(tape, shared, gate)
        out = add(tape, out, shared)
    return view(tape, out)


def _route(tape: Tape, a: Architecture, hidden: Tensor, weights: ModelWeights, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of the experts of each token."""
    tape.operation = "router"
    if a.latent is not None or a.family == "glm4_moe":
        return _route_in_fp32(tape, a, hidden, weights["router"], tokens)
    logits = linear(tape, hidden, weights["router"], weights.bias("router"))
    if a.router_bias:
        indices = tape.new(tokens * a.experts_per_token, _INT64)
        return softmax(tape, gather(tape, logits, tokens * a.experts_per_token, indices)), indices
    probabilities = softmax(tape, to(tape, logits, _FP32))
    chosen = tokens * a.experts_per_token
    indices = tape.new(chosen, _INT64)
    scores = gather(tape, probabilities, chosen, indices)
    return to(tape, scores, hidden.width), indices


def _route_in_fp32(
    tape: Tape, a: Architecture, hidden: Tensor, router: Parameter, tokens: int
) -> tuple[Tensor, Tensor]:
    """Route as DeepSeek does: score experts independently, take the best of the best groups, normalize, scale."""
    wide = Parameter(router.name, router.n, router.k, _FP32, router.trainable)
    as_tensor(tape, router, _FP32)
    logits = linear(tape, to(tape, hidden, _FP32), wide)
    scores = from_result(tape, logits)
    chosen = tokens * a.experts_per_token
    indices = tape.new(chosen, _INT64)
    weights = gather(tape, scores, chosen, indices)
    weights = mul(tape, weights, shift(tape, mean(tape, weights, tokens)))
    return scale(tape, weights), indices


def _every_expert(tape: Tape, a: Architecture, hidden: Tensor, weights: ModelWeights, tokens: int) -> Tensor:
    """Run Llama4TextMoe: every token passes through all experts, with zeros for those it is not routed to."""
    tape.operation = "router"
    logits = linear(tape, hidden, weights["router"])
    kept = gather(tape, logits, logits.numel, tape.new(tokens * a.experts_per_token, _INT64))
    scores = to(tape, from_result(tape, to(tape, kept, _FP32)), hidden.width)
    tape.operation = "experts"
    states = mul(tape, repeat(tape, hidden, a.experts), scores)
    if weights.stack.expert_linears:
        out = _one_by_one(tape, a, states, weights)
        del states
    else:
        out = grouped_linear(tape, states, weights["experts.gate_up"], a.experts)
        del states
        gate, up = split(tape, out, [out.numel // 2] * 2)
        out = mul(tape, up, activation(tape, gate, a.activation))
        del gate, up
        out = grouped_linear(tape, out, weights["experts.down"], a.experts)
    shared = mlp(tape, a, hidden, weights, "shared.")
    return add(tape, shared, _sum_of_each(tape, out, tokens * a.hidden))


def _one_by_one(tape: Tape, a: Architecture, states: Tensor, weights: ModelWeights) -> Tensor:
    """Run experts that are linear modules, each on its part of the rows (Axolotl, monkeypatch/models/llama4)."""
    made = []
    for piece in slices(tape, states, [states.numel // a.experts] * a.experts):
        gate, up = (_of_one(tape, a, piece, weights, "experts.gate_up", 2) for _ in range(2))
        out = mul(tape, up, activation(tape, gate, a.activation))
        del gate, up
        made.append(_of_one(tape, a, out, weights, "experts.down", 1))
    return _copied(tape, made, states.numel)


def _of_one(tape: Tape, a: Architecture, x: Tensor, weights: ModelWeights, name: str, parts: int) -> Tensor:
    """Multiply by one expert's part of the matrix called ``name``, which has ``parts`` of them for each expert."""
    whole = weights[name]
    one = Parameter(name, whole.n // (parts * a.experts), whole.k, whole.width, whole.trainable)
    one.quantized = whole.quantized
    return linear_of(one, weights.stack)(tape, x, one)


def _gated(tape: Tape, a: Architecture, gate: Tensor, up: Tensor) -> Tensor:
    """Apply the activation and the product; gpt_oss clamps both parts and adds one to the second."""
    if not a.expert_bias:
        return mul(tape, activation(tape, gate, a.activation), up)
    gate, up = from_input(tape, gate), from_input(tape, up)
    glu = mul(tape, gate, from_result(tape, scale(tape, gate)))
    del gate
    return mul(tape, shift(tape, up), glu)


def _with_bias(tape: Tape, out: Tensor, bias: Parameter | None, indices: Tensor, experts: int) -> Tensor:
    """Add to each row the bias of its expert, in place."""
    if bias is None:
        return out
    rows = gather(tape, as_tensor(tape, bias, out.width), out.numel, indices)
    made = Tensor(tape, out.storage, out.numel, out.width, out.heads_first)
    tape.launch("elementwise", out.bytes + rows.bytes, out.bytes)
    return tape.derive(made, [out, rows], lambda grad: [grad, grad])


def _experts(
    tape: Tape, a: Architecture, hidden: Tensor, scores: Tensor, indices: Tensor, weights: ModelWeights, tokens: int
) -> Tensor:
    form, selected = weights.stack.experts, tokens * a.experts_per_token
    count, divided = a.experts // weights.stack.expert_parallel, weights.stack.expert_parallel > 1
    product = sliced_linear if form == "sliced" else grouped_linear
    tape.operation = "dispatch"
    sorted_ids, order = tape.new(selected, _INT64), tape.new(selected, _INT64)
    of_token = tape.new(selected, _INT64)
    states = gather(tape, hidden, selected * a.hidden, of_token)
    sample_weights = gather(tape, scores, selected, order)
    histogram = tape.new(selected, _FP32)
    if form == "padded":
        states = _placed(tape, states, count, count * tokens * a.hidden)
    elif form == "permuted":
        states = gather(tape, contiguous(tape, states), states.numel, of_token)
    elif divided and form != "fused":  # received rows are in the order of their ranks
        states = gather(tape, states, states.numel, of_token)
    tape.operation = "experts"
    out = product(tape, states, weights["experts.gate_up"], count)
    out = _with_bias(tape, out, weights.bias("experts.gate_up"), sorted_ids, count)
    gate, up = split(tape, out, [out.numel // 2] * 2)
    out = gated(tape, gate, up) if form == "fused" else _gated(tape, a, gate, up)
    del gate, up
    out = product(tape, out, weights["experts.down"], count)
    out = _with_bias(tape, out, weights.bias("experts.down"), sorted_ids, count)
    tape.operation = "dispatch"
    if form == "fused":
        del sorted_ids, histogram, indices
        return _summed(tape, out, sample_weights, of_token, tokens * a.hidden)
    if form == "padded":
        out = _placed(tape, out, count, selected * a.hidden)
    elif form == "permuted":
        out = contiguous(tape, out)
    elif divided:
        out = gather(tape, out, out.numel, of_token)
    weighted = _weighted(tape, out, sample_weights, wide=form == "permuted")
    back = tape.new(selected, _INT64)
    weighted = gather(tape, weighted, weighted.numel, back)
    del sorted_ids, histogram, indices
    return _sum_of_each(tape, weighted, tokens * a.hidden)


def _weighted(tape: Tape, out: Tensor, scores: Tensor, wide: bool) -> Tensor:
    """Multiply the rows of ``out`` by their scores; ``wide``: in fp32."""
    if not wide:
        return mul(tape, out, scores)
    return to(tape, mul(tape, to(tape, out, _FP32), to(tape, scores, _FP32)), out.width)


def _placed(tape: Tape, x: Tensor, experts: int, numel: int) -> Tensor:
    """Copy the rows of each expert into their place in zeros of ``numel`` elements."""
    rows = min(x.numel, numel) // experts
    return _copied(tape, slices(tape, x, [rows] * experts), numel)


def _copied(tape: Tape, pieces: list[Tensor], numel: int) -> Tensor:
    """Copy ``pieces`` into zeros of ``numel`` elements, one after another.

    In the backward pass each copy into a place copies the whole gradient (torch/csrc/autograd/functions/tensor.cpp,
    CopySlices).
    """
    out = tape.new(numel, pieces[0].width)
    tape.launch("copy", 0, out.bytes)
    for piece in pieces:
        tape.launch("copy", piece.bytes, piece.bytes)

    sizes = [piece.numel for piece in pieces]

    def apply(grad: Tensor) -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for size in sizes:
            grad = contiguous(tape, grad)
            part = tape.new(size, grad.width)
            tape.launch("copy", part.bytes, part.bytes)
            made.append(part)
        return made

    return tape.derive(out, pieces, apply)


def _sum_of_each(tape: Tape, x: Tensor, numel: int) -> Tensor:
    out = tape.new(numel, x.width)
    tape.launch("reduction", x.bytes, out.bytes)
    whole = x.numel

    def apply(grad: Tensor) -> list[Tensor | None]:
        seen = Tensor(tape, grad.storage, whole, grad.width)  # expanded, without allocating memory
        seen.base = grad
        return [seen]

    return tape.derive(out, [x], apply)


def _summed(tape: Tape, x: Tensor, scores: Tensor, index: Tensor, numel: int) -> Tensor:
    """Sum the rows of each token in one kernel; their ``scores`` were multiplied in before."""
    kept = tape.save_for(index, x)
    whole, of_scores = x.numel, (scores.numel, scores.width)
    out = tape.new(numel, x.width)
    tape.launch("reduction", x.bytes, out.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        rows = tape.new(whole, grad.width)
        tape.launch("copy", rows.bytes + kept.get().bytes, rows.bytes)
        return [rows, tape.new(*of_scores)]

    return tape.derive(out, [x, scores], apply)


def _expand_each(tape: Tape, weight: Parameter, experts: int, width: int) -> None:
    """Dequantize the experts' matrices one after another."""
    if weight.quantized != "none":
        one = Parameter(weight.name, weight.n // experts, weight.k, weight.width, False)
        one.quantized = weight.quantized
        for _ in range(experts):
            expand(tape, one, width)


def grouped_linear(tape: Tape, x: Tensor, weight: Parameter, experts: int) -> Tensor:
    """Multiply each expert's rows of ``x`` by its matrix; the weight gradient covers all experts."""
    n, k, width = weight.n // experts, weight.k, x.width
    rows = x.numel // k
    each = -(-rows // experts)
    wants_x = tape.wants(x)
    kept = tape.save(x) if tape.grad and weight.trainable else None
    if wants_x:
        tape.save(None)

    def multiply() -> list[Tensor]:
        made = tape.new(rows * n, width)
        tape.product(each, n, k, width, experts)
        return [made]

    _expand_each(tape, weight, experts, width)
    out = tape.result("grouped", multiply)[0]

    def apply(grad: Tensor) -> list[Tensor | None]:
        of_x = of_weight = None
        if wants_x:
            _expand_each(tape, weight, experts, width)
            of_x = tape.new(rows * k, width)
            tape.product(each, k, n, width, experts)
        if kept is not None:
            kept.get()
            of_weight = tape.new(weight.numel, width)
            tape.product(n, k, each, width, experts, transposed=True)
        return [of_x, of_weight]

    return tape.derive(out, [x, weight], apply)


def sliced_linear(tape: Tape, x: Tensor, weight: Parameter, experts: int) -> Tensor:
    """Multiply each expert's rows of ``x`` by its slice of the matrix, one product after another.

    The gradient of a slice is one of the whole matrix: zeros, into which it is copied, that are added up.
    """
    pieces = split(tape, x, [x.numel // experts] * experts)
    return cat(tape, [_slice_linear(tape, piece, weight, weight.n // experts) for piece in pieces])


def _slice_linear(tape: Tape, x: Tensor, weight: Parameter, n: int) -> Tensor:
    k, width, rows = weight.k, x.width, x.numel // weight.k
    wants_x = tape.wants(x)
    kept = tape.save(x) if tape.grad and weight.trainable else None
    if wants_x:
        tape.save(None)
    out = tape.new(rows * n, width)
    tape.product(rows, n, k, width)

    def apply(grad: Tensor) -> list[Tensor | None]:
        of_x = of_weight = None
        if wants_x:
            of_x = tape.new(rows * k, width)
            tape.product(rows, k, n, width)
        if kept is not None:
            kept.get()
            part = tape.new(n * k, width)
            tape.product(n, k, rows, width, transposed=True)
            of_weight = tape.new(weight.numel, width)
            tape.launch("copy", 0, of_weight.bytes)
            tape.launch("copy", part.bytes, part.bytes)
        return [of_x, of_weight]

    return tape.derive(out, [x, weight], apply)
