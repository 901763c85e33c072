"""Elementary torch operations of models: what each allocates, saves, and computes in the backward pass.

Formulas of the backward pass are those of torch's derivatives.yaml and FunctionsManual.cpp, including temporaries.
Scalars are ignored. Callers track shapes; a tensor here has only a number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.planning.operations.tape import Parameter, Storage, Tape, Tensor


def _reduced(tape: Tape, grad: Tensor, numel: int, width: int) -> Tensor:
    """Return a gradient reduced and cast to a size and a dtype, as autograd does after broadcasting."""
    if numel != grad.numel:
        total = tape.new(numel, grad.width)
        tape.launch("reduction", grad.bytes, total.bytes)
        grad = total
    return grad if grad.width == width else tape.elementwise([grad], grad, width)


def view(tape: Tape, x: Tensor, numel: int | None = None) -> Tensor:
    """Return a view of the same memory; ``numel``: the size of a contiguous slice."""
    return tape.derive(x.view(numel), [x], lambda grad: [grad.view()])


def broadcast(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """Broadcast ``x`` to ``numel`` elements without allocating memory; gradients are summed."""
    own = x.numel

    def apply(grad: Tensor) -> list[Tensor | None]:
        total = tape.new(own, grad.width)
        tape.launch("reduction", grad.bytes, total.bytes)
        return [total]

    return tape.derive(x.view(numel), [x], apply)


def slices(tape: Tape, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return slices of ``x`` (x[..., a:b]); the gradient of each has the full size of ``x``."""
    whole = x.numel

    def apply(grad: Tensor) -> list[Tensor | None]:
        full = tape.new(whole, grad.width, heads_first=True)  # zeros, into which the gradient is copied
        tape.launch("copy", 0, full.bytes)
        tape.launch("copy", grad.bytes, grad.bytes)
        return [full]

    return [tape.derive(x.view(size), [x], apply) for size in sizes]


