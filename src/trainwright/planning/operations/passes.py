"""Passes over parts of a model: the activations they save, their working memory, and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

from trainwright.machine.describe import Cluster
from trainwright.planning.architectures import traced
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.derived import AdapterShape, Quantization
from trainwright.planning.operations.block import Block
from trainwright.planning.operations.devices import device_of
from trainwright.planning.operations.ends import begin, finish
from trainwright.planning.operations.launches import Kernel, excess_when_pinned
from trainwright.planning.operations.shapes import BatchShape, BlockKind, Device
from trainwright.planning.operations.tape import ALTERNATE, Parameter, Tape, Tensor
from trainwright.planning.operations.weights import block_weights, end_weights
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.workload import Choice, Workload

# "compiled": what a compiler saves without requested recomputation.
Recompute = Literal["none", "full", "selective", "compiled"]
_RESULTS = frozenset({"product", "attention", "grouped"})
# A compiler recomputes everything between two products, as that costs no memory traffic, except for the inputs of
# products in the backward pass (torch/_functorch/config.py: ban_recompute_materialized_backward).
_KEPT: dict[Recompute, frozenset[str]] = {
    "full": frozenset(),
    "selective": _RESULTS,
    "compiled": _RESULTS | {"factor"},
}
_EVERY_SECOND = frozenset({ALTERNATE, "product", "attention"})


@dataclass(frozen=True)
class Moment:
    """The moment when a gradient is ready.

    ``peak``: most bytes since the previous moment; ``live``: bytes at this one. Both exclude gradients of parameters
    and bytes that existed before the part's forward pass.
    """

    name: str
    numel: int
    peak: int
    live: int


@dataclass(frozen=True, eq=False)
class Pass:
    """The forward and backward pass of a part of a model. Bytes are of activations, not of parameters and gradients.

    ``forward_peak``: most bytes in the forward pass, including the part's input. ``kept``: bytes saved for the backward
    pass, without the output. ``keeps_input``: whether they include the input. ``output``: its bytes. ``moments``: one
    per gradient, in order. ``backward_peak``: most bytes in the backward pass, including the saved bytes and the
    incoming gradient. ``evaluation_peak``: most bytes in a forward-only pass. ``gradients``: number of gradient
    elements of the parameters. ``held``: bytes that stay until the end of the model's forward pass; ``holds_output``:
    they include the output, unless something keeps it longer. ``left``: bytes of the recomputed activations that stay
    when the backward pass is over. ``excess``: bytes by which pinned copies of the saved tensors exceed them.
    ``forward``, ``backward``: the kernels; recomputation counts as backward.
    """

    forward_peak: int
    kept: int
    keeps_input: bool
    output: int
    moments: tuple[Moment, ...]
    backward_peak: int
    evaluation_peak: int
    held: int
    holds_output: bool
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    left: int = 0
    excess: int = 0

    @cached_property
    def gradients(self) -> int:
        """The number of elements of all gradients."""
        return sum(moment.numel for moment in self.moments)


@dataclass(frozen=True)
class PassSettings:
    """The settings of passes.

    ``width``: bytes per element of activations and weights. ``trainable``: whether the model's own weights are trained;
    with an ``adapter`` they are not. ``quantization``: of the base model. ``stack``: the program that runs it.
    ``hooked``: the strategy has hooks on every module.
    """

    architecture: Architecture
    batch: BatchShape
    device: Device
    width: int
    trainable: bool = True
    adapter: AdapterShape | None = None
    quantization: Quantization = "none"
    stack: Stack = OWN
    hooked: bool = False

    @classmethod
    def of(
        cls, workload: Workload, choice: Choice, batch: BatchShape, cluster: Cluster, stack: Stack = OWN
    ) -> PassSettings:
        """Return the settings of the passes of ``workload`` with ``choice`` over ``batch`` on ``cluster``."""
        return cls(
            architecture=workload.architecture,
            batch=batch,
            device=device_of(workload, choice, cluster),
            width=choice.width,
            trainable=workload.adapter is None,
            adapter=workload.adapter,
            quantization=workload.quantization,
            stack=stack,
            hooked=choice.spec.hooks_modules,
        )

    @property
    def joins_gradients(self) -> bool:
        """Whether a tied embedding's gradient is added to the head's in place: models/losses/tied_embedding."""
        exact = self.width == 4 and not self.device.is_gpu and not self.hooked
        return self.architecture.tied and self.trainable and exact and self.stack == OWN


@lru_cache(maxsize=512)
def block_pass(setting: PassSettings, kind: BlockKind, recompute: Recompute, input_wants: bool = True) -> Pass:
    """Return the pass of a block. ``input_wants``: whether a gradient is passed to the part before it.

    For a traced family the memory is that of its first block, and the kernels are those of a llama of its sizes.
    """
    made = _written_block(setting, kind, recompute, input_wants)
    a = setting.architecture
    if not a.config or setting.adapter is not None:
        return made
    try:
        found = traced.numbers(a.config, recompute, setting.width, setting.batch, input_wants)
    except traced.TraceError:
        return made
    moments = tuple(Moment(*moment) for moment in found.pop("moments"))
    return replace(made, moments=moments, **found)


def _written_block(setting: PassSettings, kind: BlockKind, recompute: Recompute, input_wants: bool) -> Pass:
    a, batch = setting.architecture, setting.batch

    def prepare(tape: Tape) -> Callable[[Tensor], Tensor]:
        trainable, adapter, quantization = setting.trainable, setting.adapter, setting.quantization
        weights = block_weights(a, kind, setting.width, trainable, adapter, quantization, setting.stack)
        tables = [tape.new(0, setting.width) for _ in range(2)]
        for table in tables:
            table.numel = int(a.head_dim * a.rotary) * batch.tokens
            table.width = 4 if a.post_norm else setting.width
        block = Block(tape, a, kind, batch, setting.device, weights, *tables)
        if recompute == "none" or not tape.grad:
            return block
        keep = _KEPT[recompute]
        if setting.stack.alternates and recompute == "selective":
            keep = _EVERY_SECOND
        return lambda hidden: tape.checkpoint(partial(block, hidden), keep)

    return _run(setting, prepare, input_wants)


@lru_cache(maxsize=512)
def head_pass(setting: PassSettings) -> Pass:
    """Return the pass of the final norm, the head and the loss."""

    def prepare(tape: Tape) -> Callable[[Tensor], Tensor]:
        weights = end_weights(setting.architecture, setting.width, setting.trainable)
        return lambda hidden: finish(tape, setting.architecture, hidden, weights, setting.batch, setting.stack)

    return _run(setting, prepare, input_wants=True)


@lru_cache(maxsize=512)
def embedding_pass(setting: PassSettings) -> Pass:
    """Return the pass of everything before the blocks; saved bytes include the rotary tables."""
    a, batch = setting.architecture, setting.batch
    tape = Tape(setting.device)
    weights = end_weights(a, setting.width, setting.trainable)
    beginning = begin(tape, a, weights, batch, setting.device, setting.joins_gradients)
    forward, peak = tuple(tape.kernels), tape.peak
    hidden, whole = beginning.hidden, tape.live
    holds_output = any(one.storage is hidden.storage for one in beginning.held)
    beginning.held.clear()
    held = whole - tape.live
    tables = [beginning.cos, beginning.sin]
    del beginning
    output = hidden.bytes
    kept = tape.live - output
    moments: tuple[Moment, ...] = ()
    outputs = [hidden]
    del hidden
    if outputs[0].node is not None:
        moments = _backward(tape, outputs)
    del tables
    return Pass(
        forward_peak=peak,
        kept=kept,
        keeps_input=False,
        output=output,
        moments=moments,
        backward_peak=tape.peak,
        evaluation_peak=peak,
        held=held,
        holds_output=holds_output,
        forward=forward,
        backward=tuple(tape.kernels[len(forward) :]),
    )


def _run(setting: PassSettings, prepare: Callable[[Tape], Callable[[Tensor], Tensor]], input_wants: bool) -> Pass:
    numel = setting.batch.tokens * setting.architecture.hidden
    evaluation = Tape(setting.device)
    with evaluation.no_grad():
        prepare(evaluation)(evaluation.new(numel, setting.width))
    tape = Tape(setting.device)
    part = prepare(tape)
    hidden = tape.new(numel, setting.width)
    storage = hidden.storage
    if input_wants:
        tape.leaf(hidden)
    inputs = [hidden]
    del hidden
    output = [part(inputs.pop())]
    del part
    forward, forward_peak = tuple(tape.kernels), tape.peak
    size, keeps_input = output[0].bytes, storage.handles > 0
    kept = tape.live - size
    excess = max(0, sum(excess_when_pinned(one.bytes) for one in tape.storages) - excess_when_pinned(size))
    tape.peak = tape.live
    moments: tuple[Moment, ...] = ()
    if output[0].node is not None:
        moments = _backward(tape, output)
    return Pass(
        forward_peak=forward_peak,
        kept=kept,
        excess=excess,
        keeps_input=keeps_input,
        output=size,
        moments=moments,
        backward_peak=tape.peak,
        evaluation_peak=evaluation.peak,
        held=0,
        holds_output=False,
        forward=forward,
        backward=tuple(tape.kernels[len(forward) :]),
        left=sum({id(one.storage): one.storage.bytes for one in tape.left}.values()),
    )


def _backward(tape: Tape, output: list[Tensor]) -> tuple[Moment, ...]:
    """Run the backward pass of the only tensor in ``output``, which is released, and return the moments.

    Afterwards ``tape.peak`` is the peak since the last gradient.
    """
    moments: list[Moment] = []

    def receive(parameter: Parameter, grad: Tensor) -> None:
        live = tape.live - min(grad.bytes, grad.storage.bytes)
        moments.append(Moment(parameter.name, parameter.numel, tape.peak, live))
        tape.peak = live

    tape.receive = receive
    tape.peak = tape.live
    incoming = [tape.new(output[0].numel, output[0].width)]
    tape.backward(output.pop(), incoming.pop())
    return tuple(moments)
