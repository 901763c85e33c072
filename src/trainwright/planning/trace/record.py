"""Record what operations on tensors without data allocate and compute, unit by unit.

Bytes are those of storages on the device: views share theirs; freed and resized ones count less.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from trainwright.models.attention.plain import backward_from, flash_forward
from trainwright.parallel.constants import BF16_FROM_LENGTH
from trainwright.planning.trace.units import FUSED, OperationKind
from trainwright.planning.trace.values import compute_result, list_operands

Direction = Literal["forward", "backward", "evaluation"]
EMBEDDING = -1  # the unit before block 0; the head is the number of blocks


class MemoryEvent(NamedTuple):
    """A change of the live bytes. ``kind``: "gradient" if they are those of the ready gradient ``of``."""

    kind: Literal["allocated", "released", "gradient"]
    size: int
    of: str = ""


class Done(NamedTuple):
    """An operation of a trace. ``scope``: the loops of the loss that it is in. Others are as in ``units.Operation``."""

    kind: OperationKind
    name: str
    scope: str
    width: float
    generation: int
    sizes: tuple[int, ...]  # m, n, k, times, flops, read, written


@dataclass
class Segment:
    """What happened in one pass over one unit."""

    unit: int
    direction: Direction
    events: list[MemoryEvent] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    remaining: dict[int, int] = field(default_factory=dict)  # bytes of what was allocated and not released


class TooManyError(Exception):
    """More operations were recorded than wanted."""


class Recorder(TorchDispatchMode):
    """Record all operations by segment. To be entered inside a FakeTensorMode.

    ``names``: of each parameter, within its unit. ``workspace``: returns the bytes that an operation allocates beside
    its results while it runs, and releases (below 0), each a multiple of one of ``BASIS``. ``most``: operations, before
    it raises TooManyError.
    """

    def __init__(
        self,
        module: nn.Module,
        names: dict[nn.Parameter, str],
        workspace: Callable[..., tuple[int, ...]],
        most: int | None,
    ) -> None:
        super().__init__()
        self.segments: list[Segment] = []
        self.used: dict[int, nn.Parameter] = {}  # parameters that an operation before the blocks read
        self._workspace = workspace
        self._left = most
        self._names = names
        self._scope = ""
        self._next: Segment | None = None
        existing = (tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers()))
        self._storages = Storages(self._released, existing)
        self._shapes = {p.shape for p in names if p.requires_grad and p.dim() > 1}
        self._of_backward: set[int] = set()  # storages that the backward pass allocated
        self._parameters = {id(parameter.untyped_storage()): parameter for parameter in names}

    def begin(self, unit: int, direction: Direction) -> None:
        """Begin the pass over a unit."""
        self.segments.append(Segment(unit, direction))

    def change(self, size: int) -> None:
        """Note bytes that no operation shows: allocated ones, or released ones below 0."""
        if size:
            self.segments[-1].events.append(MemoryEvent("allocated" if size > 0 else "released", abs(size)))

    def begin_later(self, unit: int, direction: Direction) -> None:
        """Begin the pass over a unit at the next operation, when the output of the one before replaced its input."""
        self._next = Segment(unit, direction)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Note the operations inside as those of an iteration of a loop."""
        before, self._scope = self._scope, f"{self._scope}{name}"
        try:
            yield
        finally:
            self._scope = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        inputs = list_operands(args, kwargs)
        if self._is_gradient_addition(func, args) or self._is_zero_fill(func, args):
            out = args[0]
        elif (of_ours := _OF_OURS.get(func)) is not None:
            out = self._inside(of_ours, args)
        else:
            out = compute_result(func, args, kwargs, inputs)
        if self._next is not None:
            self.segments.append(self._next)
            self._next = None
        segment, results = self.segments[-1], list_operands((out,), {})
        for tensor in results:
            self._note(tensor.untyped_storage(), segment)
        if func.is_view or not results:
            return out
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise TooManyError
        parameters = [p for x in inputs if (p := self._parameters.get(id(x.untyped_storage()))) is not None]
        if segment.unit == EMBEDDING:
            self.used |= {id(parameter): parameter for parameter in parameters}
        name = self._names[parameters[0]] if parameters else ""
        segment.done.append(_describe_operation(func, args, kwargs, inputs, results, name, self._scope))
        extra = self._workspace(func, args, kwargs)
        segment.events += (MemoryEvent("allocated" if size > 0 else "released", abs(size)) for size in extra if size)
        return out

    def _inside(self, of_ours: Callable[..., Any], args: Any) -> Any:
        """Run the code of an operator of ours, which stands for its operations, to note what these return.

        Their workspaces, of sequences of any length, are small beside that, and no polynomials of a batch. Results of
        a sequence live until the next one's do: those of the longest two, which are the last of a traced pack, at most.
        """
        done_count, workspace = len(self.segments[-1].done), self._workspace
        *tensors, edges, scale = args
        self._workspace = lambda *_: ()
        try:
            with self:
                out = of_ours(*tensors, edges[-3:], scale)
        finally:
            self._workspace = workspace
        del self.segments[-1].done[done_count:]
        return out

    def _is_gradient_addition(self, func: Any, args: Any) -> bool:
        """Return whether autograd adds gradients of one tensor: into the first one, if it is a tensor with data."""
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or not self.segments:
            return False
        first, second = args[:2]
        if self.segments[-1].direction != "backward" or first.shape in self._shapes:
            return self.segments[-1].direction == "backward"
        if not isinstance(second, torch.Tensor) or (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        storage = first.untyped_storage()
        return id(storage) in self._of_backward and storage.nbytes() == first.numel() * first.element_size()

    def _is_zero_fill(self, func: Any, args: Any) -> bool:
        """Return whether a formula of autograd writes into zeros that it made: with fake tensors it makes a copy
        (areAnyTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp).
        """
        if func not in _FILLS or torch.is_grad_enabled() or not self.segments:
            return False
        return self.segments[-1].direction == "backward" and id(args[0].untyped_storage()) in self._of_backward

    def _note(self, storage: Any, segment: Segment) -> None:
        if size := self._storages.follow(storage):
            segment.events.append(MemoryEvent("allocated", size))
            segment.remaining[id(storage)] = size
            if segment.direction == "backward":
                self._of_backward.add(id(storage))

    def _released(self, key: int, size: int) -> None:
        self._of_backward.discard(key)
        self.segments[-1].remaining.pop(key, None)
        self.segments[-1].events.append(MemoryEvent("released", size))

    def gradient(self, parameter: torch.Tensor) -> None:
        """Note that a parameter's gradient is ready; from now on it is not counted."""
        assert parameter.grad is not None and isinstance(parameter, nn.Parameter)
        size = self._storages.forget(parameter.grad.untyped_storage())
        self.segments[-1].events.append(MemoryEvent("gradient", size, self._names[parameter]))


_FILLS = {
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.index_add.default,
    torch.ops.aten._unsafe_index_put.default,
}
# Operators whose code is made of operations of torch.
_OF_OURS: dict[Any, Callable[..., Any]] = {
    torch.ops.trainwright.packed_flash_cpu.default: flash_forward,
    # As with AMX; without it, the sequences of what is traced are short (``Regime.long``).
    torch.ops.trainwright.packed_flash_cpu_backward.default: partial(backward_from, BF16_FROM_LENGTH),
}
# Operations in blocks (models/fused/blocked.py) take as long as elementwise ones of so many times their bytes, as they
# are limited by the processor and not by its memory: measured.
_PASSES = {"blocked_norm": 5, "blocked_rotary": 4}
_REDUCTIONS = {"softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "cumsum", "topk", "sort"}
_COPIES = {
    *("copy_", "clone", "_to_copy", "cat", "stack", "index_select", "embedding", "index", "gather", "slice_scatter"),
    *("constant_pad_nd", "select_scatter", "index_put", "index_put_", "repeat", "embedding_dense_backward"),
}


def _describe_operation(
    func: Any, args: Any, kwargs: Any, inputs: list[Any], results: list[Any], name: str, scope: str
) -> Done:
    packet = func.overloadpacket
    operator = packet.__name__
    plain_operator = operator.lstrip("_").removesuffix("_backward").removesuffix("_backward_data")
    width: float = results[0].element_size()
    generation = 2
    read = sum(x.numel() * x.element_size() for x in inputs)
    written = sum(x.numel() * x.element_size() for x in results)
    if func.namespace == "trainwright":  # it returns what is new, and may write what it reads
        name = FUSED
        read, written = (size * _PASSES.get(operator.removesuffix("_backward"), 1) for size in (read, written))
        changed_tensors = (x for x, of in zip(args, func._schema.arguments, strict=False) if of.is_write)
        written += sum(x.numel() * x.element_size() for x in changed_tensors)
    m = n = k = times = flops = 0
    kind: OperationKind = "elementwise"
    if "attention" in operator or "attn" in operator or "flash" in operator:
        kind, flops = "attention", _count_attention_flops(operator, args, kwargs)
        generation = 3 if "flash_attn_3" in str(packet) else 2
    elif operator in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm_v2", "block_product"):
        kind, (a, b) = "product", args[1:3] if "add" in operator else args[:2]
        width = b.element_size()  # of a sum in fp32, the result is wider
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        if b.dtype == torch.uint8:  # two numbers of 4 bits in a byte
            width, k = width / 2, 2 * k
        times = a.shape[0] if a.dim() == 3 else 1
        flops = 2 * m * n * k * times
    elif "grouped_mm" in operator:
        kind, name = "product", name or "experts"
        times, m, n, k, flops = _count_grouped_products(args, results[0])
    elif packet in flop_registry:  # convolutions
        kind, flops = "product", int(flop_registry[packet](*args, **kwargs, out_val=tuple(results)))
        m, n, k, times = results[0].numel(), 1, flops // max(1, 2 * results[0].numel()), 1
    elif "dequantize" in operator:
        kind = "expansion"
    elif plain_operator in _COPIES or operator in _COPIES:
        kind = "copy"
        read = min(read, 2 * written)  # of a table, only what is written
    elif any(part in operator for part in _REDUCTIONS) or (inputs and 2 * results[0].numel() < inputs[0].numel()):
        kind = "reduction"
    if "block" in scope:  # what a chunk does outside of its blocks is for the head's gradient
        name = "loss"
    return Done(kind, name, scope, width, generation, (m, n, k, times, flops, read, written))


def _count_attention_flops(operator: str, args: Any, kwargs: Any) -> int:
    """Return the FLOPs of attention: two products of queries, keys and values forward and five backward."""
    back = "backward" in operator
    q, k, v = args[1:4] if back else args[:3]
    channels = (3 * q.shape[-1] + 2 * v.shape[-1]) if back else q.shape[-1] + v.shape[-1]
    if (edges := next((x for x in args if type(x) is torch.Tensor and x.dtype == torch.int32), None)) is not None:
        with _disable_current_modes():  # of a pack's sequences, whose heads are the second dimension
            lengths = edges.diff().tolist()
        return int(2 * q.shape[1] * sum(length * (length + 1) // 2 for length in lengths) * channels)
    masked = any(isinstance(x, torch.Tensor) for x in (kwargs.get("attn_mask"), *(args[6:] if not back else ())))
    causal = True in [x for x in args if isinstance(x, bool)] and not masked
    queries, keys = q.shape[-2], k.shape[-2]
    pairs = keys * (keys + 1) // 2 if causal and queries == keys else queries * keys
    return int(2 * math.prod(q.shape[:-2]) * pairs * channels)


def _count_grouped_products(args: Any, result: Any) -> tuple[int, int, int, int, int]:
    """Return how many products a grouped product is, the sizes of one, and the FLOPs of all."""
    a, b, *rest = args
    groups = a.shape[0] if a.dim() == 3 else b.shape[0] if b.dim() == 3 else rest[0].numel()
    flops = 2 * a.numel() * b.shape[-1] if a.dim() == 2 and b.dim() == 3 else 2 * math.prod(a.shape) * b.shape[-1]
    m = a.shape[-2] // groups if a.dim() == 2 and b.dim() == 3 else a.shape[-2]
    k = a.shape[-1] // groups if a.dim() == 2 and b.dim() == 2 else a.shape[-1]
    return groups, m, b.shape[-1], k, flops


class _Storage(NamedTuple):
    finalizer: weakref.finalize | None
    size: int


class Storages:
    """Storages that are followed.

    Args:
        released: called with the identity and the bytes of a storage whose last tensor is gone.
        existing: storages that are not counted. They must stay alive.
        block: bytes that sizes are rounded up to a multiple of.
    """

    def __init__(
        self, released: Callable[[int, int], None], existing: Iterable[torch.UntypedStorage] = (), block: int = 1
    ) -> None:
        self._released, self._block = released, block
        self._existing = list(existing)
        self._storages: dict[int, _Storage] = {id(storage): _Storage(None, 0) for storage in self._existing}

    def follow(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes by which a storage has grown since it was last seen: all of a new one."""
        key, size = id(storage), -(-storage.nbytes() // self._block) * self._block
        entry = self._storages.get(key)
        if entry is None:
            entry = _Storage(weakref.finalize(storage, self._release, key), 0)
        elif entry.finalizer is None:
            return 0
        self._storages[key] = entry._replace(size=size)
        return size - entry.size

    def forget(self, storage: torch.UntypedStorage) -> int:
        """Stop following a storage, and return its bytes; 0 if it is not followed."""
        entry = self._storages.get(id(storage))
        if entry is None or entry.finalizer is None or entry.finalizer.detach() is None:
            return 0
        self._storages[id(storage)] = _Storage(None, 0)
        return entry.size

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._storages

    def _release(self, key: int) -> None:
        self._released(key, self._storages.pop(key).size)
