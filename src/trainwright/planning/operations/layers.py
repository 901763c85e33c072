"""The modules of decoders as transformers implements them: projections, norms, rotary positions, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.operations.elementary import (
    add,
    as_tensor,
    cat,
    dropout,
    from_input,
    from_result,
    gated,
    mean,
    mul,
    neg,
    scale,
    shift,
    slices,
    split,
    square,
    to,
    view,
)
from trainwright.planning.operations.tape import Parameter, Storage, Tape, Tensor
from trainwright.planning.operations.weights import ModelWeights
from trainwright.planning.stack import Stack

_FP32 = 4


def linear(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """Multiply ``x`` [rows, k] by ``weight`` [n, k]; flattened to two dimensions, as torch does with three."""
    flat = view(tape, x)
    rows = x.numel // weight.k
    n, k, width = weight.n, weight.k, x.width
    saves_x, saves_weight = tape.grad and weight.trainable, tape.wants(x)
    if saves_x:
        factor = flat
        flat = tape.result("factor", lambda: [factor])[0]
    kept = tape.save(flat) if saves_x else None
    if saves_weight:
        tape.save(None)

    def multiply() -> list[Tensor]:
        made = tape.new(rows * n, width)
        tape.product(rows, n, k, width)
        return [made]

    out = tape.result("product", multiply)[0]
    if tape.wants(x, weight, *(() if bias is None else (bias,))):

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            of_x = of_weight = of_bias = None
            if kept is not None:
                of_weight = tape.new(n * k, width)
                tape.product(n, k, rows, width, transposed=True)
                kept.get()
            if saves_weight:
                of_x = tape.new(rows * k, width)
                tape.product(rows, k, n, width)
            if bias is not None and bias.trainable:
                of_bias = tape.new(n, width)
                tape.launch("reduction", grad.bytes, of_bias.bytes)
            return [of_x, of_weight, of_bias]

        tape.record([out], [flat, weight, bias], apply)
    del flat
    return view(tape, out)


def linear_of(weight: Parameter, stack: Stack) -> Callable[..., Tensor]:
    """Return the product with ``weight``, which is dequantized for it if it is quantized."""
    return linear if weight.quantized == "none" else partial(_expanded_linear, saves_x=stack.saves_inputs)


def project(tape: Tape, x: Tensor, weights: ModelWeights, name: str) -> Tensor:
    """Multiply ``x`` by the matrix called ``name``, and add the output of its adapter, if any (peft/tuners/lora)."""
    weight, adapter = weights[name], weights.adapter
    base = linear_of(weight, weights.stack)
    result = base(tape, x, weight, weights.bias(name))
    if adapter is None or f"{name}.lora_A" not in weights.parameters:
        return result
    narrow, wide = weights[f"{name}.lora_A"], weights[f"{name}.lora_B"]
    gpu = tape.device.is_gpu
    if adapter.kind == "lora":
        entering = to(tape, x, _FP32) if weights.stack.wide_adapters else x
        dropped = to(tape, dropout(tape, entering, adapter.dropout, gpu), x.width)
        del entering
        return add(tape, result, scale(tape, linear(tape, linear(tape, dropped, narrow), wide)))
    if adapter.dropout:
        x = dropout(tape, x, adapter.dropout, gpu)
        return add(tape, result, _dora(tape, x, base(tape, x, weight), weights, name))
    return add(tape, result, _dora(tape, x, result, weights, name))


def _dora(tape: Tape, x: Tensor, base: Tensor, weights: ModelWeights, name: str) -> Tensor:
    """Return DoRA's addition to the output of the frozen weight (Liu et al., arXiv 2402.09353), as PEFT computes it."""
    weight, narrow, wide = weights[name], weights[f"{name}.lora_A"], weights[f"{name}.lora_B"]
    # The product of the two matrices is computed from an identity; its graph exists until the call returns.
    product = linear(tape, linear(tape, tape.new(weight.k * weight.k, x.width), narrow), wide)
    with tape.no_grad():
        expanded = to(tape, expand(tape, weight, _FP32), x.width) if weight.quantized != "none" else None
        norms = mean(tape, add(tape, scale(tape, product), weight), weight.n)
    ratio = mul(tape, norms, weights[f"{name}.magnitude"])
    made = linear(tape, linear(tape, x, narrow), wide)
    result = add(tape, mul(tape, base, shift(tape, ratio)), scale(tape, mul(tape, made, ratio)))
    del expanded, product
    return result


