"""Elementary torch operations of models: what each allocates, saves, and computes in the backward pass.

Formulas of the backward pass are those of torch's derivatives.yaml and FunctionsManual.cpp, including temporaries.
Scalars are ignored. Callers track shapes; a tensor here has only a number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.planning.operations.tape import Parameter, Storage, Tape, Tensor


def _elementwise(tape: Tape, inputs: Sequence[Tensor | Parameter], like: Tensor, width: int | None = None) -> Tensor:
    out = tape.new(like.numel, like.width if width is None else width, like.heads_first)
    tape.launch("elementwise", sum(value.bytes for value in inputs), out.bytes)
    return out


def _reduced(tape: Tape, grad: Tensor, like: Tensor | Parameter) -> Tensor:
    """Return a gradient reduced and cast to the size and dtype of ``like``, as autograd does after broadcasting."""
    if like.numel != grad.numel:
        total = tape.new(like.numel, grad.width)
        tape.launch("reduction", grad.bytes, total.bytes)
        grad = total
    return _cast(tape, grad, like.width)


def _cast(tape: Tape, x: Tensor, width: int) -> Tensor:
    return x if x.width == width else _elementwise(tape, [x], x, width)


class _ShapeOf:
    """The size and width of a tensor that is not kept."""

    __slots__ = ("bytes", "numel", "width")

    def __init__(self, value: Tensor | Parameter) -> None:
        self.numel = value.numel
        self.width = value.width
        self.bytes = value.bytes


def view(tape: Tape, x: Tensor, numel: int | None = None) -> Tensor:
    """Return a view of the same memory; ``numel``: the size of a contiguous slice."""
    out = Tensor(tape, x.storage, x.numel if numel is None else numel, x.width, x.heads_first)
    out.base = x
    if tape.wants(x):

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            seen = grad.alias()
            seen.base = grad
            return [seen]

        tape.record([out], [x], apply)
    return out


def broadcast(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """Broadcast ``x`` to ``numel`` elements without allocating memory; gradients are summed."""
    seen = Tensor(tape, x.storage, numel, x.width, x.heads_first)
    seen.base = x
    if tape.wants(x):
        own = x.numel

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            total = tape.new(own, grad.width)
            tape.launch("reduction", grad.bytes, total.bytes)
            return [total]

        tape.record([seen], [x], apply)
    return seen


def slices(tape: Tape, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return slices of ``x`` (x[..., a:b]); the gradient of each has the full size of ``x``."""
    return [_slice(tape, x, size) for size in sizes]


def _slice(tape: Tape, x: Tensor, numel: int) -> Tensor:
    out = Tensor(tape, x.storage, numel, x.width, x.heads_first)
    out.base = x
    if tape.wants(x):
        whole = x.numel

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            full = tape.new(whole, grad.width, heads_first=True)  # zeros, into which the gradient is copied
            tape.launch("copy", 0, full.bytes)
            tape.launch("copy", grad.bytes, grad.bytes)
            return [full]

        tape.record([out], [x], apply)
    return out