def split(tape: Tape, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split ``x`` at once (split, chunk); the gradients are concatenated."""
    parts = [x.view(size) for size in sizes]
    if tape.wants(x):
        whole = x.numel

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            made = [g for g in grads if g is not None]
            zeros = [tape.new(size, made[0].width) for size, g in zip(sizes, grads, strict=True) if g is None]
            full = tape.new(whole, made[0].width)
            tape.launch("copy", full.bytes, full.bytes)
            del zeros
            return [full]

        tape.record(parts, [x], apply)
    return parts


def cat(tape: Tape, parts: Sequence[Tensor], heads_first: bool = False) -> Tensor:
    """Concatenate tensors."""
    out = tape.new(sum(part.numel for part in parts), max(part.width for part in parts), heads_first)
    tape.launch("copy", out.bytes, out.bytes)
    sizes = [part.numel for part in parts]
    return tape.derive(out, parts, lambda grad: [grad.view(size) for size in sizes])


def contiguous(tape: Tape, x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return tape.derive(tape.elementwise([x], x), [x], lambda grad: [grad.alias()])


def to(tape: Tape, x: Tensor, width: int) -> Tensor:
    """Return ``x`` in another dtype, or ``x`` itself if it already has it."""
    before = x.width
    if before == width:
        return x
    out = tape.elementwise([x], x, width)
    return tape.derive(out, [x], lambda grad: [tape.elementwise([grad], grad, before)])


def as_tensor(tape: Tape, weight: Parameter, width: int) -> Tensor:
    """Return ``weight`` as a tensor in another dtype, or without a copy if it already has it."""
    copied = width != weight.width
    out = tape.new(weight.numel, width) if copied else Tensor(tape, Storage(0), weight.numel, width)
    tape.launch("elementwise", weight.bytes, out.bytes)
    return tape.derive(out, [weight], lambda grad: [to(tape, grad, weight.width)])


def add(tape: Tape, a: Tensor, b: Tensor | Parameter) -> Tensor:
    """Add two tensors, or a tensor and a parameter."""
    out = tape.elementwise([a, b], a, max(a.width, b.width))
    shapes = [(x.numel, x.width) for x in (a, b)]

    def apply(grad: Tensor) -> list[Tensor | None]:
        own = grad.numel, grad.width
        return [grad.alias() if shape == own else _reduced(tape, grad, *shape) for shape in shapes]

    return tape.derive(out, [a, b], apply)


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiply by, or add, a Python number; an addition needs less in the backward pass, but saves the same."""
    return tape.derive(tape.elementwise([x], x), [x], lambda grad: [tape.elementwise([grad], grad)])


def plus(tape: Tape, x: Tensor, other: int) -> Tensor:
    """Add a tensor of ``other`` bytes that takes no gradient, such as a mask."""
    out = tape.new(x.numel, x.width, x.heads_first)
    tape.launch("elementwise", x.bytes + other, out.bytes)
    return tape.derive(out, [x], lambda grad: [grad.alias()])


def shift(tape: Tape, x: Tensor) -> Tensor:
    """Add a Python number."""
    return plus(tape, x, 0)


def neg(tape: Tape, x: Tensor) -> Tensor:
    """Negate a tensor."""
    return scale(tape, x)


def mul(tape: Tape, a: Tensor, b: Tensor | Parameter) -> Tensor:
    """Multiply ``a`` by a tensor or parameter of the same size, or one that is broadcast."""
    wide = a if isinstance(b, Parameter) or a.numel >= b.numel else b
    kept_a = tape.save(a) if tape.wants(b) else None
    kept_b = tape.save(b if isinstance(b, Tensor) else None) if tape.wants(a) else None
    out = tape.new(wide.numel, max(a.width, b.width), a.heads_first)
    tape.launch("elementwise", a.bytes + b.bytes, out.bytes)
    shapes = [(x.numel, x.width) for x in (a, b)]
    weight = b if isinstance(b, Parameter) else None

    def apply(grad: Tensor) -> list[Tensor | None]:
        made: list[Tensor | None] = [None, None]
        if kept_b is not None:
            made[0] = tape.elementwise([grad, weight if weight is not None else kept_b.get()], grad)
        if kept_a is not None:
            made[1] = tape.elementwise([grad, kept_a.get()], grad)
        for index, shape in enumerate(shapes):
            whole = made[index]
            if whole is not None:
                made[index] = None
                made[index] = _reduced(tape, whole, *shape)
                del whole
        return made

    return tape.derive(out, [a, b], apply)


def square(tape: Tape, x: Tensor) -> Tensor:
    """Raise ``x`` to a constant power."""
    kept = tape.save_for(x)
    out = tape.elementwise([x], x)

    def apply(grad: Tensor) -> list[Tensor | None]:
        power = tape.elementwise([kept.get()], grad)
        times = tape.elementwise([power], grad)
        out = tape.elementwise([grad, times], grad)
        del power, times
        return [out]

    return tape.derive(out, [x], apply)


def mean(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """Return the means of ``rows`` rows."""
    out = tape.new(rows, x.width)
    tape.launch("reduction", x.bytes, out.bytes)
    numel, width = x.numel, x.width

    def apply(grad: Tensor) -> list[Tensor | None]:
        whole = tape.new(numel, width)
        tape.launch("elementwise", grad.bytes, whole.bytes)
        return [whole]

    return tape.derive(out, [x], apply)


def from_result(tape: Tape, x: Tensor, temporaries: int = 0) -> Tensor:
    """Apply a function whose derivative is computed from its result (tanh, sigmoid, rsqrt).

    ``temporaries``: number of temporary tensors in the backward pass.
    """
    out = tape.elementwise([x], x)
    kept = tape.save_for(out.alias(), x)

    def apply(grad: Tensor) -> list[Tensor | None]:
        result = kept.get()
        work = [tape.elementwise([result], grad) for _ in range(temporaries)]
        made = tape.elementwise([grad, result], grad)
        del work
        return [made]

    return tape.derive(out, [x], apply)


def from_input(tape: Tape, x: Tensor) -> Tensor:
    """Apply an activation whose derivative is one kernel on its input (silu, gelu, or each half of relu squared)."""
    kept = tape.save_for(x)
    out = tape.elementwise([x], x)
    return tape.derive(out, [x], lambda grad: [tape.elementwise([grad, kept.get()], grad)])


def dropout(tape: Tape, x: Tensor, probability: float, fused: bool) -> Tensor:
    """Apply dropout. ``fused``: one kernel with a mask of bytes, as on a GPU; else a mask in the dtype of ``x``."""
    if not probability:
        return x
    mask = tape.new(x.numel, 1 if fused else x.width, x.heads_first)
    if not fused:
        tape.launch("elementwise", 0, mask.bytes)
        tape.launch("elementwise", mask.bytes, mask.bytes)
    kept = tape.save_for(mask, x)
    out = tape.elementwise([x, mask], x)
    return tape.derive(out, [x], lambda grad: [tape.elementwise([grad, kept.get()], grad)])


def gather(tape: Tape, x: Tensor, numel: int, indices: Tensor) -> Tensor:
    """Gather ``numel`` elements of ``x`` at ``indices``; the gradient has the size of ``x``."""
    kept = tape.save_for(indices, x)
    out = tape.new(numel, x.width)
    tape.launch("copy", out.bytes + indices.bytes, out.bytes)
    whole = x.numel

    def apply(grad: Tensor) -> list[Tensor | None]:
        full = tape.new(whole, grad.width)
        tape.launch("copy", 0, full.bytes)
        tape.launch("copy", grad.bytes + kept.get().bytes, grad.bytes)
        return [full]

    return tape.derive(out, [x], apply)


def turned(tape: Tape, x: Tensor) -> Tensor:
    """Apply rotary positions in a fused kernel (github.com/linkedin/Liger-Kernel, ops), in the memory of ``x``.

    The backward pass runs in the memory of the gradient.
    """
    tape.launch("elementwise", x.bytes, x.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        tape.launch("elementwise", grad.bytes, grad.bytes)
        return [grad.alias()]

    return tape.derive(x.view(), [x], apply)


def gated(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Return an activation times ``up`` by a fused kernel; the gradients overwrite both inputs."""
    kept = [tape.save(x) for x in (gate, up)] if tape.wants(gate, up) else []
    out = tape.new(up.numel, up.width)
    tape.launch("elementwise", gate.bytes + up.bytes, out.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        found = [one.get().alias() for one in kept]
        tape.launch("elementwise", 3 * grad.bytes, 2 * grad.bytes)
        return [*found]

    return tape.derive(out, [gate, up], apply)