def expand(tape: Tape, weight: Parameter, width: int) -> Tensor:
    """Dequantize a matrix (models/quantization.py), with its scales in fp32."""
    if weight.quantized == "int8":
        made = tape.new(weight.numel, width)
        tape.launch("elementwise", weight.numel, made.bytes)
        tape.launch("elementwise", made.bytes, made.bytes)
        return made
    count = weight.numel // 64
    scales = shifted = None
    if weight.quantized == "nf4":
        scales = tape.new(count, _FP32)
        tape.launch("expansion", count, scales.bytes)
        shifted = tape.new(count, _FP32)
        tape.launch("elementwise", scales.bytes, shifted.bytes)
    made = tape.new(weight.numel, width)
    tape.launch("expansion", weight.numel // 2 + _FP32 * count, made.bytes)
    del scales, shifted
    return made


def _expanded_linear(
    tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None, saves_x: bool = False
) -> Tensor:
    """Multiply ``x`` by a quantized matrix, which is dequantized for the product and again in the backward pass."""
    n, k, width = weight.n, weight.k, x.width
    rows = x.numel // k
    recorded = tape.wants(x)
    kept = tape.save(x) if recorded and saves_x else None
    if recorded:
        tape.save(None)
    matrix = expand(tape, weight, width)

    def multiply() -> list[Tensor]:
        made = tape.new(rows * n, width)
        tape.product(rows, n, k, width)
        return [made]

    out = tape.result("product", multiply)[0]
    del matrix

    def apply(grad: Tensor) -> list[Tensor | None]:
        matrix = expand(tape, weight, width)
        of_x = tape.new(rows * k, width)
        tape.product(rows, k, n, width)
        del matrix
        if kept is not None:
            kept.get()
        return [of_x]

    return tape.derive(out, [x], apply)


def rms_norm(tape: Tape, x: Tensor, weight: Parameter, rows: int, in_fp32: bool = False) -> Tensor:
    """Apply LlamaRMSNorm: normalize in fp32, cast to the dtype of ``x``, multiply by the weight.

    ``in_fp32``: Olmo2RMSNorm, which multiplies by the weight before the cast.
    """
    width = x.width
    x = to(tape, x, _FP32)
    variance = mean(tape, square(tape, x), rows)
    x = mul(tape, x, from_result(tape, shift(tape, variance), temporaries=2))
    return to(tape, mul(tape, x, weight), width) if in_fp32 else mul(tape, to(tape, x, width), weight)


def rms_norm_of_gemma(tape: Tape, x: Tensor, weight: Parameter, rows: int) -> Tensor:
    """Apply GemmaRMSNorm: multiply by one plus the weight, in fp32."""
    output = normalized(tape, to(tape, x, _FP32), rows)
    output = mul(tape, output, shift(tape, as_tensor(tape, weight, _FP32)))
    return to(tape, output, x.width)


def normalized(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """Divide each of ``rows`` rows by the root of its mean square."""
    return mul(tape, x, from_result(tape, shift(tape, mean(tape, square(tape, x), rows)), temporaries=2))


def layer_norm_of_cohere(tape: Tape, x: Tensor, weight: Parameter, rows: int) -> Tensor:
    """Apply CohereLayerNorm: in fp32, in single operations, without a bias."""
    width = x.width
    x = to(tape, x, _FP32)
    middle = mean(tape, x, rows)
    variance = mean(tape, square(tape, add(tape, x, middle)), rows)
    x = mul(tape, add(tape, x, middle), from_result(tape, shift(tape, variance), temporaries=2))
    x = mul(tape, x, as_tensor(tape, weight, _FP32))
    return to(tape, x, width)


def layer_norm(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | None, rows: int) -> Tensor:
    """Apply torch.nn.LayerNorm."""
    recorded = tape.wants(x, weight)
    kept = tape.save(x) if recorded else None
    if recorded:
        tape.save(None)
    out = tape.new(x.numel, x.width)
    middle, deviation = tape.new(rows, x.width), tape.new(rows, x.width)
    tape.launch("reduction", x.bytes, x.bytes)
    if kept is not None:
        statistics = tape.save(middle), tape.save(deviation)
        numel, width, wants_x = x.numel, x.width, x.node is not None

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            kept.get()
            for one in statistics:
                one.get()
            of_x = tape.new(numel, width) if wants_x else None
            of_weight = tape.new(weight.n, width) if weight.trainable else None
            of_bias = tape.new(weight.n, width) if bias is not None and bias.trainable else None
            tape.launch("reduction", 2 * grad.bytes, grad.bytes)
            return [of_x, of_weight, of_bias]

        tape.record([out], [x, weight, bias], apply)
    return out


def norm(tape: Tape, a: Architecture, x: Tensor, weights: ModelWeights, name: str, rows: int) -> Tensor:
    """Apply the norm of the family to ``rows`` rows."""
    weight = weights[name]
    if weights.stack.fused:
        return layer_norm(tape, x, weight, weights.bias(name), rows)
    if a.family == "cohere":
        return layer_norm_of_cohere(tape, x, weight, rows)
    if a.norm == "layer":
        return layer_norm(tape, x, weight, weights.bias(name), rows)
    if a.family.startswith("gemma") or a.family == "qwen3_next":
        return rms_norm_of_gemma(tape, x, weight, rows)
    return rms_norm(tape, x, weight, rows, in_fp32=a.post_norm)


def mlp(tape: Tape, a: Architecture, x: Tensor, weights: ModelWeights, prefix: str = "") -> Tensor:
    """Apply a plain MLP; ``prefix``: prefix of the names of its weights."""

    def through(x: Tensor, name: str) -> Tensor:
        tape.operation = name = f"{prefix}{name}"
        return project(tape, x, weights, name)

    def act(x: Tensor) -> Tensor:
        tape.operation = f"{prefix}activation"
        return from_input(tape, x) if weights.stack.fused else activation(tape, x, a.activation)

    def times(x: Tensor, y: Tensor) -> Tensor:
        tape.operation = f"{prefix}activation"
        return mul(tape, x, y)

    if a.gated and weights.stack.fused:
        if a.fused_gate_up:
            up = through(x, "gate_up")
            gate, up = split(tape, up, [up.numel // 2] * 2)
        else:
            gate, up = through(x, "gate"), through(x, "up")
        tape.operation = f"{prefix}activation"
        x = gated(tape, gate, up)
        del gate, up
        return through(x, "down")
    if a.fused_gate_up:
        up = through(x, "gate_up")
        gate, up = split(tape, up, [up.numel // 2] * 2)
        up = times(up, act(gate))
        return through(up, "down")
    if a.gated:
        return through(times(act(through(x, "gate")), through(x, "up")), "down")
    x = through(x, "up")
    x = act(x)
    return through(x, "down")


def activation(tape: Tape, x: Tensor, name: str) -> Tensor:
    """Apply an activation of transformers.activations.ACT2FN."""
    if name == "gelu_new":
        half = scale(tape, x)
        return mul(
            tape,
            half,
            shift(tape, from_result(tape, scale(tape, add(tape, x, scale(tape, square(tape, x)))))),
        )
    return from_result(tape, x) if name == "relu" else from_input(tape, x)


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """Apply softmax."""
    return from_result(tape, x)


def rotate_half(tape: Tape, x: Tensor) -> Tensor:
    """Rotate the halves of each head, as rotary positions do."""
    first, second = slices(tape, x, [x.numel // 2, x.numel // 2])
    return cat(tape, [neg(tape, second), first], heads_first=True)


def rotate(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply apply_rotary_pos_emb to queries or keys."""
    return add(tape, mul(tape, x, cos), mul(tape, rotate_half(tape, x), sin))


def rotate_pairs(tape: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of ``x`` by tables of half its width, as gpt_oss and DeepSeek do."""
    first, second = split(tape, x, [x.numel // 2] * 2)
    left = add(tape, mul(tape, first, cos), mul(tape, second, sin))
    right = add(tape, mul(tape, second, cos), mul(tape, first, sin))
    return cat(tape, [left, right], heads_first=True)


def embedding(tape: Tape, weight: Parameter, tokens: int, of_head: bool = False) -> Tensor:
    """Look up rows of ``weight`` [V, H]; the gradient has the size of ``weight``.

    ``of_head``: the gradient is that of the head, to which the rows are added.
    """
    out = tape.new(tokens * weight.k, weight.width)
    tape.launch("copy", out.bytes, out.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        if of_head:
            whole = Tensor(tape, Storage(0), weight.numel, weight.width)
        else:
            whole = tape.new(weight.numel, weight.width)
            tape.launch("copy", 0, whole.bytes)
        tape.launch("copy", 2 * grad.bytes, grad.bytes)
        return [whole]

    return tape.derive(out, [weight], apply)
