"""Fused kernels that some programs run instead of single operations (github.com/linkedin/Liger-Kernel, ops)."""

from __future__ import annotations

from trainwright.planning.operations.tape import Tape, Tensor


def turned(tape: Tape, x: Tensor) -> Tensor:
    """Apply rotary positions in the memory of ``x``; in the backward pass in that of the gradient."""
    tape.launch("elementwise", x.bytes, x.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        tape.launch("elementwise", grad.bytes, grad.bytes)
        return [grad.alias()]

    return tape.derive(x.view(), [x], apply)


def gated(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """Return an activation times ``up``; the gradients overwrite both inputs."""
    kept = [tape.save(x) for x in (gate, up)] if tape.wants(gate, up) else []
    out = tape.new(up.numel, up.width)
    tape.launch("elementwise", gate.bytes + up.bytes, out.bytes)

    def apply(grad: Tensor) -> list[Tensor | None]:
        found = [one.get().alias() for one in kept]
        tape.launch("elementwise", 3 * grad.bytes, 2 * grad.bytes)
        return [*found]

    return tape.derive(out, [gate, up], apply)