def split(tape: Tape, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split ``x`` at once (split, chunk); the gradients are concatenated."""
    parts = [Tensor(tape, x.storage, size, x.width, x.heads_first) for size in sizes]
    for part in parts:
        part.base = x
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
    if tape.wants(*parts):
        sizes = [part.numel for part in parts]

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            found: list[Tensor | None] = []
            for size in sizes:
                part = Tensor(tape, grad.storage, size, grad.width, grad.heads_first)
                part.base = grad
                found.append(part)
            return found

        tape.record([out], parts, apply)
    return out


def contiguous(tape: Tape, x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    out = _elementwise(tape, [x], x)
    if tape.wants(x):
        tape.record([out], [x], lambda grads: [grads[0].alias()] if grads[0] is not None else [None])
    return out


def to(tape: Tape, x: Tensor, width: int) -> Tensor:
    """Return ``x`` in another dtype, or ``x`` itself if it already has it."""
    if x.width == width:
        return x
    out = _elementwise(tape, [x], x, width)
    if tape.wants(x):
        before = x.width

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            return [_elementwise(tape, [grad], grad, before)]

        tape.record([out], [x], apply)
    return out


def as_tensor(tape: Tape, weight: Parameter, width: int) -> Tensor:
    """Return ``weight`` as a tensor in another dtype, or without a copy if it already has it."""
    copied = width != weight.width
    out = tape.new(weight.numel, width) if copied else Tensor(tape, Storage(0), weight.numel, width)
    tape.launch("elementwise", weight.bytes, out.bytes)
    if tape.wants(weight):
        tape.record([out], [weight], lambda grads: [None if grads[0] is None else to(tape, grads[0], weight.width)])
    return out


def add(tape: Tape, a: Tensor, b: Tensor | Parameter) -> Tensor:
    """Add two tensors, or a tensor and a parameter."""
    out = _elementwise(tape, [a, b], a, max(a.width, b.width))
    if tape.wants(a, b):
        likes = _ShapeOf(a), _ShapeOf(b)

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            return [_fit(tape, grad, like) for like in likes]

        tape.record([out], [a, b], apply)
    return out


def _fit(tape: Tape, grad: Tensor, like: _ShapeOf) -> Tensor:
    if like.numel == grad.numel and like.width == grad.width:
        return grad.alias()
    return _reduced(tape, grad, like)  # type: ignore[arg-type]


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiply by, or add, a Python number; an addition needs less in the backward pass, but saves the same."""
    out = _elementwise(tape, [x], x)
    if tape.wants(x):

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            return [_elementwise(tape, [grad], grad)]

        tape.record([out], [x], apply)
    return out


def plus(tape: Tape, x: Tensor, other: int) -> Tensor:
    """Add a tensor of ``other`` bytes that takes no gradient, such as a mask."""
    out = tape.new(x.numel, x.width, x.heads_first)
    tape.launch("elementwise", x.bytes + other, out.bytes)
    if tape.wants(x):
        tape.record([out], [x], lambda grads: [grads[0].alias() if grads[0] is not None else None])
    return out


def shift(tape: Tape, x: Tensor) -> Tensor:
    """Add a Python number."""
    return plus(tape, x, 0)


def neg(tape: Tape, x: Tensor) -> Tensor:
    """Negate a tensor."""
    return scale(tape, x)


def mul(tape: Tape, a: Tensor, b: Tensor | Parameter) -> Tensor:
    """Multiply ``a`` by a tensor or parameter of the same size, or one that is broadcast."""
    wide = a if isinstance(b, Parameter) or a.numel >= b.numel else b
    saves_a, saves_b = tape.wants(b), tape.wants(a)
    kept_a = tape.save(a) if saves_a else None
    kept_b = tape.save(b if isinstance(b, Tensor) else None) if saves_b else None
    out = tape.new(wide.numel, max(a.width, b.width), a.heads_first)
    tape.launch("elementwise", a.bytes + b.bytes, out.bytes)
    if saves_a or saves_b:
        likes = _ShapeOf(a), _ShapeOf(b)
        weight = b if isinstance(b, Parameter) else None

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            made: list[Tensor | None] = [None, None]
            if kept_b is not None:
                made[0] = _elementwise(tape, [grad, weight if weight is not None else kept_b.get()], grad)
            if kept_a is not None:
                made[1] = _elementwise(tape, [grad, kept_a.get()], grad)
            for index, like in enumerate(likes):
                whole = made[index]
                if whole is not None:
                    made[index] = None
                    made[index] = _reduced(tape, whole, like)  # type: ignore[arg-type]
                    del whole
            return made

        tape.record([out], [a, b], apply)
    return out


def square(tape: Tape, x: Tensor) -> Tensor:
    """Raise ``x`` to a constant power."""
    kept = tape.save(x) if tape.wants(x) else None
    out = _elementwise(tape, [x], x)
    if kept is not None:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            power = _elementwise(tape, [kept.get()], grad)
            times = _elementwise(tape, [power], grad)
            out = _elementwise(tape, [grad, times], grad)
            del power, times
            return [out]

        tape.record([out], [x], apply)
    return out


def mean(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """Return the means of ``rows`` rows."""
    out = tape.new(rows, x.width)
    tape.launch("reduction", x.bytes, out.bytes)
    if tape.wants(x):
        like = _ShapeOf(x)

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            whole = tape.new(like.numel, like.width)
            tape.launch("elementwise", grad.bytes, whole.bytes)
            return [whole]

        tape.record([out], [x], apply)
    return out


def from_result(tape: Tape, x: Tensor, temporaries: int = 0) -> Tensor:
    """Apply a function whose derivative is computed from its result (tanh, sigmoid, rsqrt).

    ``temporaries``: number of temporary tensors in the backward pass.
    """
    out = _elementwise(tape, [x], x)
    if tape.wants(x):
        kept = tape.save(out.alias())

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            result = kept.get()
            work = [_elementwise(tape, [result], grad) for _ in range(temporaries)]
            made = _elementwise(tape, [grad, result], grad)
            del work
            return [made]

        tape.record([out], [x], apply)
    return out


def from_input(tape: Tape, x: Tensor) -> Tensor:
    """Apply an activation whose derivative is one kernel on its input (silu, gelu, or each half of relu squared)."""
    kept = tape.save(x) if tape.wants(x) else None
    out = _elementwise(tape, [x], x)
    if kept is not None:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            return [_elementwise(tape, [grad, kept.get()], grad)]

        tape.record([out], [x], apply)
    return out


def dropout(tape: Tape, x: Tensor, probability: float, fused: bool) -> Tensor:
    """Apply dropout. ``fused``: one kernel with a mask of bytes, as on a GPU; else a mask in the dtype of ``x``."""
    if not probability:
        return x
    mask = tape.new(x.numel, 1 if fused else x.width, x.heads_first)
    if not fused:
        tape.launch("elementwise", 0, mask.bytes)
        tape.launch("elementwise", mask.bytes, mask.bytes)
    kept = tape.save(mask) if tape.wants(x) else None
    out = _elementwise(tape, [x, mask], x)
    if kept is not None:

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            return [_elementwise(tape, [grad, kept.get()], grad)]

        tape.record([out], [x], apply)
    return out


def gather(tape: Tape, x: Tensor, numel: int, indices: Tensor) -> Tensor:
    """Gather ``numel`` elements of ``x`` at ``indices``; the gradient has the size of ``x``."""
    kept = tape.save(indices) if tape.wants(x) else None
    out = tape.new(numel, x.width)
    tape.launch("copy", out.bytes + indices.bytes, out.bytes)
    if kept is not None:
        whole = x.numel

        def apply(grads: list[Tensor | None]) -> list[Tensor | None]:
            grad = grads[0]
            assert grad is not None
            full = tape.new(whole, grad.width)
            tape.launch("copy", 0, full.bytes)
            tape.launch("copy", grad.bytes + kept.get().bytes, grad.bytes)
            return [full]

        tape.record([out], [x], apply)
    return out
